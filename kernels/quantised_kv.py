"""A KV cache of one byte a number, fp8 (e4m3) or int8, with a scale for each block and KV head, in Triton.

Owns the kernel that writes it, turning queries and keys on the way if asked; what bytes and scales mean is written
in `reference_quantised`, and attention reads them in `online_softmax`. Everything here is exact or rounded to nearest
by integer arithmetic on bits, so the bytes do not depend on the device, and devices without fp8 instructions serve.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from octavo.kernels.layer_cache import Scales
from octavo.kernels.online_softmax import FP8, INT8, widened
from octavo.kernels.write_kv_rope import rotated_halves

FORMATS = {torch.float8_e4m3fn: FP8, torch.int8: INT8}


@triton.jit
def _scale_for(largest, FORMAT: tl.constexpr):
    """The smallest power of two by which `largest`, at least 0, divides to what a byte can hold; NaN if it isn't
    finite."""
    bits = largest.to(tl.int32, bitcast=True)
    if FORMAT == FP8:  # noqa: SIM108
        # The largest byte is 448 = 1.75 * 2**8: a longer mantissa needs one more.
        exponent = ((bits + 0x1FFFFF) >> 23) - 8
    else:
        # 127 = 1.984375 * 2**6.
        exponent = ((bits + 0x1FFFF) >> 23) - 6
    scale = (tl.maximum(exponent, 1) << 23).to(tl.float32, bitcast=True)
    return tl.where(bits < 0x7F800000, scale, float("nan"))


@triton.jit
def _reciprocal(power):
    """1 / power of a power of two from 2**-126 to 2**126, exactly."""
    return ((254 << 23) - power.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def _encoded(values, FORMAT: tl.constexpr):
    """float32 to the nearest byte, ties to even; what is too large to the largest. uint8."""
    if FORMAT == FP8:
        sign = (values.to(tl.uint32, bitcast=True) >> 24) & 0x80
        size = tl.where(tl.abs(values) < 448.0, tl.abs(values), 448.0)
        bits = size.to(tl.uint32, bitcast=True)
        # The mantissa is rounded to 3 bits; then the exponent's bias falls from 127 to 7.
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
        # Below 2**-6 bytes count multiples of 2**-9, the last place of 2**14.
        tiny = (size + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
        return (sign | tl.where(size < 0.015625, tiny, normal)).to(tl.uint8)
    # The last place of 1.5 * 2**23 is 1.
    nearest = (values + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
    return (tl.maximum(tl.minimum(nearest, 127), -127) & 0xFF).to(tl.uint8)


@triton.jit
def _decoded(raw, FORMAT: tl.constexpr):
    """float32 of bytes, exactly."""
    numbers = widened(raw, FORMAT, tl.float32)
    if FORMAT == FP8:
        numbers = numbers * 256.0
    return numbers


@triton.jit
def _turned(rows, values, cos, sin, tokens, dims, mask, cos_stride, sin_stride, HALF: tl.constexpr):
    """`values`, float32 [BLOCK, DIM] read from `rows`, turned to the positions of their tokens [BLOCK, 1]."""
    pair_mask = mask & (dims < 2 * HALF)
    pairs = dims % HALF
    c = tl.load(cos + tokens * cos_stride + pairs, mask=pair_mask, other=1.0)
    s = tl.load(sin + tokens * sin_stride + pairs, mask=pair_mask, other=0.0)
    others = tl.load(rows + tl.where(dims < HALF, HALF, -HALF), mask=pair_mask, other=0.0).to(tl.float32)
    return values * c + tl.where(dims < HALF, -others, others) * s


@triton.jit
def _write_rows(values, stored, scale_place, offset, old_mask, new_mask, FORMAT: tl.constexpr):
    """`values`, float32, to the bytes at `stored`, [BLOCK, DIM] both; new_mask says which, old_mask which stay."""
    # A maximum may pass over NaN. NaN as the scale makes the block NaN, which is what it was before rounding.
    size = tl.where(values == values, tl.abs(values), float("inf"))
    wanted = _scale_for(tl.max(tl.max(size, 1), 0), FORMAT)
    before = tl.load(scale_place)
    scale = wanted
    if offset > 0:
        scale = tl.where((before != before) | (before > wanted), before, wanted)
        if scale != before:
            old = _decoded(tl.load(stored, mask=old_mask, other=0), FORMAT)
            tl.store(stored, _encoded(old * (before * _reciprocal(scale)), FORMAT), mask=old_mask)
    tl.store(scale_place, scale)
    tl.store(stored, _encoded(values * _reciprocal(scale), FORMAT), mask=new_mask)


@triton.jit(do_not_specialize=["num_tokens"])
def write_kv_quantised_kernel(
    q,
    k,
    v,
    cos,
    sin,
    k_cache,
    v_cache,
    k_scales,
    v_scales,
    slot_mapping,
    num_tokens,
    q_token_stride,
    q_head_stride,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    cos_stride,
    sin_stride,
    block_stride,
    head_stride,
    scale_stride,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    PADDED_BLOCK: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Grid (tokens, num_kv_heads). The first of a block's tokens writes all of them; the others return.

    HALF > 0: dimension i turns with i + HALF, of keys on their way and of the token's own queries, which first have
    their turn. 0: q, cos and sin aren't looked at.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    if HALF > 0:
        halves = tl.arange(0, PADDED_HALF)[None, :]
        members = tl.arange(0, PADDED_GROUP)[:, None]
        c = tl.load(cos + token * cos_stride + halves, mask=halves < HALF, other=0.0)
        s = tl.load(sin + token * sin_stride + halves, mask=halves < HALF, other=0.0)
        q_rows = q + token * q_token_stride + (head * GROUP + members) * q_head_stride + halves
        q_mask = (members < GROUP) & (halves < HALF)
        first, second = rotated_halves(q_rows, q_mask, HALF, c, s)
        tl.store(q_rows, first.to(q.dtype.element_ty), mask=q_mask)
        tl.store(q_rows + HALF, second.to(q.dtype.element_ty), mask=q_mask)
    slot = tl.load(slot_mapping + token)
    if slot < 0:
        return
    block = slot // BLOCK_SIZE
    if token > 0:
        previous = tl.load(slot_mapping + token - 1)
        if (previous >= 0) & (previous // BLOCK_SIZE == block):
            return
    offset = slot % BLOCK_SIZE
    places = tl.arange(0, PADDED_BLOCK)
    tokens = token + places - offset
    candidate = (places >= offset) & (places < BLOCK_SIZE) & (tokens < num_tokens)
    found = tl.load(slot_mapping + tokens, mask=candidate, other=-1)
    dims = tl.arange(0, PADDED_DIM)[None, :]
    dim_mask = dims < HEAD_DIM
    new_mask = (candidate & (found == block * BLOCK_SIZE + places))[:, None] & dim_mask
    old_mask = (places < offset)[:, None] & dim_mask
    stored = block * block_stride + head * head_stride + (places * HEAD_DIM)[:, None] + dims
    scale_place = block * scale_stride + head
    k_rows = k + tokens[:, None] * k_token_stride + head * k_head_stride + dims
    keys = tl.load(k_rows, mask=new_mask, other=0.0).to(tl.float32)
    if HALF > 0:
        keys = _turned(k_rows, keys, cos, sin, tokens[:, None], dims, new_mask, cos_stride, sin_stride, HALF)
    _write_rows(keys, k_cache + stored, k_scales + scale_place, offset, old_mask, new_mask, FORMAT)
    v_rows = v + tokens[:, None] * v_token_stride + head * v_head_stride + dims
    values = tl.load(v_rows, mask=new_mask, other=0.0).to(tl.float32)
    _write_rows(values, v_cache + stored, v_scales + scale_place, offset, old_mask, new_mask, FORMAT)


def constants(head_dim: int, block_size: int, dtype: torch.dtype, *, group: int, half: int) -> dict[str, int]:
    """Compile-time arguments of the kernel; `half` is how many pairs of dimensions turn, `group` the query heads on
    one KV head."""
    return {
        "GROUP": group,
        "HALF": half,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": block_size,
        "PADDED_GROUP": triton.next_power_of_2(group),
        "PADDED_HALF": triton.next_power_of_2(max(1, half)),
        "PADDED_BLOCK": triton.next_power_of_2(block_size),
        "PADDED_DIM": triton.next_power_of_2(head_dim),
        "FORMAT": FORMATS[dtype].value,
    }


def write_kv_quantised(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    scales: Scales,
    slot_mapping: torch.Tensor,
) -> None:
    """As `dispatch.write_kv` with scales; oracle: `reference_quantised.write_kv_quantised`."""
    _launch(None, k, v, None, None, k_cache, v_cache, scales, slot_mapping)


def write_kv_rope_quantised(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    scales: Scales,
    slot_mapping: torch.Tensor,
) -> None:
    """As `dispatch.write_kv_rope` with scales."""
    _launch(q, k, v, cos, sin, k_cache, v_cache, scales, slot_mapping)


def _launch(
    q: torch.Tensor | None,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    scales: Scales,
    slot_mapping: torch.Tensor,
) -> None:
    _, num_kv_heads, block_size, head_dim = k_cache.shape
    group, half = 1, 0
    q_strides, angle_strides = (0, 0), (0, 0)
    if q is not None and cos is not None and sin is not None:
        group, half = q.shape[1] // num_kv_heads, cos.shape[1]
        q_strides, angle_strides = (q.stride(0), q.stride(1)), (cos.stride(0), sin.stride(0))
    write_kv_quantised_kernel[(k.shape[0], num_kv_heads)](
        q,
        k,
        v,
        cos,
        sin,
        k_cache.view(torch.uint8),
        v_cache.view(torch.uint8),
        *scales,
        slot_mapping,
        k.shape[0],
        *q_strides,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        *angle_strides,
        k_cache.stride(0),
        k_cache.stride(1),
        scales[0].stride(0),
        **constants(head_dim, block_size, k_cache.dtype, group=group, half=half),
        num_warps=4,
        enable_fp_fusion=True,
    )
