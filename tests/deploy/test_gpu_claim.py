"""Claims are made by real processes and freed by the kernel, so real processes are killed here. Only the
devices are made up."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deploy.errors import NoGpuError
from deploy.gpu_claim import ClaimConfig, check_enough, claim_first, claim_gpu, wants_gpu
from deploy.gpu_list import Gpu, GpuList

ROOT = Path(__file__).resolve().parents[2]
GPUS = tuple(Gpu(uuid=f"GPU-{i}", index=i, name="H200") for i in range(4))

HOLDER = """
import sys
from pathlib import Path
from deploy.errors import NoGpuError
from deploy.gpu_claim import claim_first
from deploy.gpu_list import Gpu, GpuList

gpus = tuple(Gpu(uuid=f"GPU-{i}", index=i, name="H200") for i in range(int(sys.argv[2])))
sys.stdin.readline()
try:
    claim = claim_first(GpuList(gpus, "made up"), folder=Path(sys.argv[1]))
except NoGpuError as error:
    print("none", error, flush=True)
    raise SystemExit(1)
print(claim.gpu.uuid, flush=True)
sys.stdin.readline()
"""


class Holder:
    """A process that claims when told to, says what it got, and holds it."""

    def __init__(self, folder: Path, *, n_gpus: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(folder), str(n_gpus)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def go(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def said(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()

    @property
    def pid(self) -> int:
        return self._process.pid


@pytest.fixture
def hold(tmp_path: Path) -> Iterator[Callable[..., Holder]]:
    holders: list[Holder] = []

    def start(*, n_gpus: int = 4) -> Holder:
        holders.append(Holder(tmp_path, n_gpus=n_gpus))
        return holders[-1]

    yield start
    for holder in holders:
        holder.kill()


def test_workers_that_start_together_never_share_a_gpu(hold: Callable[..., Holder]) -> None:
    holders = [hold() for _ in range(6)]
    for holder in holders:
        holder.go()
    said = [holder.said() for holder in holders]
    assert sorted(line for line in said if not line.startswith("none")) == [gpu.uuid for gpu in GPUS]
    refused = [line for line in said if line.startswith("none")]
    assert len(refused) == 2
    assert all("no GPU is left for this worker: all 4 are held" in line for line in refused)


def test_a_killed_worker_frees_its_gpu_for_the_next(hold: Callable[..., Holder]) -> None:
    first, second = hold(n_gpus=2), hold(n_gpus=2)
    for holder in (first, second):
        holder.go()
    assert {first.said(), second.said()} == {"GPU-0", "GPU-1"}
    late = hold(n_gpus=2)
    late.go()
    message = late.said()
    assert f"process {first.pid} on " in message
    assert f"process {second.pid} on " in message
    second.kill()
    heir = hold(n_gpus=2)
    heir.go()
    assert not heir.said().startswith("none")


def test_a_claim_shows_cuda_its_gpu_alone(tmp_path: Path) -> None:
    config = ClaimConfig(claim_gpu=True, gpu_lock_dir=str(tmp_path / "locks" / "deep"))
    env = {"CUDA_VISIBLE_DEVICES": "2,0"}
    first, found = claim_gpu(config, present=GPUS, env=env)
    assert env["CUDA_VISIBLE_DEVICES"] == "GPU-2"
    assert found.why == "CUDA_VISIBLE_DEVICES is 2,0"
    second, _ = claim_gpu(config, present=GPUS, env={"CUDA_VISIBLE_DEVICES": "2,0"})
    assert second.gpu.uuid == "GPU-0"
    with pytest.raises(NoGpuError, match=r"all 2 are held \(CUDA_VISIBLE_DEVICES is 2,0\)"):
        claim_gpu(config, present=GPUS, env={"CUDA_VISIBLE_DEVICES": "2,0"})
    first.release()
    again, _ = claim_gpu(config, present=GPUS, env={"CUDA_VISIBLE_DEVICES": "2,0"})
    assert again.gpu.uuid == "GPU-2"
    for claim in (second, again):
        claim.release()


def test_locks_are_for_every_user(tmp_path: Path) -> None:
    folder = tmp_path / "locks"
    claim = claim_first(GpuList(GPUS, ""), folder=folder)
    assert folder.stat().st_mode & 0o7777 == 0o1777
    assert all(path.stat().st_mode & 0o777 == 0o666 for path in folder.iterdir())
    claim.release()


def test_an_id_never_leaves_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "locks"
    claim = claim_first(GpuList((Gpu("MIG-../../x"),), ""), folder=folder)
    assert [path.name for path in folder.iterdir()] == ["MIG-______x.lock"]
    assert list(tmp_path.iterdir()) == [folder]
    claim.release()


def test_without_a_gpu_the_message_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(
        NoGpuError, match=r"no NVIDIA GPU for this worker \(0 found\).*--gpus all.*QUIRE_CLAIM"
    ):
        claim_gpu(ClaimConfig(claim_gpu=True, gpu_lock_dir=str(tmp_path)), present=(), env={})


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NoGpuError, match="--gpu-lock-dir"):
        claim_first(GpuList(GPUS, ""), folder=tmp_path / "file" / "locks")


def test_more_workers_than_gpus_are_refused_before_anything_starts() -> None:
    check_enough(GpuList(GPUS, "4 found"), n_workers=4)
    with pytest.raises(NoGpuError, match=r"--workers is 5, but there are 4 GPUs \(4 found\).*at most 4 fits"):
        check_enough(GpuList(GPUS, "4 found"), n_workers=5)


def test_who_wants_a_gpu() -> None:
    assert wants_gpu("auto", has_flashinfer=True)
    assert wants_gpu("flashinfer", has_flashinfer=False)
    assert not wants_gpu("auto", has_flashinfer=False)
    assert not wants_gpu("torch", has_flashinfer=True)
    assert not wants_gpu("fake", has_flashinfer=True)
