"""A decoder of the Llama line on the GPU: one forward pass of decode rows and prompt chunks together.

It owns no memory but the rotary tables: activations lie in `Buffers`, keys and values in `PagedCache`.
Everything is launched on the current stream; nothing waits for the device, so a pass over decode rows alone
can be captured as a CUDA graph.
"""

from __future__ import annotations

import torch

from worker.attention.flashinfer_backend import FlashInferPrefill
from worker.gpu.buffers import SAMPLE_TILE, Buffers
from worker.gpu.cache import PagedCache
from worker.gpu.choices import (
    DecodeTiles,
    Role,
    decode_splits,
    decode_tiles,
    max_groups,
    shared_group_rows,
)
from worker.gpu.device import Gpu
from worker.gpu.head import HeadTensors
from worker.gpu.inputs import RowState
from worker.gpu.linear import Kernel
from worker.gpu.products import Products
from worker.gpu.rope_table import rope_tables
from worker.models.spec import DecoderWeights, LayerWeights


class GpuDecoder:
    def __init__(
        self,
        weights: DecoderWeights,
        *,
        buffers: Buffers,
        cache: PagedCache,
        rows: RowState,
        gpu: Gpu,
        max_context: int,
        tiles: DecodeTiles | None = None,
    ) -> None:
        self.weights = weights
        self.spec = weights.spec
        self.buffers = buffers
        self.cache = cache
        self.rows = rows
        self.gpu = gpu
        self.pdl = gpu.has_pdl
        self._tiles = tiles
        """Of every size; None: chosen by rows."""
        self.cos, self.sin = rope_tables(self.spec.rope, n_positions=max_context, device=gpu.device)
        spec = self.spec
        self._group = spec.n_heads // spec.n_kv_heads
        self._group_pad = max(16, 1 << (self._group - 1).bit_length())
        self._windows = spec.sliding_windows or (None,) * spec.n_layers
        self.group_rows = shared_group_rows(
            group=self._group, windows=any(window is not None for window in self._windows)
        )
        self.leaves_keys = False
        """Whether chunks' rotated keys are also left in `buffers.qkv`."""
        self._products = Products(buffers=buffers, gpu=gpu, rms_eps=self.spec.rms_eps)

    # ---- the pass ----

    def forward(self, *, n_rows: int, head: HeadTensors) -> None:
        """Of decode rows alone, padding included, from `buffers.ids` to `buffers.hidden`."""
        self.embed(n_rows)
        for index in range(self.spec.n_layers):
            self.before_attention(index, n_tokens=n_rows, first_chunk=n_rows)
            self.decode_attention(index, n_rows=n_rows, head=head)
            self.after_attention(index, n_tokens=n_rows)

    def before_attention(self, index: int, *, n_tokens: int, first_chunk: int) -> None:
        """Norm and qkv of all tokens; rope and append of those from `first_chunk` on (decode attention does
        its own). Appends come before any attention: rows of one step may share what they write."""
        b, layer = self.buffers, self.weights.layers[index]
        self._products.normed(Role.QKV, b.hidden[:n_tokens], layer.input_norm, layer.qkv, b.qkv[:n_tokens])
        if n_tokens > first_chunk:
            self._rope_append(index, layer, start=first_chunk, end=n_tokens)

    def prefill_attention(self, index: int, *, first: int, n_chunk: int, prefill: FlashInferPrefill) -> None:
        """Of the chunks' tokens, `n_chunk` from `first` on."""
        b = self.buffers
        n_heads, n_kv_heads, head_dim = self.spec.n_heads, self.spec.n_kv_heads, self.spec.head_dim
        shape = (n_chunk, n_heads, head_dim)
        qkv = b.qkv[first : first + n_chunk].view(n_chunk, n_heads + 2 * n_kv_heads, head_dim)
        prefill.run(
            index,
            b.q[first : first + n_chunk].view(shape),
            (self.cache.k[index], self.cache.v[index]),
            b.attention[first : first + n_chunk].view(shape),
            own=(qkv[:, n_heads : n_heads + n_kv_heads], qkv[:, n_heads + n_kv_heads :]),
            scale=self.cache.scale,
        )

    def after_attention(self, index: int, *, n_tokens: int) -> None:
        b = self.buffers
        self._finish_layer(self.weights.layers[index], b.attention[:n_tokens], b.hidden[:n_tokens])

    def finish_rows(self, *, n_rows: int, index: torch.Tensor) -> None:
        """The last layer behind its attention, of the tokens index[:n_rows] alone; their hidden states are
        the first of `buffers.hidden` then."""
        b = self.buffers
        hidden, attention = b.sampled_hidden[:n_rows], b.sampled_attention[:n_rows]
        self._take_rows(b.hidden, index, hidden)
        self._take_rows(b.attention, index, attention)
        self._finish_layer(self.weights.layers[-1], attention, hidden)
        b.hidden[:n_rows].copy_(hidden)

    def logits(self, *, n_rows: int, index: torch.Tensor | None) -> None:
        """From `buffers.hidden` to `buffers.logits[:n_rows]`. index: int32, the token of each row; None:
        row i is token i."""
        b = self.buffers
        head = self.weights.lm_head
        out = b.logits[:n_rows]
        self._products.norm(b.hidden, self.weights.final_norm, b.sampled_hidden, n_rows=n_rows, index=index)
        x = b.sampled_hidden[:n_rows]
        choice = self._products.choose(Role.HEAD, n=head.shape[0], k=head.shape[1], m=n_rows)
        if choice.kernel is Kernel.CUBLAS:
            torch.mm(x, head.t(), out_dtype=torch.float32, out=out)
        else:
            self._products.run(x, head, out, choice=choice, normed=True)

    def prompt_logits(self, *, start: int, end: int) -> torch.Tensor:
        """float32 [end - start, vocab] of these tokens of the pass. Allocates; may overwrite
        `buffers.normed`."""
        b = self.buffers
        n = end - start
        self._products.norm(b.hidden[start:end], self.weights.final_norm, b.normed, n_rows=n)
        return torch.mm(b.normed[:n], self.weights.lm_head.t(), out_dtype=torch.float32)

    # ---- parts ----

    def _finish_layer(self, layer: LayerWeights, attention: torch.Tensor, hidden: torch.Tensor) -> None:
        self._products.residual(Role.O, attention, layer.o, layer.o_bias, hidden)
        self._mlp(layer, hidden)

    def _mlp(self, layer: LayerWeights, hidden: torch.Tensor) -> None:
        b = self.buffers
        n_tokens = hidden.shape[0]
        inner = b.inner[:n_tokens]
        n = self.spec.intermediate_size
        choice = self._products.choose(Role.GATE_UP, n=n, k=self.spec.hidden_size, m=n_tokens)
        if choice.kernel is Kernel.CUBLAS:
            self._products.norm(hidden, layer.post_norm, b.normed, n_rows=n_tokens)
            gate_up = b.gate_up[:n_tokens]
            torch.mm(b.normed[:n_tokens], layer.gate_up.t(), out=gate_up)
            self._products.silu_mul(gate_up, layer.gate_up_bias, inner)
        elif choice.fuse_norm:
            self._products.run(
                hidden,
                layer.gate_up,
                inner,
                choice=choice,
                g=layer.post_norm,
                bias=layer.gate_up_bias,
                gated=True,
            )
        else:
            self._products.norm(hidden, layer.post_norm, b.normed, n_rows=n_tokens)
            self._products.run(
                b.normed[:n_tokens], layer.gate_up, inner, choice=choice, bias=layer.gate_up_bias, gated=True
            )
        self._products.residual(Role.DOWN, inner, layer.down, layer.down_bias, hidden)

    # ---- launches ----

    def embed(self, n_tokens: int) -> None:
        from worker.gpu.kernels.pointwise import embed_kernel

        b = self.buffers
        hidden = self.spec.hidden_size
        # The first kernel of a pass starts only when all before it has ended; what it lets start early may
        # then read the step's inputs without waiting.
        embed_kernel[(n_tokens, -(-hidden // 1024))](
            b.ids, self.weights.embed, b.hidden, hidden, self.weights.embed.shape[0], BLOCK=1024, PDL=False
        )

    def _take_rows(self, x: torch.Tensor, index: torch.Tensor, out: torch.Tensor) -> None:
        from worker.gpu.kernels.rows import take_rows_kernel

        n_rows, width = out.shape
        take_rows_kernel[(n_rows, -(-width // 1024))](x, index, out, width, BLOCK=1024)

    def _rope_append(self, index: int, layer: LayerWeights, *, start: int, end: int) -> None:
        from worker.gpu.kernels.rope import rope_append_kernel

        b, spec, cache = self.buffers, self.spec, self.cache
        s = cache.strides
        qkv = b.qkv[start:end]
        bias, qk_norm = layer.qkv_bias, layer.q_norm is not None
        rope_append_kernel[(end - start,)](
            qkv,
            b.q[start:end],
            cache.k[index],
            cache.v[index],
            b.token_row[start:end],
            b.position[start:end],
            self.rows.table,
            self.cos,
            self.sin,
            qkv if bias is None else bias,
            layer.q_norm if layer.q_norm is not None else qkv,
            layer.k_norm if layer.k_norm is not None else qkv,
            spec.rms_eps,
            self.rows.table.stride(0),
            s.block,
            s.position,
            s.head,
            1.0 / cache.scale,
            N_HEADS=spec.n_heads,
            N_KV=spec.n_kv_heads,
            N_HEADS_PAD=_power_of_two(spec.n_heads),
            N_KV_PAD=_power_of_two(spec.n_kv_heads),
            D=spec.head_dim,
            BLOCK_SIZE=cache.block_size,
            BIAS=bias is not None,
            QK_NORM=qk_norm,
            LEAVE=self.leaves_keys,
            PDL=self.pdl,
            num_warps=4,
            launch_pdl=self.pdl,
        )

    def decode_attention(self, index: int, *, n_rows: int, head: HeadTensors) -> None:
        """Of the step's decode rows; rows of length 0 cost next to nothing."""
        from worker.gpu.kernels.decode import decode_attention_kernel

        b, spec, cache = self.buffers, self.spec, self.cache
        tiles = self._tiles or decode_tiles(n_rows)
        s = cache.strides
        layer = self.weights.layers[index]
        window = self._windows[index]
        n_splits = decode_splits(rows=n_rows, n_kv_heads=spec.n_kv_heads, n_sms=self.gpu.n_sms)
        bias = layer.qkv_bias
        n_groups = max_groups(n_rows=n_rows, group_rows=self.group_rows)
        decode_attention_kernel[(spec.n_kv_heads, n_rows + n_groups, n_splits)](
            b.qkv,
            b.attention,
            cache.k[index],
            cache.v[index],
            head.rows,
            head.lens,
            head.prefix,
            head.members,
            self.rows.table,
            self.cos,
            self.sin,
            b.qkv if bias is None else bias,
            layer.q_norm if layer.q_norm is not None else b.qkv,
            layer.k_norm if layer.k_norm is not None else b.qkv,
            b.attention_part,
            b.attention_ml,
            b.attention_count,
            head.chunk,
            spec.rms_eps,
            spec.head_dim**-0.5,
            cache.scale,
            window or 0,
            self.rows.table.stride(0),
            s.block,
            s.position,
            s.head,
            n_splits,
            n_rows,
            N_HEADS=spec.n_heads,
            N_KV=spec.n_kv_heads,
            D=spec.head_dim,
            GROUP=self._group,
            GROUP_PAD=self._group_pad,
            BLOCK_SIZE=cache.block_size,
            BLOCK_T=tiles.block_t,
            SHARED=n_groups > 0,
            BIAS=bias is not None,
            QK_NORM=layer.q_norm is not None,
            WINDOW=window is not None,
            PDL=self.pdl,
            STAGES=tiles.stages,
            num_warps=tiles.warps,
            launch_pdl=self.pdl,
        )


def n_sample_tiles(vocab_size: int) -> int:
    return -(-vocab_size // SAMPLE_TILE)


def _power_of_two(value: int) -> int:
    return 1 << (value - 1).bit_length()
