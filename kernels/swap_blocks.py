"""Whole blocks between the KV pool and contiguous staging memory on the device, in Triton, for swapping.

Owns both kernels and their launches; oracles: `reference.gather_blocks` and `reference.scatter_blocks`. A block is
one run of memory per layer and kind in the pool and one run of all of them in staging, so that it crosses the host
link as one transfer.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TILE_ELEMENTS = 2048


@triton.jit
def swap_blocks_kernel(
    kv,
    staging,
    block_ids,
    plane_stride,
    block_elements,
    INTO_POOL: tl.constexpr,
    TILE: tl.constexpr,
):
    """Grid (blocks, layers * 2, tiles of a block): every program moves one tile of one layer's K or V."""
    index = tl.program_id(0).to(tl.int64)
    plane = tl.program_id(1).to(tl.int64)
    block = tl.load(block_ids + index).to(tl.int64)
    elements = tl.program_id(2) * TILE + tl.arange(0, TILE)
    mask = elements < block_elements
    pool_places = kv + plane * plane_stride + block * block_elements + elements
    staging_places = staging + (index * tl.num_programs(1) + plane) * block_elements + elements
    if INTO_POOL:
        tl.store(pool_places, tl.load(staging_places, mask=mask), mask=mask)
    else:
        tl.store(staging_places, tl.load(pool_places, mask=mask), mask=mask)


def _launch(kv: torch.Tensor, block_ids: torch.Tensor, staging: torch.Tensor, *, into_pool: bool) -> None:
    block_elements = kv.stride(2)
    grid = (block_ids.shape[0], kv.shape[0] * 2, triton.cdiv(block_elements, TILE_ELEMENTS))
    swap_blocks_kernel[grid](
        kv,
        staging,
        block_ids,
        kv.stride(1),
        block_elements,
        INTO_POOL=into_pool,
        TILE=TILE_ELEMENTS,
        num_warps=4,
        enable_fp_fusion=False,
    )


def gather_blocks(kv: torch.Tensor, block_ids: torch.Tensor, staging: torch.Tensor) -> None:
    """As `dispatch.gather_blocks`."""
    _launch(kv, block_ids, staging, into_pool=False)


def scatter_blocks(staging: torch.Tensor, block_ids: torch.Tensor, kv: torch.Tensor) -> None:
    """As `dispatch.scatter_blocks`."""
    _launch(kv, block_ids, staging, into_pool=True)
