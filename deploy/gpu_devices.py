"""The NVIDIA GPUs of this host (or container), asked of the driver. CUDA stays untouched: a process that has
initialised CUDA can't change which devices it sees."""

from __future__ import annotations

import importlib.util
from typing import Any

from deploy.gpu_list import Gpu


def present_gpus() -> tuple[Gpu, ...]:
    """In PCI order; empty without a driver, a GPU or the library `nvidia-ml-py`."""
    if importlib.util.find_spec("pynvml") is None:
        return ()
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        return tuple(_gpu(pynvml, i) for i in range(pynvml.nvmlDeviceGetCount()))
    except pynvml.NVMLError:
        return ()
    finally:
        pynvml.nvmlShutdown()


def _gpu(pynvml: Any, index: int) -> Gpu:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    return Gpu(
        uuid=_text(pynvml.nvmlDeviceGetUUID(handle)),
        index=index,
        name=_text(pynvml.nvmlDeviceGetName(handle)),
    )


def _text(value: str | bytes) -> str:
    """Older versions of the library answer in bytes."""
    return value.decode() if isinstance(value, bytes) else value
