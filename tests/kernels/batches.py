"""Ragged batches with poison in every slot that no kernel may look at. Plain torch: a script runs it too."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

NOWHERE = 2**31 - 1
"""A block id that cannot be: stands in table entries past a sequence's last block."""


@dataclass(frozen=True)
class Shape:
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 32
    block_size: int = 16
    dtype: torch.dtype = torch.float32


@dataclass
class Batch:
    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_tables: torch.Tensor
    cu_seqlens_q: torch.Tensor
    context_lens: torch.Tensor
    scale: float

    def arguments(self) -> dict[str, object]:
        return vars(self)

    def sequence(self, s: int) -> Batch:
        """The same sequence in a batch of its own."""
        first, last = self.cu_seqlens_q[s : s + 2].tolist()
        return Batch(
            q=self.q[first:last],
            k_cache=self.k_cache,
            v_cache=self.v_cache,
            block_tables=self.block_tables[s : s + 1],
            cu_seqlens_q=torch.tensor([0, last - first], dtype=torch.int32),
            context_lens=self.context_lens[s : s + 1],
            scale=self.scale,
        )

    def rows(self, s: int) -> slice:
        return slice(*self.cu_seqlens_q[s : s + 2].tolist())


def ragged_batch(
    sequences: list[tuple[int, int]],
    shape: Shape = Shape(),
    *,
    seed: int = 0,
    sliding_window: int | None = None,
    poison: float = math.nan,
    strided: bool = False,
    sharpness: float = 1.0,
) -> Batch:
    """One batch of (rows, context length) sequences; blocks are scattered over the cache.

    Every slot that no row sees holds `poison`: tails of last blocks, blocks nobody owns, and with a window what
    lies before it. `strided`: q is a slice of wider rows, as of a fused projection.
    """
    generator = torch.Generator().manual_seed(seed)
    block_size = shape.block_size
    blocks = [-(-context // block_size) for _, context in sequences]
    num_blocks = sum(blocks) + 3
    free = torch.randperm(num_blocks, generator=generator).tolist()
    cache = torch.full((2, num_blocks, shape.kv_heads, block_size, shape.head_dim), poison, dtype=shape.dtype)
    tables = torch.full((len(sequences), max([*blocks, 1])), NOWHERE, dtype=torch.int32)
    for s, (rows, context) in enumerate(sequences):
        table = torch.tensor([free.pop() for _ in range(blocks[s])], dtype=torch.int64)
        tables[s, : blocks[s]] = table.int()
        first = 0 if sliding_window is None else max(0, context - rows - sliding_window + 1)
        positions = torch.arange(first, context)
        values = torch.randn(2, len(positions), shape.kv_heads, shape.head_dim, generator=generator)
        for kind in range(2):
            cache[kind, table[positions // block_size], :, positions % block_size] = values[kind].to(
                shape.dtype
            )
    total = sum(rows for rows, _ in sequences)
    wide = torch.randn(total, shape.heads + 2, shape.head_dim, generator=generator) * sharpness
    q = wide.to(shape.dtype)[:, 1:-1]
    return Batch(
        q=q if strided else q.contiguous(),
        k_cache=cache[0],
        v_cache=cache[1],
        block_tables=tables,
        cu_seqlens_q=torch.tensor([0, *(rows for rows, _ in sequences)]).cumsum(0).int(),
        context_lens=torch.tensor([context for _, context in sequences], dtype=torch.int32),
        scale=shape.head_dim**-0.5,
    )
