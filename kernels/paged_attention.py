"""Paged attention on the GPU: one ragged Triton kernel for prefill chunks and decodes alike.

Owns the kernel, its tile sizes and its launch. What it computes is `reference.paged_attention`; its twin is
`cpu.attention`. Arguments were checked by `dispatch`.

A program takes a tile of query rows against all their keys: a few tokens of one sequence times the query heads
that share one KV head, so keys and values are read once for the whole group. Softmax is online (Milakov and
Gimelshein, 2018), in units of log2. Which sequence a program serves is found on the device by bisection, and
the grid depends on shapes alone, so a launch never waits for the device and can be recorded in a CUDA graph;
programs past the last tile return at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _sequence_of_tile(cu_seqlens_q, tile, num_seqs, TILE_TOKENS: tl.constexpr):
    """The sequence that owns `tile`: sequence s starts at tile cu_seqlens_q[s] // TILE_TOKENS + s, which leaves
    each at least as many tiles as it needs."""
    low = 0
    high = num_seqs - 1
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(cu_seqlens_q + middle) // TILE_TOKENS + middle <= tile:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def paged_attention_kernel(
    q,
    k_cache,
    v_cache,
    out,
    block_tables,
    cu_seqlens_q,
    context_lens,
    scale_log2,
    softcap_log2,
    num_seqs,
    window,
    q_token_stride,
    q_head_stride,
    out_token_stride,
    out_head_stride,
    table_stride,
    block_stride,
    head_stride,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Grid (tiles, num_kv_heads). Rows of a tile: row // GROUP is its token, row % GROUP its head in the group.

    scale_log2: scale * log2(e), or scale / softcap when CAPPED, then softcap_log2 is softcap * log2(e).
    UPCAST: multiply in float32; the interpreter needs it for bfloat16.
    """
    TILE_TOKENS: tl.constexpr = TILE_ROWS // GROUP
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    sequence = _sequence_of_tile(cu_seqlens_q, tile, num_seqs, TILE_TOKENS)
    first_row = tl.load(cu_seqlens_q + sequence)
    num_rows = tl.load(cu_seqlens_q + sequence + 1) - first_row
    token = (tile - first_row // TILE_TOKENS - sequence) * TILE_TOKENS
    if token >= num_rows:
        return
    position = tl.load(context_lens + sequence) - num_rows + token
    last_position = position + tl.minimum(TILE_TOKENS, num_rows - token) - 1

    rows = tl.arange(0, TILE_ROWS)
    row_tokens = rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    dims = tl.arange(0, PADDED_DIM)
    dim_mask = dims < HEAD_DIM
    row_mask = (row_tokens < TILE_TOKENS) & (token + row_tokens < num_rows)
    mask = row_mask[:, None] & dim_mask[None, :]
    q_rows = (first_row + token + row_tokens).to(tl.int64)
    queries = tl.load(
        q + q_rows[:, None] * q_token_stride + heads[:, None] * q_head_stride + dims[None, :],
        mask=mask,
        other=0.0,
    )
    if UPCAST:
        queries = queries.to(tl.float32)

    maxima = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    sums = tl.zeros([TILE_ROWS], tl.float32)
    result = tl.zeros([TILE_ROWS, PADDED_DIM], tl.float32)
    begin = 0
    if WINDOWED:
        begin = tl.maximum(0, position - window + 1)
    table = block_tables + sequence.to(tl.int64) * table_stride
    for start in range(begin // TILE_KEYS * TILE_KEYS, last_position + 1, TILE_KEYS):
        keys = start + tl.arange(0, TILE_KEYS)
        # Slots that no row of the tile sees are not loaded: they may hold NaN, and 0 * NaN is NaN.
        key_mask = (keys >= begin) & (keys <= last_position)
        blocks = tl.load(table + keys // BLOCK_SIZE, mask=key_mask, other=0).to(tl.int64)
        slots = blocks * block_stride + kv_head * head_stride + (keys % BLOCK_SIZE) * HEAD_DIM
        kv_mask = key_mask[:, None] & dim_mask[None, :]
        k = tl.load(k_cache + slots[:, None] + dims[None, :], mask=kv_mask, other=0.0)
        v = tl.load(v_cache + slots[:, None] + dims[None, :], mask=kv_mask, other=0.0)
        if UPCAST:
            k = k.to(tl.float32)
            v = v.to(tl.float32)
        # "ieee": float32 inputs stay float32 instead of losing 13 bits to TF32; no effect on half formats.
        scores = tl.dot(queries, tl.trans(k), input_precision="ieee") * scale_log2
        if CAPPED:
            # tanh(x) = 1 - 2 / (exp(2 x) + 1); exp overflows to infinity where tanh is 1.
            scores = softcap_log2 * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * LOG2_E)) + 1.0))
        seen = key_mask[None, :] & (keys[None, :] <= (position + row_tokens)[:, None])
        if WINDOWED:
            seen = seen & (keys[None, :] > (position + row_tokens)[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
        now = tl.maximum(maxima, tl.max(scores, 1))
        # Nothing seen yet: any finite base makes the weights of minus infinity 0.
        base = tl.where(now == float("-inf"), 0.0, now)
        shrink = tl.exp2(maxima - base)
        weights = tl.exp2(scores - base[:, None])
        sums = sums * shrink + tl.sum(weights, 1)
        result = result * shrink[:, None]
        result = tl.dot(weights.to(v.dtype), v, result, input_precision="ieee")
        maxima = now

    # Only a row of padding can have seen nothing; it is not stored.
    result = result / tl.where(sums == 0.0, 1.0, sums)[:, None]
    tl.store(
        out + q_rows[:, None] * out_token_stride + heads[:, None] * out_head_stride + dims[None, :],
        result.to(out.dtype.element_ty),
        mask=mask,
    )


@dataclass(frozen=True)
class Tiling:
    """Compile-time sizes of one launch."""

    rows: int
    """Query rows of a tile (tokens times group), a power of two >= 16 and >= the group."""
    keys: int
    """Keys of a step of the inner loop, a power of two >= 16; may span several blocks."""
    num_warps: int
    num_stages: int

    @classmethod
    def choose(cls, *, decode: bool, group: int, head_dim: int, element_size: int) -> Tiling:
        """Small tiles for decodes, which are bound by reading; larger ones for chunks, bound by arithmetic.

        Sized so that nothing spills on compute capability 8.0, 9.0 and 10.0 (`kernels.aot` shows it).
        """
        rows = max(16 if decode else 64, triton.next_power_of_2(group))
        light = element_size == 2 and head_dim <= 128
        if light:
            return cls(rows=rows, keys=64 if decode else 32, num_warps=4, num_stages=3 if decode else 2)
        keys = 16 if element_size == 4 and head_dim > 64 else 32
        return cls(rows=rows, keys=keys, num_warps=4 if decode else 8, num_stages=2)


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
    out: torch.Tensor,
    *,
    upcast: bool = False,
) -> None:
    """As `dispatch.paged_attention`. Any tiling is right for any batch; the choice goes by shapes only.

    A step of as many rows as sequences is taken for decodes. `upcast` is for the interpreter.
    """
    num_tokens, num_heads, head_dim = q.shape
    _, num_kv_heads, block_size, _ = k_cache.shape
    num_seqs = context_lens.shape[0]
    group = num_heads // num_kv_heads
    tiling = Tiling.choose(
        decode=num_tokens <= num_seqs, group=group, head_dim=head_dim, element_size=k_cache.element_size()
    )
    factor = scale / softcap if softcap is not None else scale * LOG2_E.value
    paged_attention_kernel[(num_tokens // (tiling.rows // group) + num_seqs, num_kv_heads)](
        q,
        k_cache,
        v_cache,
        out,
        block_tables,
        cu_seqlens_q,
        context_lens,
        factor,
        (softcap or 0.0) * LOG2_E.value,
        num_seqs,
        sliding_window or 0,
        q.stride(0),
        q.stride(1),
        out.stride(0),
        out.stride(1),
        block_tables.stride(0),
        k_cache.stride(0),
        k_cache.stride(1),
        GROUP=group,
        HEAD_DIM=head_dim,
        PADDED_DIM=max(16, triton.next_power_of_2(head_dim)),
        BLOCK_SIZE=block_size,
        TILE_ROWS=tiling.rows,
        TILE_KEYS=tiling.keys,
        WINDOWED=sliding_window is not None,
        CAPPED=softcap is not None,
        UPCAST=upcast,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        enable_fp_fusion=True,
    )
