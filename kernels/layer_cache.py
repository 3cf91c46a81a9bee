"""One layer of the KV cache as kernels see it, and how a quantised one lies in memory.

A plain cache is one tensor, of which a layer's keys and values are slices. Of a quantised cache everything that
belongs to a block lies together: the bytes of all heads, then their scales. So whatever moves whole blocks (copies,
swaps, the host tier) moves scales with them and need not know that there are any.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_ALIGNMENT = 16
"""Bytes. Of every block's numbers and scales, so that kernels read both in whole vectors."""

Scales = tuple[torch.Tensor, torch.Tensor]
"""Of keys and of values, float32 [num_blocks, num_kv_heads], neighbours in the last dimension: what a byte of that
block and head is to be multiplied by. See `reference_quantised`."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerCache:
    """Keys and values of one layer, [num_blocks, num_kv_heads, block_size, head_dim]. A block is contiguous."""

    k: torch.Tensor
    v: torch.Tensor
    scales: Scales | None = None
    """None: the numbers are what they are."""


def plain_layers(kv: torch.Tensor) -> tuple[LayerCache, ...]:
    """Layers of `kv` [num_layers, 2, num_blocks, num_kv_heads, block_size, head_dim]."""
    return tuple(LayerCache(layer[0], layer[1]) for layer in kv)


def quantised_block_bytes(*, num_kv_heads: int, block_size: int, head_dim: int) -> int:
    """What a block takes in one layer, of keys or of values: a byte a number, and the scales."""
    return _aligned(num_kv_heads * block_size * head_dim) + _aligned(num_kv_heads * torch.float32.itemsize)


def quantised_layers(
    kv: torch.Tensor, dtype: torch.dtype, *, num_kv_heads: int, block_size: int, head_dim: int
) -> tuple[LayerCache, ...]:
    """Layers of `kv`, uint8 [num_layers, 2, num_blocks, `quantised_block_bytes`], whose bytes are of `dtype`."""
    count = num_kv_heads * block_size * head_dim
    scales_at = _aligned(count)

    def numbers(blocks: torch.Tensor) -> torch.Tensor:
        return blocks[:, :count].view(dtype).unflatten(1, (num_kv_heads, block_size, head_dim))

    def scales(blocks: torch.Tensor) -> torch.Tensor:
        return blocks[:, scales_at:].view(torch.float32)[:, :num_kv_heads]

    return tuple(
        LayerCache(numbers(layer[0]), numbers(layer[1]), (scales(layer[0]), scales(layer[1]))) for layer in kv
    )


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
