"""Moves of keys and values on the CPU: numba twins of `kernels.write_kv`, `write_kv_rope` and `copy_blocks`.

Those that only copy bits are compiled per element size, not per number format. All run on one thread: a step's worth
is tens of microseconds, which threads would spend on meeting.
"""

from __future__ import annotations

from typing import Any

from octavo.kernels.cpu.memory import float32_at, int64_at
from octavo.kernels.cpu.runtime import compiled


@compiled()
def write_rows(
    k: Any,
    k_strides: tuple[int, ...],
    v: Any,
    v_strides: tuple[int, ...],
    k_cache: Any,
    v_cache: Any,
    slots: Any,
    shape: tuple[int, ...],
) -> None:
    """cache[slot // block_size, :, slot % block_size] = row of k (of v), for every row with slot >= 0.

    All arrays are flat; k and v come with (token, head) strides, the caches are [num_blocks, num_heads,
    block_size, head_dim], shape = (num_heads, block_size, head_dim). Raises ValueError for a slot outside the
    cache before anything is written.
    """
    num_heads, block_size, head_dim = shape
    num_slots = k_cache.shape[0] // (num_heads * head_dim)
    for token in range(slots.shape[0]):
        if slots[token] >= num_slots:
            raise ValueError("slot_mapping names a slot outside the cache")
    for token in range(slots.shape[0]):
        slot = slots[token]
        if slot < 0:
            continue
        for head in range(num_heads):
            target = ((slot // block_size * num_heads + head) * block_size + slot % block_size) * head_dim
            k_at = token * k_strides[0] + head * k_strides[1]
            v_at = token * v_strides[0] + head * v_strides[1]
            for d in range(head_dim):
                k_cache[target + d] = k[k_at + d]
            for d in range(head_dim):
                v_cache[target + d] = v[v_at + d]


@compiled()
def _rotate(
    source: Any, source_at: int, cos: Any, sin: Any, angle_at: int, half: int, target: Any, at: int
) -> None:
    for i in range(half):
        first, second = source[source_at + i], source[source_at + half + i]
        c, s = cos[angle_at + i], sin[angle_at + i]
        target[at + i] = first * c - second * s
        target[at + half + i] = second * c + first * s


@compiled()
def write_kv_rope_kernel(
    num_tokens: int,
    q: tuple[int, int, int],
    k: tuple[int, int, int],
    v: tuple[int, int, int],
    num_heads: int,
    angles: tuple[int, int, int, int],
    caches: tuple[int, int],
    num_blocks: int,
    shape: tuple[int, int, int],
    slots_at: int,
) -> None:
    """Rotate q in place, and store k rotated and v in their slots; float32.

    q, k, v  (address, token stride, head stride)
    angles   (address of cos, of sin, their row stride, R / 2)
    caches   (address of k_cache, of v_cache); shape = (num_kv_heads, block_size, head_dim)

    Raises ValueError for a slot outside the cache before anything is written.
    """
    num_kv_heads, block_size, head_dim = shape
    cos_at, sin_at, angle_stride, half = angles
    cos = float32_at(cos_at, (num_tokens - 1) * angle_stride + half)
    sin = float32_at(sin_at, (num_tokens - 1) * angle_stride + half)
    slots = int64_at(slots_at, num_tokens)
    size = num_blocks * num_kv_heads * block_size * head_dim
    k_cache, v_cache = float32_at(caches[0], size), float32_at(caches[1], size)
    queries = float32_at(q[0], (num_tokens - 1) * q[1] + (num_heads - 1) * q[2] + head_dim)
    keys = float32_at(k[0], (num_tokens - 1) * k[1] + (num_kv_heads - 1) * k[2] + head_dim)
    values = float32_at(v[0], (num_tokens - 1) * v[1] + (num_kv_heads - 1) * v[2] + head_dim)
    for token in range(num_tokens):
        if slots[token] >= num_blocks * block_size:
            raise ValueError("slot_mapping names a slot outside the cache")
    for token in range(num_tokens):
        angle_at = token * angle_stride
        for head in range(num_heads):
            at = token * q[1] + head * q[2]
            _rotate(queries, at, cos, sin, angle_at, half, queries, at)
        slot = slots[token]
        if slot < 0:
            continue
        for head in range(num_kv_heads):
            target = ((slot // block_size * num_kv_heads + head) * block_size + slot % block_size) * head_dim
            k_at, v_at = token * k[1] + head * k[2], token * v[1] + head * v[2]
            _rotate(keys, k_at, cos, sin, angle_at, half, k_cache, target)
            for d in range(2 * half, head_dim):
                k_cache[target + d] = keys[k_at + d]
            for d in range(head_dim):
                v_cache[target + d] = values[v_at + d]


@compiled()
def copy_rows(kv: Any, copies: Any) -> None:
    """kv[:, destination] = kv[:, source] for each (source, destination); kv [layers * 2, num_blocks, elements].

    Raises ValueError for a block outside the cache before anything is written.
    """
    num_blocks = kv.shape[1]
    for i in range(copies.shape[0]):
        for side in range(2):
            if copies[i, side] < 0 or copies[i, side] >= num_blocks:
                raise ValueError("block_copies names a block outside the cache")
    for plane in range(kv.shape[0]):
        for i in range(copies.shape[0]):
            kv[plane, copies[i, 1], :] = kv[plane, copies[i, 0], :]
