"""Attention of a batch whose sequences share a long prefix: the prefix is read once for all of them, in Triton.

Owns the pass over the shared blocks and the order of the passes (as "cascade inference" of FlashInfer, and Hydragen,
2024). The pass over each sequence's own keys is `paged_attention`'s kernel, the merge `merge_partials`'. What it
computes is `reference.paged_attention`.

Without it a prefix of C keys that S sequences share is read S times; tiles here hold rows of any sequences, so it
is read once per tile of rows, and decodes multiply matrices instead of vectors.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from octavo.kernels.layer_cache import Scales
from octavo.kernels.merge_partials import Partials, merge_partials
from octavo.kernels.online_softmax import attend, store_partial
from octavo.kernels.paged_attention import (
    SPLIT_KEYS_MIN,
    AttentionCall,
    Tiling,
    choose_splits,
    launch,
    multiprocessors,
)


@triton.jit(do_not_specialize=["num_rows_all", "num_keys"])
def prefix_attention_kernel(
    q,
    k_cache,
    v_cache,
    k_scales,
    v_scales,
    partials,
    partial_lse,
    shared_blocks,
    scale_log2,
    softcap_log2,
    num_rows_all,
    num_keys,
    q_token_stride,
    q_head_stride,
    block_stride,
    head_stride,
    scale_stride,
    GROUP: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    CAPPED: tl.constexpr,
    FORMAT: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Grid (tiles, num_kv_heads, splits). Every row sees all num_keys keys of `shared_blocks`; rows are packed
    whatever sequence they are of. Writes parts 0 .. splits - 1; for the rest see `paged_attention_kernel`."""
    TILE_TOKENS: tl.constexpr = TILE_ROWS // GROUP
    kv_head = tl.program_id(1)
    rows = tl.arange(0, TILE_ROWS)
    row_tokens = rows // GROUP
    q_rows = (tl.program_id(0) * TILE_TOKENS + row_tokens).to(tl.int64)
    heads = kv_head * GROUP + rows % GROUP
    dims = tl.arange(0, PADDED_DIM)
    row_mask = (row_tokens < TILE_TOKENS) & (q_rows < num_rows_all)
    queries = tl.load(
        q + q_rows[:, None] * q_token_stride + heads[:, None] * q_head_stride + dims[None, :],
        mask=row_mask[:, None] & (dims < HEAD_DIM)[None, :],
        other=0.0,
    )
    keys = tl.cdiv(tl.cdiv(num_keys, tl.num_programs(2)), TILE_KEYS) * TILE_KEYS
    keys = tl.maximum(keys, SPLIT_KEYS)
    begin = tl.program_id(2) * keys
    maxima, sums, result = attend(
        queries,
        rows,
        k_cache,
        v_cache,
        k_scales,
        v_scales,
        shared_blocks,
        kv_head,
        begin,
        tl.minimum(num_keys, begin + keys),
        scale_log2,
        softcap_log2,
        0,
        block_stride,
        head_stride,
        scale_stride,
        HEAD_DIM=HEAD_DIM,
        PADDED_DIM=PADDED_DIM,
        BLOCK_SIZE=BLOCK_SIZE,
        TILE_ROWS=TILE_ROWS,
        TILE_KEYS=TILE_KEYS,
        CAUSAL=False,
        WINDOWED=False,
        CAPPED=CAPPED,
        FORMAT=FORMAT,
        UPCAST=UPCAST,
    )
    store_partial(
        partials,
        partial_lse,
        tl.program_id(2),
        q_rows,
        heads,
        num_rows_all,
        maxima,
        sums,
        result,
        row_mask,
        NUM_HEADS=NUM_HEADS,
        HEAD_DIM=HEAD_DIM,
        PADDED_DIM=PADDED_DIM,
    )


def prefix_tiling(call: AttentionCall) -> Tiling:
    """Rows are many whatever the step, or sharing would not pay; a chunk's tile fits."""
    return Tiling.choose(
        decode=call.q.shape[0] * call.group <= 16,
        group=call.group,
        head_dim=call.q.shape[2],
        element_size=call.q.element_size(),
        quantised=call.scales is not None,
    )


def cascade_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    softcap: float | None,
    out: torch.Tensor,
    *,
    num_shared_blocks: int,
    shared_row: int = 0,
    scales: Scales | None = None,
    upcast: bool = False,
) -> None:
    """`paged_attention` without a sliding window, of sequences whose tables all begin with the same blocks.

    num_shared_blocks  whole blocks, at least 1, all computed before this step: no row stands inside them
    shared_row         a row of `block_tables` that begins with them; sequences without rows in this step need not

    Nothing checks the tables: the caller knows what it shares. The other arguments are `paged_attention`'s.
    """
    call = AttentionCall(
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        block_tables=block_tables,
        cu_seqlens_q=cu_seqlens_q,
        context_lens=context_lens,
        scale=scale,
        sliding_window=None,
        softcap=softcap,
        scales=scales,
        upcast=upcast,
    )
    num_keys = num_shared_blocks * k_cache.shape[2]
    tiling = prefix_tiling(call)
    num_tiles = triton.cdiv(q.shape[0], tiling.rows // call.group)
    num_kv_heads = k_cache.shape[1]
    prefix_splits = max(
        1,
        choose_splits(
            programs=num_tiles * num_kv_heads,
            keys_max=num_keys,
            num_multiprocessors=multiprocessors(q.device),
        ),
    )
    suffix_splits = max(1, call.choose_splits(skipped_keys=num_keys))
    partials = Partials.empty(prefix_splits + suffix_splits, q)
    k_bytes, v_bytes = call.caches()
    prefix_attention_kernel[(num_tiles, num_kv_heads, prefix_splits)](
        q,
        k_bytes,
        v_bytes,
        *call.scale_arguments(),
        partials.results,
        partials.lse,
        block_tables[shared_row],
        *call.numbers(),
        q.shape[0],
        num_keys,
        q.stride(0),
        q.stride(1),
        k_cache.stride(0),
        k_cache.stride(1),
        call.scale_stride,
        **call.constants(),
        TILE_ROWS=tiling.rows,
        TILE_KEYS=tiling.keys,
        SPLIT_KEYS=SPLIT_KEYS_MIN,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        enable_fp_fusion=True,
    )
    launch(call, out, partials, splits=suffix_splits, first_partial=prefix_splits, skipped_keys=num_keys)
    merge_partials(partials, cu_seqlens_q, out)
