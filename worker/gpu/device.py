"""Is there a GPU that can serve this model? Each answer says what was found, what is needed, and what
helps."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from worker.errors import StartError
from worker.models.spec import ModelSpec

MIN_CAPABILITY = (8, 0)
HEAD_DIMS = (64, 128, 256)
_HELP = "--attention torch serves it without FlashInfer"


@dataclass(frozen=True, slots=True)
class Gpu:
    device: torch.device
    name: str
    capability: tuple[int, int]
    n_sms: int
    memory_bytes: int

    @property
    def has_pdl(self) -> bool:
        """Programmatic dependent launch exists from compute capability 9.0."""
        return self.capability >= (9, 0)


def find_gpu(index: int = 0) -> Gpu:
    if not torch.cuda.is_available():
        reason = (
            "torch was built without CUDA"
            if torch.version.cuda is None
            else "no NVIDIA GPU or driver is visible"
        )
        raise StartError(f"--attention flashinfer needs an NVIDIA GPU, but {reason}; {_HELP}")
    properties = torch.cuda.get_device_properties(index)
    capability = (properties.major, properties.minor)
    if capability < MIN_CAPABILITY:
        raise StartError(
            f"{properties.name} has compute capability {capability[0]}.{capability[1]}, but FlashInfer needs "
            f"{MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]} (Ampere) or newer; {_HELP}"
        )
    return Gpu(
        device=torch.device("cuda", index),
        name=properties.name,
        capability=capability,
        n_sms=properties.multi_processor_count,
        memory_bytes=properties.total_memory,
    )


def check_model(spec: ModelSpec) -> None:
    """Raises StartError when the kernels lack the model's head size or rotary width."""
    if spec.head_dim not in HEAD_DIMS:
        sizes = ", ".join(str(size) for size in HEAD_DIMS)
        raise StartError(f"the model's head size is {spec.head_dim}, but FlashInfer has {sizes}; {_HELP}")
    if spec.rope.rotary_dim != spec.head_dim:
        raise StartError(
            f"the model rotates {spec.rope.rotary_dim} of {spec.head_dim} dimensions of a head, but the "
            f"GPU's decode kernel rotates all of them; {_HELP}"
        )
