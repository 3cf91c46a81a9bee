"""Attention over parts of the keys, put together, in Triton.

Owns the layout in which kernels leave their parts, and the kernel that merges them by their log-sum-exps. A part
that saw no key counts nothing, whatever its memory holds.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl


@dataclass(frozen=True, slots=True)
class Partials:
    """P parts of T rows of Hq heads."""

    results: torch.Tensor
    """float32 [P, T, Hq, D], each a softmax average of its own; not set where lse is minus infinity"""
    lse: torch.Tensor
    """float32 [P, T, Hq], log2 of the sum of exp2 of its scores"""

    @classmethod
    def empty(cls, num_partials: int, q: torch.Tensor) -> Partials:
        """Room for q [T, Hq, D]."""
        sizes = (num_partials, *q.shape)
        return cls(
            results=torch.empty(sizes, dtype=torch.float32, device=q.device),
            lse=torch.empty(sizes[:-1], dtype=torch.float32, device=q.device),
        )


@triton.jit(do_not_specialize=["num_seqs", "num_rows", "num_partials"])
def merge_partials_kernel(
    partials,
    partial_lse,
    out,
    cu_seqlens_q,
    num_seqs,
    num_rows,
    num_partials,
    out_token_stride,
    out_head_stride,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_PARTIALS: tl.constexpr,
    PADDED_DIM: tl.constexpr,
):
    """Grid (rows, heads). Rows from cu_seqlens_q[num_seqs] on are padding: nobody made parts of them."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    if row >= tl.load(cu_seqlens_q + num_seqs):
        return
    parts = tl.arange(0, PADDED_PARTIALS).to(tl.int64)
    dims = tl.arange(0, PADDED_DIM)
    places = (parts * num_rows + row) * NUM_HEADS + head
    lse = tl.load(partial_lse + places, mask=parts < num_partials, other=float("-inf"))
    largest = tl.max(lse, 0)
    weights = tl.exp2(lse - tl.where(largest == float("-inf"), 0.0, largest))
    mask = (lse != float("-inf"))[:, None] & (dims < HEAD_DIM)[None, :]
    results = tl.load(partials + places[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)
    merged = tl.sum(results * weights[:, None], 0) / tl.sum(weights, 0)
    tl.store(
        out + row * out_token_stride + head * out_head_stride + dims,
        merged.to(out.dtype.element_ty),
        mask=dims < HEAD_DIM,
    )


def constants(num_partials: int, num_heads: int, head_dim: int) -> dict[str, int]:
    """Compile-time arguments of the kernel."""
    return {
        "NUM_HEADS": num_heads,
        "HEAD_DIM": head_dim,
        "PADDED_PARTIALS": triton.next_power_of_2(num_partials),
        "PADDED_DIM": triton.next_power_of_2(head_dim),
    }


def merge_partials(partials: Partials, cu_seqlens_q: torch.Tensor, out: torch.Tensor) -> None:
    """Write to `out` [T, Hq, D] what attention over all parts together gives."""
    num_partials, num_rows, num_heads, head_dim = partials.results.shape
    merge_partials_kernel[(num_rows, num_heads)](
        partials.results,
        partials.lse,
        out,
        cu_seqlens_q,
        cu_seqlens_q.shape[0] - 1,
        num_rows,
        num_partials,
        out.stride(0),
        out.stride(1),
        **constants(num_partials, num_heads, head_dim),
        num_warps=4,
        enable_fp_fusion=True,
    )
