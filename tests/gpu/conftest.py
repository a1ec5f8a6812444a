"""Without a GPU Triton's interpreter runs the kernels; with one, the tests that need the interpreter are left
out, since it can only be chosen before triton is imported."""

from __future__ import annotations

import importlib.util
import os

INTERPRETED = ["test_adjustments.py", "test_gather.py", "test_grammar.py", "test_simulated.py"]


def _has_gpu() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


collect_ignore: list[str] = []
if _has_gpu():
    collect_ignore += INTERPRETED
else:
    os.environ["TRITON_INTERPRET"] = "1"
