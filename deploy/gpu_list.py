"""Which GPUs may this process use? Reads the two lists that people and container runtimes set.

`CUDA_VISIBLE_DEVICES` is CUDA's own: numbers, `GPU-…` or `MIG-…` ids; what follows an invalid entry is
ignored. `NVIDIA_VISIBLE_DEVICES` speaks to the container runtime, which has acted on it before this process
started: inside a container the GPUs are numbered anew, and a runtime that uses CDI leaves `void` there,
whatever it gave.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_NONE = frozenset({"", "-1", "none", "void", "nodevfiles"})


@dataclass(frozen=True, slots=True)
class Gpu:
    """A device as `CUDA_VISIBLE_DEVICES` takes it."""

    uuid: str
    index: int = -1
    """Its number on the PCI bus; -1: not known."""
    name: str = ""

    def __str__(self) -> str:
        number = f"GPU {self.index} " if self.index >= 0 else ""
        return f"{number}({self.name}, {self.uuid})" if self.name else f"{number}{self.uuid}"


@dataclass(frozen=True, slots=True)
class GpuList:
    gpus: tuple[Gpu, ...]
    why: str
    """For people: where the list comes from."""


def allowed_gpus(present: Sequence[Gpu], env: Mapping[str, str]) -> GpuList:
    """Of the `present` devices those that the environment allows, in the order that it names them.

    Numbers are places in `present`, which is in PCI order: CUDA's own numbering agrees when all GPUs are
    alike or CUDA_DEVICE_ORDER is PCI_BUS_ID.
    """
    gpus, why = tuple(present), f"{len(present)} found"
    asked = env.get("NVIDIA_VISIBLE_DEVICES", "").strip()
    if asked.lower() == "none":
        return GpuList((), "NVIDIA_VISIBLE_DEVICES is none")
    if asked and asked.lower() not in ("all", "void"):
        names = _split(asked)
        # As many as there are: the runtime gave these, and its numbers are the host's.
        if len(names) != len(gpus):
            gpus, why = _pick(names, gpus), f"NVIDIA_VISIBLE_DEVICES is {asked}"
    cuda = env.get("CUDA_VISIBLE_DEVICES")
    if cuda is None or cuda.strip().lower() == "all":
        return GpuList(gpus, why)
    shown = cuda.strip() or "empty"
    if cuda.strip().lower() in _NONE:
        return GpuList((), f"CUDA_VISIBLE_DEVICES is {shown}")
    return GpuList(_pick(_split(cuda), gpus), f"CUDA_VISIBLE_DEVICES is {shown}")


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _pick(names: Sequence[str], present: Sequence[Gpu]) -> tuple[Gpu, ...]:
    picked: dict[str, Gpu] = {}
    for name in names:
        gpu = _find(name, present)
        if gpu is None:
            break
        picked[gpu.uuid] = gpu
    return tuple(picked.values())


def _find(name: str, present: Sequence[Gpu]) -> Gpu | None:
    if name.isdecimal():
        return present[int(name)] if int(name) < len(present) else None
    if name.startswith("MIG-"):
        return Gpu(uuid=name)
    matching = [gpu for gpu in present if name.startswith("GPU-") and gpu.uuid.startswith(name)]
    return matching[0] if len(matching) == 1 else None
