"""RMSNorm, with the residual sum before it when there is one, in Triton. Oracle: `reference.rms_norm`.

Owns the kernel and its launch; arguments were checked by `dispatch`. A row stays in registers between its two
uses, so every number is read once and written once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def rms_norm_kernel(
    x,
    residual,
    weight,
    out,
    eps,
    x_stride,
    residual_stride,
    out_stride,
    WIDTH: tl.constexpr,
    PADDED_WIDTH: tl.constexpr,
    ADDED: tl.constexpr,
):
    """Grid (rows,). ADDED: `residual` becomes residual + x, and the norm is taken of what was stored there."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, PADDED_WIDTH)
    mask = columns < WIDTH
    values = tl.load(x + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    if ADDED:
        before = tl.load(residual + row * residual_stride + columns, mask=mask, other=0.0)
        total = (before.to(tl.float32) + values).to(residual.dtype.element_ty)
        tl.store(residual + row * residual_stride + columns, total, mask=mask)
        values = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / WIDTH + eps)
    scaled = values * scale * tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + columns, scaled.to(out.dtype.element_ty), mask=mask)


def num_warps(padded_width: int) -> int:
    """Sixteen numbers a thread or fewer, so that a wide row doesn't spill."""
    return min(16, max(1, padded_width // 512))


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None, out: torch.Tensor
) -> None:
    """As `dispatch.rms_norm`, into `out`."""
    num_rows, width = x.shape
    padded_width = triton.next_power_of_2(width)
    rms_norm_kernel[(num_rows,)](
        x,
        residual,
        weight,
        out,
        eps,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        out.stride(0),
        WIDTH=width,
        PADDED_WIDTH=padded_width,
        ADDED=residual is not None,
        num_warps=num_warps(padded_width),
        enable_fp_fusion=True,
    )
