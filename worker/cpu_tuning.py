"""What a process on the CPU sets once so that torch runs well: threads and the allocator."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from worker.host_cpus import host_cpus

_PARALLEL_FROM_TOKENS = 4
"""A step of fewer tokens is made of products so short that waking helpers costs what they save. Measured on
2 cores, SmolLM2-135M in 4 bits: 7.3 ms a step on one thread and 6.0 on two with 1 token, 11.8 and 8.1 with 4,
70 and 46 with 32; with one token the router and its clients make better use of the second core."""

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_KEEP_BYTES = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class ThreadPlan:
    """How many threads a step uses."""

    few: int
    """For the tokens of one or a few decode rows."""
    many: int

    def apply(self, *, n_tokens: int) -> None:
        wanted = self.many if n_tokens >= _PARALLEL_FROM_TOKENS else self.few
        if torch.get_num_threads() != wanted:
            torch.set_num_threads(wanted)


def plan_threads(asked: int) -> ThreadPlan:
    """`asked` threads always; 0: all available cores, one less for steps of a few tokens, which leaves a core
    to those who feed them."""
    if asked:
        return ThreadPlan(asked, asked)
    n_cores = host_cpus()
    return ThreadPlan(max(n_cores - 1, 1), n_cores)


def keep_freed_memory() -> None:
    """Let glibc reuse large buffers instead of returning them to the system: each step frees and asks for
    the same ones, and fresh pages cost more than the arithmetic on them. Elsewhere: nothing."""
    try:
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _KEEP_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEEP_BYTES)
    except (OSError, AttributeError):
        pass
