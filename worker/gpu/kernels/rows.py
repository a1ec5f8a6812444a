"""The device's row table: block tables and last tokens, brought up to date by one packed delta per step."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["n"])
def scatter_blocks_kernel(rows_ptr, columns_ptr, blocks_ptr, table_ptr, n, table_stride, BLOCK: tl.constexpr):
    """table[rows[i], columns[i]] = blocks[i] for i < n."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    row = tl.load(rows_ptr + i, mask=mask, other=0).to(tl.int64)
    column = tl.load(columns_ptr + i, mask=mask, other=0)
    block = tl.load(blocks_ptr + i, mask=mask, other=0)
    tl.store(table_ptr + row * table_stride + column, block, mask=mask)


@triton.jit
def gather_pages_kernel(rows_ptr, page_indptr_ptr, table_ptr, out_ptr, table_stride, BLOCK: tl.constexpr):
    """out[indptr[i] … indptr[i + 1]) = the first blocks of row rows[i]: FlashInfer's page list.
    Grid: (rows, column tiles of the longest row)."""
    b = tl.program_id(0)
    start = tl.load(page_indptr_ptr + b)
    n = tl.load(page_indptr_ptr + b + 1) - start
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = c < n
    row = tl.load(rows_ptr + b).to(tl.int64)
    tl.store(out_ptr + start + c, tl.load(table_ptr + row * table_stride + c, mask=mask), mask=mask)


@triton.jit(do_not_specialize=["n"])
def decode_inputs_kernel(
    rows_ptr, lens_ptr, last_ptr, ids_ptr, position_ptr, token_row_ptr, n, BLOCK: tl.constexpr
):
    """For the decode rows of a step: ids[i] = last token of the row, position and row of the token; padding
    rows (length 0) get token 0, position 0 and row -1."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    length = tl.load(lens_ptr + i, mask=mask, other=0)
    live = mask & (length > 0)
    row = tl.load(rows_ptr + i, mask=live, other=0)
    token = tl.load(last_ptr + row, mask=live, other=0)
    tl.store(ids_ptr + i, token, mask=mask)
    tl.store(position_ptr + i, tl.maximum(length - 1, 0), mask=mask)
    tl.store(token_row_ptr + i, tl.where(live, row, -1), mask=mask)


@triton.jit(
    do_not_specialize=["n_decode", "n_chunk", "n_total"],
    do_not_specialize_on_alignment=["chunk_ids_ptr", "chunk_position_ptr", "chunk_row_ptr"],
)
def mixed_inputs_kernel(
    rows_ptr,
    lens_ptr,
    last_ptr,
    chunk_ids_ptr,
    chunk_position_ptr,
    chunk_row_ptr,
    ids_ptr,
    position_ptr,
    token_row_ptr,
    n_decode,
    n_chunk,
    n_total,
    BLOCK: tl.constexpr,
):
    """The tokens of a mixed step: decode rows, then the chunks' tokens, then padding up to n_total. Rows
    are given for chunk tokens alone, -1 elsewhere: decode attention rotates and appends its own."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n_total
    is_decode = i < n_decode
    is_chunk = (i >= n_decode) & (i < n_decode + n_chunk)
    length = tl.load(lens_ptr + i, mask=is_decode, other=0)
    row = tl.load(rows_ptr + i, mask=is_decode, other=0)
    last = tl.load(last_ptr + row, mask=is_decode, other=0)
    c = i - n_decode
    token = tl.where(is_decode, last, tl.load(chunk_ids_ptr + c, mask=is_chunk, other=0))
    position = tl.load(chunk_position_ptr + c, mask=is_chunk, other=0)
    chunk_row = tl.load(chunk_row_ptr + c, mask=is_chunk, other=-1)
    tl.store(ids_ptr + i, token, mask=mask)
    tl.store(position_ptr + i, tl.where(is_decode, tl.maximum(length - 1, 0), position), mask=mask)
    tl.store(token_row_ptr + i, chunk_row, mask=mask)


@triton.jit
def take_rows_kernel(x_ptr, index_ptr, out_ptr, width, BLOCK: tl.constexpr):
    """out[i] = x[index[i]], rows of `width`. Grid: (rows, column tiles)."""
    i = tl.program_id(0)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = c < width
    source = tl.load(index_ptr + i).to(tl.int64)
    tl.store(out_ptr + i.to(tl.int64) * width + c, tl.load(x_ptr + source * width + c, mask=mask), mask=mask)
