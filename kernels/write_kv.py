"""Storing a step's keys and values in their slots, in Triton. Oracle: `reference.write_kv`.

Owns the kernel and its launch; arguments were checked by `dispatch`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def write_kv_kernel(
    k,
    v,
    k_cache,
    v_cache,
    slot_mapping,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    block_stride,
    head_stride,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    PADDED_DIM: tl.constexpr,
):
    """Grid (tokens,). A program moves one token: of every head, HEAD_DIM neighbours in both places."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot < 0:
        return
    heads = tl.arange(0, PADDED_HEADS)[:, None].to(tl.int64)
    dims = tl.arange(0, PADDED_DIM)[None, :]
    mask = (heads < NUM_HEADS) & (dims < HEAD_DIM)
    target = slot // BLOCK_SIZE * block_stride + heads * head_stride + slot % BLOCK_SIZE * HEAD_DIM + dims
    key = tl.load(k + token * k_token_stride + heads * k_head_stride + dims, mask=mask)
    value = tl.load(v + token * v_token_stride + heads * v_head_stride + dims, mask=mask)
    tl.store(k_cache + target, key.to(k_cache.dtype.element_ty), mask=mask)
    tl.store(v_cache + target, value.to(v_cache.dtype.element_ty), mask=mask)


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """As `dispatch.write_kv`. A slot outside the cache is not noticed here: the worker checks its plans."""
    _, num_heads, block_size, head_dim = k_cache.shape
    write_kv_kernel[(k.shape[0],)](
        k,
        v,
        k_cache,
        v_cache,
        slot_mapping,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        k_cache.stride(0),
        k_cache.stride(1),
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        PADDED_HEADS=triton.next_power_of_2(num_heads),
        PADDED_DIM=triton.next_power_of_2(head_dim),
        num_warps=4,
        enable_fp_fusion=False,
    )
