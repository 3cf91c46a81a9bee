"""SiLU(gate) * up, in Triton. Oracle: `reference.silu_mul`.

Owns the kernel and its launch; arguments were checked by `dispatch`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TILE_ELEMENTS = 1024


@triton.jit
def silu_mul_kernel(gate_up, out, row_stride, out_stride, width, TILE: tl.constexpr):
    """Grid (rows, tiles of the width); gate in a row's first `width` numbers, up in the next."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = columns < width
    gate = tl.load(gate_up + row * row_stride + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * row_stride + width + columns, mask=mask, other=0.0).to(tl.float32)
    # exp overflows to infinity where the sigmoid is 0.
    product = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * out_stride + columns, product.to(out.dtype.element_ty), mask=mask)


def silu_mul(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """As `dispatch.silu_mul`, into `out`."""
    num_rows, width = out.shape
    silu_mul_kernel[(num_rows, triton.cdiv(width, TILE_ELEMENTS))](
        gate_up,
        out,
        gate_up.stride(0),
        out.stride(0),
        width,
        TILE=TILE_ELEMENTS,
        num_warps=4,
        enable_fp_fusion=True,
    )
