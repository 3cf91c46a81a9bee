"""Oracle of the quantised KV cache: what its bytes and scales mean, in plain torch, slowly and obviously.

A scale belongs to one block, KV head and kind. It is a power of two, the smallest for which the block's numbers fit
into their bytes, so a number is its byte times the scale exactly. When a later token of the block is larger, the
bytes already there are put to the new scale: without loss in e4m3 (but for the smallest numbers), with one more
rounding in int8. A block's scale starts anew with its first slot: what an earlier owner left does not count.
"""

from __future__ import annotations

import itertools
import math

import torch

from octavo.kernels.layer_cache import Scales

LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
"""Largest number of the formats that a cache may have."""
_SCALE_MIN = 2.0**-126


def write_kv_quantised(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    scales: Scales,
    slot_mapping: torch.Tensor,
) -> None:
    """Store the keys and values of this step's tokens in their slots, in place.

    k, v               [T, Hkv, D]; keys turned, where they turn
    k_cache, v_cache   [num_blocks, Hkv, block_size, D], one layer, of a dtype in `LARGEST`
    scales             float32 [num_blocks, Hkv], of keys and of values
    slot_mapping       int64 [T] as in `reference.write_kv`. Tokens of one block stand next to each other, slots
                       without gaps; slots before a block's first were written earlier. A block that gets a number that
                       isn't finite has the scale NaN until it starts anew.
    """
    block_size = k_cache.shape[2]
    steps = [
        (block, [(row, slot % block_size) for row, slot in run])
        for block, run in itertools.groupby(
            enumerate(slot_mapping.tolist()), lambda pair: pair[1] // block_size
        )
        if block >= 0
    ]
    for rows, cache, own in ((k, k_cache, scales[0]), (v, v_cache, scales[1])):
        for block, run in steps:
            tokens, offsets = zip(*run, strict=True)
            for head in range(cache.shape[1]):
                numbers = rows[list(tokens), head].double()
                _write(numbers, cache[block, head], own[block], head, offsets[0])


def dequantised(cache: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float32 [num_blocks, Hkv, block_size, D] of a cache and its scales."""
    return cache.float() * scales[:, :, None, None]


def _write(numbers: torch.Tensor, slots: torch.Tensor, scales: torch.Tensor, head: int, offset: int) -> None:
    """`numbers` float64 [N, D] to `slots` [block_size, D] from `offset` on."""
    largest = float(numbers.abs().max()) if numbers.isfinite().all() else math.nan
    scale = _scale_for(largest, LARGEST[slots.dtype])
    if offset > 0:
        before = float(scales[head])
        scale = max(scale, before) if not math.isnan(scale + before) else math.nan
        if scale != before:
            slots[:offset] = _nearest(slots[:offset].double() * (before / scale), slots.dtype)
    scales[head] = scale
    slots[offset : offset + len(numbers)] = _nearest(numbers / scale, slots.dtype)


def _scale_for(largest: float, limit: float) -> float:
    if math.isnan(largest):
        return math.nan
    scale = _SCALE_MIN
    while largest / scale > limit:
        scale *= 2.0
    return scale


def _nearest(numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """float64 to the nearest of the format, ties to even."""
    if dtype == torch.int8:
        return numbers.round().to(torch.int8)
    return numbers.float().to(dtype)
