"""Rotary embedding of queries and keys and the cache write in one pass, in Triton. Oracle: `reference.write_kv_rope`.

Owns the kernel and its launch; arguments were checked by `dispatch`. Rotated keys go straight to their slots: they
are neither stored beside the cache nor read again.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def rotated_halves(heads, mask, half, c, s):
    """Both halves, float32, of rows whose first elements `heads` points at."""
    first = tl.load(heads, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(heads + half, mask=mask, other=0.0).to(tl.float32)
    return first * c - second * s, second * c + first * s


@triton.jit
def write_kv_rope_kernel(
    q,
    k,
    v,
    cos,
    sin,
    k_cache,
    v_cache,
    slot_mapping,
    q_token_stride,
    q_head_stride,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    cos_stride,
    sin_stride,
    block_stride,
    head_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    PADDED_KV_HEADS: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    PADDED_REST: tl.constexpr,
):
    """Grid (tokens,). HALF: dimension i turns with i + HALF; dimensions from 2 * HALF on stay. PADDED_REST covers
    those, 0 when there are none."""
    token = tl.program_id(0).to(tl.int64)
    halves = tl.arange(0, PADDED_HALF)[None, :]
    half_mask = halves < HALF
    c = tl.load(cos + token * cos_stride + halves, mask=half_mask, other=0.0)
    s = tl.load(sin + token * sin_stride + halves, mask=half_mask, other=0.0)

    heads = tl.arange(0, PADDED_HEADS)[:, None].to(tl.int64)
    q_rows = q + token * q_token_stride + heads * q_head_stride + halves
    q_mask = (heads < NUM_HEADS) & half_mask
    first, second = rotated_halves(q_rows, q_mask, HALF, c, s)
    tl.store(q_rows, first.to(q.dtype.element_ty), mask=q_mask)
    tl.store(q_rows + HALF, second.to(q.dtype.element_ty), mask=q_mask)

    slot = tl.load(slot_mapping + token)
    if slot < 0:
        return
    kv_heads = tl.arange(0, PADDED_KV_HEADS)[:, None].to(tl.int64)
    target = slot // BLOCK_SIZE * block_stride + kv_heads * head_stride + slot % BLOCK_SIZE * HEAD_DIM
    k_rows = k + token * k_token_stride + kv_heads * k_head_stride
    kv_mask = kv_heads < NUM_KV_HEADS
    k_mask = kv_mask & half_mask
    first, second = rotated_halves(k_rows + halves, k_mask, HALF, c, s)
    tl.store(k_cache + target + halves, first.to(k_cache.dtype.element_ty), mask=k_mask)
    tl.store(k_cache + target + HALF + halves, second.to(k_cache.dtype.element_ty), mask=k_mask)
    if PADDED_REST > 0:
        rest = 2 * HALF + tl.arange(0, PADDED_REST)[None, :]
        rest_mask = kv_mask & (rest < HEAD_DIM)
        unturned = tl.load(k_rows + rest, mask=rest_mask)
        tl.store(k_cache + target + rest, unturned.to(k_cache.dtype.element_ty), mask=rest_mask)
    dims = tl.arange(0, PADDED_DIM)[None, :]
    v_mask = kv_mask & (dims < HEAD_DIM)
    value = tl.load(v + token * v_token_stride + kv_heads * v_head_stride + dims, mask=v_mask)
    tl.store(v_cache + target + dims, value.to(v_cache.dtype.element_ty), mask=v_mask)


def constants(num_heads: int, num_kv_heads: int, head_dim: int, half: int, block_size: int) -> dict[str, int]:
    """Compile-time arguments of the kernel; `half` is how many pairs of dimensions turn."""
    rest = head_dim - 2 * half
    return {
        "NUM_HEADS": num_heads,
        "NUM_KV_HEADS": num_kv_heads,
        "HEAD_DIM": head_dim,
        "HALF": half,
        "BLOCK_SIZE": block_size,
        "PADDED_HEADS": triton.next_power_of_2(num_heads),
        "PADDED_KV_HEADS": triton.next_power_of_2(num_kv_heads),
        "PADDED_DIM": triton.next_power_of_2(head_dim),
        "PADDED_HALF": triton.next_power_of_2(half),
        "PADDED_REST": triton.next_power_of_2(rest) if rest else 0,
    }


def num_warps(num_heads: int, head_dim: int) -> int:
    """Sixteen numbers of the two query halves a thread, up to 16 warps."""
    elements = triton.next_power_of_2(num_heads) * triton.next_power_of_2(head_dim)
    return min(16, max(1, elements // 1024))


def write_kv_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """As `dispatch.write_kv_rope`. A slot outside the cache is not noticed here: the worker checks its plans."""
    num_tokens, num_heads, head_dim = q.shape
    _, num_kv_heads, block_size, _ = k_cache.shape
    write_kv_rope_kernel[(num_tokens,)](
        q,
        k,
        v,
        cos,
        sin,
        k_cache,
        v_cache,
        slot_mapping,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        cos.stride(0),
        sin.stride(0),
        k_cache.stride(0),
        k_cache.stride(1),
        **constants(num_heads, num_kv_heads, head_dim, cos.shape[1], block_size),
        num_warps=num_warps(num_heads, head_dim),
        enable_fp_fusion=True,
    )
