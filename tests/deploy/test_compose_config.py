"""What docker compose makes of the files and the variables; needs its command, no engine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def _has_compose() -> bool:
    if shutil.which("docker") is None:
        return False
    return subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode == 0


pytestmark = [
    pytest.mark.docker,
    pytest.mark.skipif(not _has_compose(), reason="needs docker compose"),
]


def _config(*, check: bool = True, **env: str) -> Any:
    done = subprocess.run(
        ["docker", "compose", "config", "--format", "json"],
        cwd=ROOT,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
    )
    if not check:
        return done
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_workers_are_on_the_cpu_by_default() -> None:
    worker = _config()["services"]["worker"]
    assert worker["image"] == "quire/worker-cpu:0.1.0"
    assert worker["build"]["dockerfile"] == "deploy/docker/worker-cpu.Dockerfile"
    assert "devices" not in json.dumps(worker.get("deploy", {}))


@pytest.mark.parametrize(("gpus", "count"), [("", -1), ("all", -1), ("2", 2)])
def test_one_variable_puts_workers_on_gpus_that_they_claim(gpus: str, count: int) -> None:
    config = _config(QUIRE_DEVICE="gpu", **({"QUIRE_GPUS": gpus} if gpus else {}))
    worker = config["services"]["worker"]
    assert worker["image"] == "quire/worker-gpu:0.1.0"
    assert worker["build"]["dockerfile"] == "deploy/docker/worker-gpu.Dockerfile"
    assert Path(worker["build"]["context"]) == ROOT
    (device,) = worker["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": count, "capabilities": ["gpu"]}
    assert worker["environment"]["QUIRE_CLAIM_GPU"] == "true"
    mounts = {mount["target"]: mount["source"] for mount in worker["volumes"]}
    assert mounts[worker["environment"]["QUIRE_GPU_LOCK_DIR"]] == "gpu-locks", "one folder of locks for all"
    assert worker["read_only"]
    assert worker["cap_drop"] == ["ALL"]


def test_what_the_gpu_image_is_compiled_for_can_be_chosen() -> None:
    config = _config(QUIRE_DEVICE="gpu", QUIRE_CUDA_ARCHS="9.0a", QUIRE_MAX_JOBS="2", BASE_IMAGE="mine")
    args = config["services"]["worker"]["build"]["args"]
    assert (args["CUDA_ARCHS"], args["MAX_JOBS"], args["BASE_IMAGE"]) == ("9.0a", "2", "mine")


def test_a_device_that_is_none_is_named() -> None:
    done = _config(QUIRE_DEVICE="tpu", check=False)
    assert done.returncode != 0
    assert "tpu.yml" in done.stderr


def test_traces_are_asked_for_in_every_process_of_ours() -> None:
    services = _config(QUIRE_OTLP_ENDPOINT="http://collector:4318")["services"]
    for name in ("router", "worker"):
        assert services[name]["environment"]["QUIRE_OTLP_ENDPOINT"] == "http://collector:4318"
