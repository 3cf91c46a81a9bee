"""Copying whole blocks inside the KV pool, in Triton. Oracle: `reference.copy_blocks`.

Owns the kernel and its launch; arguments were checked by `dispatch`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TILE_ELEMENTS = 2048


@triton.jit
def copy_blocks_kernel(
    kv,
    block_copies,
    plane_stride,
    block_elements,
    TILE: tl.constexpr,
):
    """Grid (copies, layers * 2, tiles of a block): every program copies one tile of one layer's K or V."""
    copy = tl.program_id(0)
    plane = kv + tl.program_id(1).to(tl.int64) * plane_stride
    source = tl.load(block_copies + 2 * copy).to(tl.int64)
    destination = tl.load(block_copies + 2 * copy + 1).to(tl.int64)
    elements = tl.program_id(2) * TILE + tl.arange(0, TILE)
    mask = elements < block_elements
    values = tl.load(plane + source * block_elements + elements, mask=mask)
    tl.store(plane + destination * block_elements + elements, values, mask=mask)


def copy_blocks(kv: torch.Tensor, block_copies: torch.Tensor) -> None:
    """As `dispatch.copy_blocks`. No order among the copies is kept, hence no destination may be a source."""
    block_elements = kv.stride(2)
    copies = block_copies.contiguous()
    grid = (copies.shape[0], kv.shape[0] * 2, triton.cdiv(block_elements, TILE_ELEMENTS))
    copy_blocks_kernel[grid](
        kv, copies, kv.stride(1), block_elements, TILE=TILE_ELEMENTS, num_warps=4, enable_fp_fusion=False
    )
