"""What a start on a GPU refuses: each message names what was found, what is needed and what helps."""

from __future__ import annotations

import importlib.util
import tarfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("needs torch", allow_module_level=True)

import torch

from worker.backend import choose_attention, make_runner
from worker.config import WorkerConfig
from worker.errors import StartError
from worker.gpu import triton_cache
from worker.gpu.device import check_model, find_gpu
from worker.gpu.kernel_files import check_kernels
from worker.gpu.memory import Measured, gpu_kv_budget
from worker.models.config import spec_from_config

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 256, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 64, "vocab_size": 99,
    "rms_norm_eps": 1e-5, "max_position_embeddings": 64,
}  # fmt: skip
GIB = 1 << 30


def refusal(action: object, *args: object, **kwargs: object) -> str:
    with pytest.raises(StartError) as caught:
        action(*args, **kwargs)  # type: ignore[operator]
    return str(caught.value)


def test_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for version, reason in ((None, "torch was built without CUDA"), ("13.0", "no NVIDIA GPU or driver")):
        monkeypatch.setattr(torch.version, "cuda", version)
        message = refusal(find_gpu)
        assert reason in message
        assert "--attention torch" in message


def test_a_gpu_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    old = SimpleNamespace(name="Tesla T4", major=7, minor=5, multi_processor_count=40, total_memory=16 * GIB)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: old)
    message = refusal(find_gpu)
    assert "Tesla T4 has compute capability 7.5" in message
    assert "needs 8.0 (Ampere) or newer" in message
    assert "--attention torch" in message


def test_flashinfer_is_not_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "flashinfer" else find(name, *rest)
    )
    monkeypatch.setattr(
        "worker.backend._checkpoint", lambda config: SimpleNamespace(name="m", path="", kind="")
    )
    message = refusal(make_runner, WorkerConfig(model="m", attention="flashinfer"))
    assert "FlashInfer, which is not installed" in message
    assert choose_attention("auto") == "torch"
    assert choose_attention("torch") == "torch"


def test_a_head_size_that_has_no_kernels() -> None:
    message = refusal(check_model, spec_from_config({**CONFIG, "head_dim": 80}))
    assert "head size is 80, but FlashInfer has 64, 128, 256" in message
    assert "--attention torch" in message
    check_model(spec_from_config({**CONFIG, "head_dim": 128}))


def test_too_little_memory() -> None:
    measured = Measured(
        total=16 * GIB, weights=14 * GIB, workspace=GIB, transient=GIB // 2, graphs=GIB // 4, free=GIB
    )
    config = WorkerConfig(model="m", block_size=16)
    message = refusal(
        gpu_kv_budget, config, replace(measured, free=GIB // 2), bytes_per_token=131072, max_context=99
    )
    assert "not enough GPU memory for one KV block" in message
    assert "14336 MiB weights" in message
    assert "--max-batch-prefill-tokens" in message
    assert "--kv-cache-dtype fp8_e4m3" in message
    wide = WorkerConfig(model="m", block_size=16, max_batch_total_tokens=1_000_000)
    message = refusal(gpu_kv_budget, wide, measured, bytes_per_token=131072, max_context=9999)
    assert "--max-batch-total-tokens is 1000000, but " in message


class Kernel:
    """A FlashInfer build specification."""

    def __init__(self, folder: Path, *, built: bool) -> None:
        self.name = "batch_prefill_64"
        self.aot_path, self.jit_library_path = folder / "aot.so", folder / "jit.so"
        if built:
            self.aot_path.touch()


def test_kernels_neither_built_nor_buildable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    message = refusal(check_kernels, [Kernel(tmp_path, built=False)], arch="9.0a", head_dim=64)
    assert "batch_prefill_64" in message
    assert "no CUDA compiler" in message
    assert "prebuild --arch 9.0a --head-dim 64" in message
    assert "--attention torch" in message
    check_kernels([Kernel(tmp_path, built=True)], arch="9.0a", head_dim=64)
    (tmp_path / "cuda" / "bin").mkdir(parents=True)
    (tmp_path / "cuda" / "bin" / "nvcc").touch()
    check_kernels([Kernel(tmp_path / "elsewhere", built=False)], arch="9.0a", head_dim=64)


def test_triton_kernels_move_to_another_folder(tmp_path: Path) -> None:
    """Triton itself finds them at their new place, and what was being written is left behind."""
    cache = pytest.importorskip("triton.runtime.cache")
    knobs = pytest.importorskip("triton.knobs")
    here, there = tmp_path / "here", tmp_path / "there"
    with knobs.cache.scope():
        knobs.cache.dir = str(here)
        manager = cache.FileCacheManager("key")
        files = {name: manager.put(b"code", name) for name in ("kernel.cubin", "kernel.json")}
        manager.put_group("kernel.json", files)
        cache.FileCacheManager("unfinished").put(b"code", "kernel.ptx")
    with tarfile.open(tmp_path / "kernels.tgz", "w:gz") as archive:
        assert triton_cache.add_to(archive, here) == 1
    with tarfile.open(tmp_path / "kernels.tgz") as archive:
        assert triton_cache.install(archive, there) == 1
    for path in here.rglob("*.cubin"):
        path.unlink()
    with knobs.cache.scope():
        knobs.cache.dir = str(there)
        found = cache.FileCacheManager("key").get_group("kernel.json")
    assert found is not None
    assert sorted(found) == ["kernel.cubin", "kernel.json"]
    assert Path(found["kernel.cubin"]).read_bytes() == b"code"
    assert not (there / "unfinished").exists()
