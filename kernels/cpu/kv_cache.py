"""Moves of keys and values on the CPU: numba twins of `kernels.write_kv` and `kernels.copy_blocks`.

Both only copy bits, so they are compiled per element size, not per number format, and run on one thread: a
step's worth is tens of microseconds, which threads would spend on meeting.
"""

from __future__ import annotations

from typing import Any

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
