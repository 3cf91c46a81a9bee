"""A KV cache of one byte a number, fp8 (e4m3) or int8, with a scale for each block and KV head, in Triton.

Owns the kernel that writes it; what bytes and scales mean is written in `reference_quantised`, and attention reads
them in `online_softmax`. Everything here is exact or rounded to nearest by integer arithmetic on bits, so the bytes
do not depend on the device, and devices without fp8 instructions serve.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from octavo.kernels.online_softmax import FP8, INT8, widened

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
def _write_rows(rows, stored, scale_place, offset, old_mask, new_mask, FORMAT: tl.constexpr):
    """Numbers at `rows` to the bytes at `stored`, [BLOCK, DIM] both; new_mask says which, old_mask which stay."""
    values = tl.load(rows, mask=new_mask, other=0.0).to(tl.float32)
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
    k,
    v,
    k_cache,
    v_cache,
    k_scales,
    v_scales,
    slot_mapping,
    num_tokens,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    block_stride,
    head_stride,
    scale_stride,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PADDED_BLOCK: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Grid (tokens, num_kv_heads). The first of a block's tokens writes all of them; the others return."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
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
    v_rows = v + tokens[:, None] * v_token_stride + head * v_head_stride + dims
    _write_rows(k_rows, k_cache + stored, k_scales + scale_place, offset, old_mask, new_mask, FORMAT)
    _write_rows(v_rows, v_cache + stored, v_scales + scale_place, offset, old_mask, new_mask, FORMAT)


def constants(head_dim: int, block_size: int, dtype: torch.dtype) -> dict[str, int]:
    """Compile-time arguments of the kernel."""
    return {
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": block_size,
        "PADDED_BLOCK": triton.next_power_of_2(block_size),
        "PADDED_DIM": triton.next_power_of_2(head_dim),
        "FORMAT": FORMATS[dtype].value,
    }


def write_kv_quantised(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k_scales: torch.Tensor,
    v_scales: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """As `reference_quantised.write_kv_quantised`; the caches float8_e4m3fn or int8, contiguous."""
    _, num_kv_heads, block_size, head_dim = k_cache.shape
    write_kv_quantised_kernel[(k.shape[0], num_kv_heads)](
        k,
        v,
        k_cache.view(torch.uint8),
        v_cache.view(torch.uint8),
        k_scales,
        v_scales,
        slot_mapping,
        k.shape[0],
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        k_cache.stride(0),
        k_cache.stride(1),
        num_kv_heads,
        **constants(head_dim, block_size, k_cache.dtype),
        num_warps=4,
        enable_fp_fusion=True,
    )
