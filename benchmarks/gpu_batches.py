"""Made-up attention batches on the device, for the sections of `gpu.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from octavo.kernels.layer_cache import quantised_block_bytes, quantised_layers

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 16
"""A layer of an 8-billion Llama."""


@dataclass
class Layer:
    """One layer's cache and a batch over it; `arguments` are those of the attention launchers."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_tables: torch.Tensor
    cu_seqlens_q: torch.Tensor
    context_lens: torch.Tensor
    out: torch.Tensor

    def arguments(self) -> dict[str, Any]:
        return vars(self) | {"scale": self.q.shape[2] ** -0.5, "softcap": None}

    def slots(self) -> torch.Tensor:
        """int64 [T], where the batch's own tokens belong."""
        block_size, found = self.k_cache.shape[2], []
        bounds, contexts = self.cu_seqlens_q.tolist(), self.context_lens.tolist()
        for s, context in enumerate(contexts):
            positions = torch.arange(context - bounds[s + 1] + bounds[s], context, device=self.q.device)
            found.append(
                self.block_tables[s, positions // block_size].long() * block_size + positions % block_size
            )
        return torch.cat(found)


def layer(
    sequences: list[tuple[int, int]],
    device: torch.device,
    *,
    dtype: torch.dtype = torch.bfloat16,
    heads: int = HEADS,
    kv_heads: int = KV_HEADS,
    head_dim: int = HEAD_DIM,
    block_size: int = BLOCK_SIZE,
    shared_blocks: int = 0,
    poison: float = 0.0,
) -> Layer:
    """`sequences` of (rows, context), each in scattered blocks of its own but for the first `shared_blocks`. Slots
    past a sequence's end hold `poison`."""
    generator = torch.Generator(device).manual_seed(0)
    widths = [-(-context // block_size) for _, context in sequences]
    num_blocks = sum(widths) + 1
    order = torch.randperm(num_blocks, generator=generator, device=device).int()
    tables = torch.zeros(len(sequences), max(widths), dtype=torch.int32, device=device)
    sizes = (num_blocks, kv_heads, block_size, head_dim)
    k_cache, v_cache = (torch.randn(sizes, generator=generator, device=device, dtype=dtype) for _ in range(2))
    start = 0
    for s, width in enumerate(widths):
        tables[s, :width] = order[start : start + width]
        start += width
    tables[:, :shared_blocks] = tables[0, :shared_blocks].clone()
    if poison:
        k_cache[order[-1].long()] = v_cache[order[-1].long()] = poison
        for s, (_, context) in enumerate(sequences):
            if context % block_size:
                last = int(tables[s, widths[s] - 1])
                k_cache[last, :, context % block_size :] = v_cache[last, :, context % block_size :] = poison
    rows = torch.tensor([0, *(rows for rows, _ in sequences)], device=device)
    q = torch.randn(int(rows.sum()), heads, head_dim, generator=generator, device=device, dtype=dtype)
    return Layer(
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        block_tables=tables,
        cu_seqlens_q=rows.cumsum(0).int(),
        context_lens=torch.tensor([context for _, context in sequences], dtype=torch.int32, device=device),
        out=torch.zeros_like(q),
    )


def quantised(made: Layer, format: torch.dtype) -> dict[str, Any]:
    """Arguments that stand for the caches of `made`, in one byte a number, laid out as the worker does."""
    num_blocks, num_kv_heads, block_size, head_dim = made.k_cache.shape
    shape = {"num_kv_heads": num_kv_heads, "block_size": block_size, "head_dim": head_dim}
    raw = torch.zeros(
        1, 2, num_blocks, quantised_block_bytes(**shape), dtype=torch.uint8, device=made.q.device
    )
    (stored,) = quantised_layers(raw, format, **shape)
    assert stored.scales is not None
    for cache, target, scales in zip(
        (made.k_cache, made.v_cache), (stored.k, stored.v), stored.scales, strict=True
    ):
        numbers = cache.float() * 2.0**5
        numbers = numbers.round().clamp(-127, 127) if format == torch.int8 else numbers.clamp(-448, 448)
        target.copy_(numbers.to(format))
        scales.fill_(2.0**-5)
    return {"k_cache": stored.k, "v_cache": stored.v, "scales": stored.scales}
