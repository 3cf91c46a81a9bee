"""Moves of keys and values on the CPU: numba twins of `kernels.write_kv`, `write_kv_rope` and `copy_blocks`.

Those that only copy bits are compiled per element size, not per number format, and run on one thread: a step's worth
is tens of microseconds, which threads would spend on meeting. With the rotation it is more, so long chunks are shared.
"""

from __future__ import annotations

from typing import Any

from numba import prange

from octavo.kernels.cpu.elementwise import ALONE_ELEMENTS, share
from octavo.kernels.cpu.memory import float32_at, int64_at, line_elements, prefetch_to_write
from octavo.kernels.cpu.runtime import compiled
from octavo.kernels.cpu.simd import LANES, vadd, vload, vmul, vstore, vsub

Strided = tuple[Any, int, int]
"""(flat array, token stride, head stride)"""

SLOTS_AHEAD = 3
"""Tokens between asking for a slot's lines and writing them; 1 and 6 were no different."""


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
    """target[at : at + 2 * half] = the pairs (source[i], source[half + i]) turned by their angles; may be in place."""
    whole = half // LANES * LANES
    for i in range(0, whole, LANES):
        low, high = vload(source, source_at + i), vload(source, source_at + half + i)
        cosines, sines = vload(cos, angle_at + i), vload(sin, angle_at + i)
        vstore(target, at + i, vsub(vmul(low, cosines), vmul(high, sines)))
        vstore(target, at + half + i, vadd(vmul(high, cosines), vmul(low, sines)))
    for i in range(whole, half):
        first, second = source[source_at + i], source[source_at + half + i]
        c, s = cos[angle_at + i], sin[angle_at + i]
        target[at + i] = first * c - second * s
        target[at + half + i] = second * c + first * s


@compiled()
def _ask_for_slot(slot: int, caches: tuple[Any, Any], shape: tuple[int, int, int]) -> None:
    """Have a slot's lines brought to where they are written: they lie anywhere, and a store would wait for each."""
    num_kv_heads, block_size, head_dim = shape
    k_cache, v_cache = caches
    for head in range(num_kv_heads):
        target = ((slot // block_size * num_kv_heads + head) * block_size + slot % block_size) * head_dim
        for d in range(0, head_dim, line_elements(k_cache)):
            prefetch_to_write(k_cache, target + d)
            prefetch_to_write(v_cache, target + d)


@compiled()
def _write_rope_tokens(
    tokens: tuple[int, int],
    q: Strided,
    k: Strided,
    v: Strided,
    num_heads: int,
    angles: tuple[Any, Any, int, int],
    caches: tuple[Any, Any],
    shape: tuple[int, int, int],
    slots: Any,
) -> None:
    """`write_kv_rope_kernel` for the tokens (begin, end)."""
    queries, q_stride, q_head_stride = q
    keys, k_stride, k_head_stride = k
    values, v_stride, v_head_stride = v
    cos, sin, angle_stride, half = angles
    k_cache, v_cache = caches
    num_kv_heads, block_size, head_dim = shape
    for token in range(tokens[0], tokens[1]):
        angle_at = token * angle_stride
        later = token + SLOTS_AHEAD
        if later < tokens[1] and slots[later] >= 0:
            _ask_for_slot(slots[later], caches, shape)
        for head in range(num_heads):
            at = token * q_stride + head * q_head_stride
            _rotate(queries, at, cos, sin, angle_at, half, queries, at)
        slot = slots[token]
        if slot < 0:
            continue
        for head in range(num_kv_heads):
            target = ((slot // block_size * num_kv_heads + head) * block_size + slot % block_size) * head_dim
            k_at, v_at = token * k_stride + head * k_head_stride, token * v_stride + head * v_head_stride
            _rotate(keys, k_at, cos, sin, angle_at, half, k_cache, target)
            for d in range(2 * half, head_dim):
                k_cache[target + d] = keys[k_at + d]
            for d in range(head_dim):
                v_cache[target + d] = values[v_at + d]


@compiled(parallel=True)
def _write_rope_together(
    threads: int,
    num_tokens: int,
    q: Strided,
    k: Strided,
    v: Strided,
    num_heads: int,
    angles: tuple[Any, Any, int, int],
    caches: tuple[Any, Any],
    shape: tuple[int, int, int],
    slots: Any,
) -> None:
    for part in prange(threads):
        _write_rope_tokens(share(part, threads, num_tokens), q, k, v, num_heads, angles, caches, shape, slots)


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
    threads: int,
) -> None:
    """Rotate q in place, and store k rotated and v in their slots, each slot named once; float32.

    q, k, v  (address, token stride, head stride)
    angles   (address of cos, of sin, their row stride, R / 2)
    caches   (address of k_cache, of v_cache); shape = (num_kv_heads, block_size, head_dim)

    Raises ValueError for a slot outside the cache before anything is written.
    """
    num_kv_heads, block_size, head_dim = shape
    cos_at, sin_at, angle_stride, half = angles
    num_angles = (num_tokens - 1) * angle_stride + half
    turns = (float32_at(cos_at, num_angles), float32_at(sin_at, num_angles), angle_stride, half)
    slots = int64_at(slots_at, num_tokens)
    size = num_blocks * num_kv_heads * block_size * head_dim
    places = (float32_at(caches[0], size), float32_at(caches[1], size))
    last = num_tokens - 1
    queries = (float32_at(q[0], last * q[1] + (num_heads - 1) * q[2] + head_dim), q[1], q[2])
    keys = (float32_at(k[0], last * k[1] + (num_kv_heads - 1) * k[2] + head_dim), k[1], k[2])
    values = (float32_at(v[0], last * v[1] + (num_kv_heads - 1) * v[2] + head_dim), v[1], v[2])
    for token in range(num_tokens):
        if slots[token] >= num_blocks * block_size:
            raise ValueError("slot_mapping names a slot outside the cache")
    if threads == 1 or num_tokens * (num_heads + 2 * num_kv_heads) * head_dim <= ALONE_ELEMENTS:
        _write_rope_tokens((0, num_tokens), queries, keys, values, num_heads, turns, places, shape, slots)
    else:
        _write_rope_together(
            threads, num_tokens, queries, keys, values, num_heads, turns, places, shape, slots
        )


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
