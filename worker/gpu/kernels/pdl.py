"""Programmatic dependent launch: a kernel starts while its predecessor still drains.

A kernel launched with `launch_pdl` may run before the kernel in front of it has ended. It must call
`wait_for_predecessor` before it reads anything that kernel wrote, and before it writes anything that kernel
may still read; weights never change, so they may be fetched before. Every kernel of the chain waits, so the
guarantee is transitive.
"""

import triton
import triton.language as tl


@triton.jit
def wait_for_predecessor(PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_successor_start(PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
