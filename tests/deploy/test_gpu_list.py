from __future__ import annotations

import sys
import types

import pytest

from deploy.gpu_devices import present_gpus
from deploy.gpu_list import Gpu, allowed_gpus

FOUR = tuple(Gpu(uuid=f"GPU-{c * 4}-{c}", index=i, name="A100") for i, c in enumerate("abcd"))


@pytest.mark.parametrize(
    ("env", "indices", "why"),
    [
        ({}, [0, 1, 2, 3], "4 found"),
        ({"NVIDIA_VISIBLE_DEVICES": "all"}, [0, 1, 2, 3], "4 found"),
        ({"NVIDIA_VISIBLE_DEVICES": ""}, [0, 1, 2, 3], "4 found"),
        # What container runtimes with CDI leave behind: the devices are there all the same.
        ({"NVIDIA_VISIBLE_DEVICES": "void"}, [0, 1, 2, 3], "4 found"),
        ({"NVIDIA_VISIBLE_DEVICES": "none"}, [], "NVIDIA_VISIBLE_DEVICES is none"),
        ({"NVIDIA_VISIBLE_DEVICES": "0,2"}, [0, 2], "NVIDIA_VISIBLE_DEVICES is 0,2"),
        # The runtime gave four, the host's 4 to 7, and numbered them anew.
        ({"NVIDIA_VISIBLE_DEVICES": "4,5,6,7"}, [0, 1, 2, 3], "4 found"),
        ({"CUDA_VISIBLE_DEVICES": "0,2"}, [0, 2], "CUDA_VISIBLE_DEVICES is 0,2"),
        ({"CUDA_VISIBLE_DEVICES": "2, 0"}, [2, 0], "CUDA_VISIBLE_DEVICES is 2, 0"),
        ({"CUDA_VISIBLE_DEVICES": "1,1"}, [1], "CUDA_VISIBLE_DEVICES is 1,1"),
        ({"CUDA_VISIBLE_DEVICES": "1,9,2"}, [1], "CUDA_VISIBLE_DEVICES is 1,9,2"),
        ({"CUDA_VISIBLE_DEVICES": "GPU-cccc"}, [2], "CUDA_VISIBLE_DEVICES is GPU-cccc"),
        ({"CUDA_VISIBLE_DEVICES": "GPU-"}, [], "CUDA_VISIBLE_DEVICES is GPU-"),
        ({"CUDA_VISIBLE_DEVICES": "all"}, [0, 1, 2, 3], "4 found"),
        ({"CUDA_VISIBLE_DEVICES": ""}, [], "CUDA_VISIBLE_DEVICES is empty"),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, [], "CUDA_VISIBLE_DEVICES is -1"),
        ({"CUDA_VISIBLE_DEVICES": "void"}, [], "CUDA_VISIBLE_DEVICES is void"),
        (
            {"CUDA_VISIBLE_DEVICES": "1", "NVIDIA_VISIBLE_DEVICES": "2,3"},
            [3],
            "CUDA_VISIBLE_DEVICES is 1",
        ),
    ],
)
def test_lists_are_read_as_the_driver_and_the_runtime_mean_them(
    env: dict[str, str], indices: list[int], why: str
) -> None:
    found = allowed_gpus(FOUR, env)
    assert [gpu.index for gpu in found.gpus] == indices
    assert found.why == why


def test_a_slice_of_a_gpu_is_taken_as_it_is_named() -> None:
    found = allowed_gpus(FOUR, {"CUDA_VISIBLE_DEVICES": "MIG-1234"})
    assert [gpu.uuid for gpu in found.gpus] == ["MIG-1234"]


def test_the_driver_is_asked_once_and_left(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    fake = types.SimpleNamespace(
        NVMLError=RuntimeError,
        nvmlInit=lambda: calls.append("init"),
        nvmlShutdown=lambda: calls.append("shutdown"),
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda i: i,
        nvmlDeviceGetUUID=lambda i: f"GPU-{i}".encode(),
        nvmlDeviceGetName=lambda i: "H200",
        __spec__=types.SimpleNamespace(name="pynvml"),
    )
    monkeypatch.setitem(sys.modules, "pynvml", fake)  # type: ignore[arg-type]  # stands in for the module
    assert present_gpus() == (Gpu("GPU-0", 0, "H200"), Gpu("GPU-1", 1, "H200"))
    assert calls == ["init", "shutdown"]


def test_no_driver_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("driver not loaded")

    fake = types.SimpleNamespace(
        NVMLError=RuntimeError, nvmlInit=fail, __spec__=types.SimpleNamespace(name="pynvml")
    )
    monkeypatch.setitem(sys.modules, "pynvml", fake)  # type: ignore[arg-type]  # stands in for the module
    assert present_gpus() == ()
