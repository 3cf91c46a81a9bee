"""Writing a quantised KV cache on the CPU: numba twin of `kernels.quantised_kv`, equal to it byte for byte.

What bytes and scales mean is written in `kernels.reference_quantised`. Runs on one thread, like the other moves of keys
and values. The formulas on bits are the Triton kernel's.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from octavo.kernels.cpu.runtime import compiled

INT8, FP8 = 0, 1
"""Formats: signed bytes, e4m3."""


@compiled()
def _scale_for(largest: int, format: int, word: Any) -> Any:
    """The smallest power of two by which a number divides to what a byte can hold; NaN for one that isn't finite.

    largest  bits of the number without its sign, so that numbers compare as integers and NaN is the largest
    word     scratch int32 [1]
    """
    if largest >= 0x7F800000:
        return np.float32(np.nan)
    # The largest byte is 448 = 1.75 * 2**8, or 127 = 1.984375 * 2**6: a longer mantissa needs one more.
    exponent = ((largest + 0x1FFFFF) >> 23) - 8 if format == FP8 else ((largest + 0x1FFFF) >> 23) - 6
    word[0] = max(exponent, 1) << 23
    return word.view(np.float32)[0]


@compiled()
def _reciprocal(power: float, word: Any) -> Any:
    """1 / power of a power of two from 2**-126 to 2**126, exactly; NaN of NaN."""
    numbers = word.view(np.float32)
    numbers[0] = power
    word[0] = (254 << 23) - word[0]
    return numbers[0]


@compiled()
def _encode(numbers: Any, count: int, cache: Any, at: int, format: int) -> None:
    """cache[at : at + count] = float32 `numbers` to the nearest byte, ties to even, too large ones to the largest.

    Changes `numbers`.
    """
    bits = numbers.view(np.int32)
    if format == FP8:
        for i in range(count):
            sign = (bits[i] >> 24) & 0x80
            bits[i] &= 0x7FFFFFFF
            # False for NaN, too.
            numbers[i] = numbers[i] if numbers[i] < np.float32(448.0) else np.float32(448.0)
            if numbers[i] < np.float32(0.015625):
                # Below 2**-6 bytes count multiples of 2**-9, the last place of 2**14.
                numbers[i] += np.float32(16384.0)
                code = bits[i] - 0x46800000
            else:
                # The mantissa is rounded to 3 bits; then the exponent's bias falls from 127 to 7.
                code = ((bits[i] + 0x7FFFF + ((bits[i] >> 20) & 1)) >> 20) - (120 << 3)
            cache[at + i] = sign | code
        return
    for i in range(count):
        # The last place of 1.5 * 2**23 is 1.
        numbers[i] += np.float32(12582912.0)
        cache[at + i] = max(min(bits[i] - 0x4B400000, 127), -127) & 0xFF


@compiled()
def _rescale(cache: Any, at: int, count: int, factor: float, format: int, numbers: Any) -> None:
    """Put bytes to another scale: to the nearest byte of `factor` times what they were."""
    bits = numbers.view(np.int32)
    for i in range(count):
        code = np.int32(cache[at + i])
        if format == FP8:
            bits[i] = (code & 0x7F) << 20
            # 2**120 by which the exponents' biases differ.
            numbers[i] *= np.float32(1.329227995784916e36)
            bits[i] |= (code & 0x80) << 24
        else:
            numbers[i] = (code ^ 0x80) - 128
        numbers[i] *= factor
    _encode(numbers, count, cache, at, format)


@compiled()
def _write_run(
    rows: Any,
    strides: tuple[int, int],
    first: int,
    count: int,
    head: int,
    cache: Any,
    at: int,
    offset: int,
    head_dim: int,
    scales: Any,
    scale_at: int,
    format: int,
    scratch: tuple[Any, Any],
) -> None:
    """Tokens first .. first + count - 1, one head, to the slots of one block from `offset` on; the block at `at`."""
    numbers, word = scratch
    bits = rows.view(np.int32)
    largest = np.int32(0)
    for token in range(first, first + count):
        row = token * strides[0] + head * strides[1]
        for d in range(head_dim):
            largest = max(largest, bits[row + d] & np.int32(0x7FFFFFFF))
    scale = _scale_for(largest, format, word)
    if offset > 0:
        before = scales[scale_at]
        if not before <= scale:
            # Larger, or one of them is NaN, which then stays.
            scale = before + scale if np.isnan(before + scale) else before
        elif scale != before:
            factor = before * _reciprocal(scale, word)
            for slot in range(offset):
                _rescale(cache, at + slot * head_dim, head_dim, factor, format, numbers)
    scales[scale_at] = scale
    factor = _reciprocal(scale, word)
    for token in range(count):
        row = (first + token) * strides[0] + head * strides[1]
        for d in range(head_dim):
            numbers[d] = rows[row + d] * factor
        _encode(numbers, head_dim, cache, at + (offset + token) * head_dim, format)


@compiled()
def write_quantised_rows(
    k: Any,
    k_strides: tuple[int, int],
    v: Any,
    v_strides: tuple[int, int],
    caches: tuple[Any, Any],
    scales: tuple[Any, Any],
    cache_strides: tuple[int, int],
    slots: Any,
    shape: tuple[int, int, int, int],
    format: int,
) -> None:
    """Store rows k and v in their slots.

    k, v    float32, flat, with (token, head) strides
    caches  (k, v) uint8, scales (k, v) float32, flat; cache_strides = (block of the caches, block of the scales)
    slots   int64 [T]; shape = (num_blocks, num_kv_heads, block_size, head_dim); format INT8 or FP8

    Raises ValueError for a slot outside the cache before anything is written.
    """
    num_blocks, num_kv_heads, block_size, head_dim = shape
    num_tokens = slots.shape[0]
    for token in range(num_tokens):
        if slots[token] >= num_blocks * block_size:
            raise ValueError("slot_mapping names a slot outside the cache")
    scratch = (np.empty(head_dim, np.float32), np.empty(1, np.int32))
    first = 0
    while first < num_tokens:
        slot = slots[first]
        if slot < 0:
            first += 1
            continue
        block, offset = slot // block_size, slot % block_size
        count = 1
        while (
            first + count < num_tokens
            and offset + count < block_size
            and slots[first + count] == slot + count
        ):
            count += 1
        for head in range(num_kv_heads):
            at = block * cache_strides[0] + head * block_size * head_dim
            scale_at = block * cache_strides[1] + head
            _write_run(
                k, k_strides, first, count, head, caches[0], at, offset, head_dim, scales[0], scale_at, format, scratch
            )  # fmt: skip
            _write_run(
                v, v_strides, first, count, head, caches[1], at, offset, head_dim, scales[1], scale_at, format, scratch
            )  # fmt: skip
        first += count
