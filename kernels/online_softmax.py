"""The inner loop that every attention kernel shares: a tile of query rows against a range of paged keys, in Triton.

Owns the walk along a block table, masking, the online softmax (Milakov and Gimelshein, 2018; in units of log2) and
the reading of quantised caches. Which rows and which keys is the caller's concern. Device code only.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)

PLAIN = tl.constexpr(0)
"""The cache has the queries' dtype."""
FP8 = tl.constexpr(1)
"""The cache holds e4m3 bytes, of which 448 times the block's scale is the largest."""
INT8 = tl.constexpr(2)
"""The cache holds signed bytes times the block's scale."""


@triton.jit
def widened(raw, FORMAT: tl.constexpr, dtype: tl.constexpr):
    """Bytes of a quantised cache as `dtype`, exactly: by their bits, which also serves devices that know no fp8 and
    costs fewer cycles than converting integers. For FP8 the result is 2**-8 of the number."""
    bits = raw.to(tl.uint16)
    if FORMAT == FP8:
        # Exponent and mantissa of e4m3 lie in a float16 as they are, its bias being 8 less.
        return (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True).to(dtype)
    # 0x6400 is 1024, whose last place is 1: what stands there is added to it.
    return ((bits ^ 0x80) | 0x6400).to(tl.float16, bitcast=True).to(dtype) - 1152.0


@triton.jit
def attend(
    queries,
    positions,
    k_cache,
    v_cache,
    k_scales,
    v_scales,
    table,
    kv_head,
    begin,
    end,
    scale_log2,
    softcap_log2,
    window,
    block_stride,
    head_stride,
    scale_stride,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    FORMAT: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Rows against keys begin .. end - 1 of the sequence whose block table starts at `table`.

    queries [TILE_ROWS, PADDED_DIM], zero past HEAD_DIM; positions [TILE_ROWS] of the rows, looked at if CAUSAL or
    WINDOWED. scale_log2: scale * log2(e), or scale / softcap when CAPPED, then softcap_log2 is softcap * log2(e).
    k_scales and v_scales [num_blocks, num_kv_heads] of a quantised cache, blocks scale_stride apart.
    UPCAST: multiply in float32; the interpreter needs it for bfloat16.

    Returns the largest score of each row (log2; minus infinity: none), the sum of weights relative to it, and the
    weighted sum of values [TILE_ROWS, PADDED_DIM], all float32.
    """
    dims = tl.arange(0, PADDED_DIM)
    dim_mask = dims < HEAD_DIM
    if UPCAST:
        queries = queries.to(tl.float32)
    elif FORMAT != PLAIN and queries.dtype != tl.float32:
        queries = queries.to(tl.float16)

    maxima = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    sums = tl.zeros([TILE_ROWS], tl.float32)
    result = tl.zeros([TILE_ROWS, PADDED_DIM], tl.float32)
    for start in range(begin // TILE_KEYS * TILE_KEYS, end, TILE_KEYS):
        keys = start + tl.arange(0, TILE_KEYS)
        # Slots that no row of the tile sees are not loaded: they may hold NaN, and 0 * NaN is NaN.
        key_mask = (keys >= begin) & (keys < end)
        blocks = tl.load(table + keys // BLOCK_SIZE, mask=key_mask, other=0).to(tl.int64)
        slots = blocks * block_stride + kv_head * head_stride + (keys % BLOCK_SIZE) * HEAD_DIM
        kv_mask = key_mask[:, None] & dim_mask[None, :]
        k = tl.load(k_cache + slots[:, None] + dims[None, :], mask=kv_mask, other=0)
        v = tl.load(v_cache + slots[:, None] + dims[None, :], mask=kv_mask, other=0)
        if FORMAT != PLAIN:
            scales = blocks * scale_stride + kv_head
            k_scale = tl.load(k_scales + scales, mask=key_mask, other=0.0)
            v_scale = tl.load(v_scales + scales, mask=key_mask, other=0.0)
            if FORMAT == FP8:
                k_scale = k_scale * 256.0
                v_scale = v_scale * 256.0
            k = widened(k, FORMAT, queries.dtype)
            # Scales are powers of two, so this is exact. (Weights times scales might leave float16's range.)
            v = widened(v, FORMAT, queries.dtype) * v_scale.to(queries.dtype)[:, None]
        if UPCAST:
            k = k.to(tl.float32)
            v = v.to(tl.float32)
        # "ieee": float32 inputs stay float32 instead of losing 13 bits to TF32; no effect on half formats.
        scores = tl.dot(queries, tl.trans(k), input_precision="ieee") * scale_log2
        if FORMAT != PLAIN:
            scores = scores * k_scale[None, :]
        if CAPPED:
            # tanh(x) = 1 - 2 / (exp(2 x) + 1); exp overflows to infinity where tanh is 1.
            scores = softcap_log2 * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * LOG2_E)) + 1.0))
        seen = key_mask[None, :]
        if CAUSAL:
            seen = seen & (keys[None, :] <= positions[:, None])
        if WINDOWED:
            seen = seen & (keys[None, :] > positions[:, None] - window)
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
    return maxima, sums, result


@triton.jit
def store_partial(
    partials,
    partial_lse,
    partial,
    rows,
    heads,
    num_rows,
    maxima,
    sums,
    result,
    row_mask,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
):
    """Leave a tile's share of its rows for `merge_partials`: see there for the layout. `rows` int64 [TILE_ROWS] and
    `heads` [TILE_ROWS] say whose share it is."""
    dims = tl.arange(0, PADDED_DIM)
    places = (partial * num_rows + rows) * NUM_HEADS + heads
    empty = sums == 0.0
    lse = tl.where(empty, float("-inf"), maxima + tl.log2(tl.where(empty, 1.0, sums)))
    tl.store(partial_lse + places, lse, mask=row_mask)
    result = result / tl.where(empty, 1.0, sums)[:, None]
    mask = (row_mask & (sums != 0.0))[:, None] & (dims < HEAD_DIM)[None, :]
    tl.store(partials + places[:, None] * HEAD_DIM + dims[None, :], result, mask=mask)
