"""Row-wise kernels between the products: embedding lookup, RMS norm, silu-mul, bias."""

import triton
import triton.language as tl

from worker.gpu.kernels.pdl import let_successor_start, wait_for_predecessor


@triton.jit
def embed_kernel(ids_ptr, table_ptr, out_ptr, hidden, vocab, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """out [t, hidden] = table [vocab, hidden][ids [t]]; an id outside the vocabulary reads row 0."""
    t = tl.program_id(0)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    let_successor_start(PDL)
    wait_for_predecessor(PDL)
    token = tl.load(ids_ptr + t)
    token = tl.where((token >= 0) & (token < vocab), token, 0).to(tl.int64)
    row = tl.load(table_ptr + token * hidden + c, mask=c < hidden)
    tl.store(out_ptr + t.to(tl.int64) * hidden + c, row, mask=c < hidden)


@triton.jit
def rms_norm_kernel(
    x_ptr,
    g_ptr,
    out_ptr,
    index_ptr,
    hidden,
    eps,
    INDEXED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[i] = x[row] rsqrt(mean(x[row]²) + eps) g, with row = index[i] when INDEXED, else i."""
    i = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    mask = c < hidden
    g = tl.load(g_ptr + c, mask=mask, other=0.0).to(tl.float32)
    let_successor_start(PDL)
    wait_for_predecessor(PDL)
    row = i
    if INDEXED:
        row = tl.load(index_ptr + i).to(tl.int64)
    x = tl.load(x_ptr + row * hidden + c, mask=mask, other=0.0).to(tl.float32)
    r = tl.rsqrt(tl.sum(x * x) / hidden + eps)
    tl.store(out_ptr + i * hidden + c, (x * r * g).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def silu_mul_kernel(
    x_ptr, bias_ptr, out_ptr, inner, BIAS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """out [t, inner] = silu(x[:, :inner]) * x[:, inner:], the bias [2 inner] added first."""
    t = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = c < inner
    let_successor_start(PDL)
    wait_for_predecessor(PDL)
    gate = tl.load(x_ptr + t * 2 * inner + c, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + t * 2 * inner + inner + c, mask=mask, other=0.0).to(tl.float32)
    if BIAS:
        gate += tl.load(bias_ptr + c, mask=mask, other=0.0).to(tl.float32)
        up += tl.load(bias_ptr + inner + c, mask=mask, other=0.0).to(tl.float32)
    y = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + t * inner + c, y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def add_bias_kernel(x_ptr, bias_ptr, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """x [t, width] += bias [width], in place."""
    t = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = c < width
    let_successor_start(PDL)
    wait_for_predecessor(PDL)
    x = tl.load(x_ptr + t * width + c, mask=mask, other=0.0).to(tl.float32)
    x += tl.load(bias_ptr + c, mask=mask, other=0.0).to(tl.float32)
    tl.store(x_ptr + t * width + c, x.to(x_ptr.dtype.element_ty), mask=mask)
