"""torch tensors in, numba arrays through: the CPU side of `kernels.dispatch`, and the warm-up.

Owns the views between the two worlds. Arguments were checked by dispatch.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from octavo.kernels.cpu import kv_cache, runtime
from octavo.kernels.cpu.attention import paged_attention_kernel

# How the attention kernel is told a number format: by an integer dtype that holds its bits.
_CARRIER = {torch.bfloat16: torch.uint16, torch.float16: torch.int16}
_BITS = {4: torch.int32, 2: torch.int16}


def _flat(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> npt.NDArray[np.generic]:
    """One-dimensional view from the tensor's first element over all that its strides reach."""
    if tensor.is_contiguous():
        flat = tensor.view(-1)
    else:
        reach = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
        flat = tensor.as_strided((reach,), (1,))
    return (flat if dtype is None else flat.view(dtype)).numpy()


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
    out: torch.Tensor,
) -> None:
    """As `dispatch.paged_attention`. Half formats are widened to float32 on reading and `out` is rounded once."""
    _, num_kv_heads, block_size, head_dim = k_cache.shape
    queries = q if q.dtype == torch.float32 else q.float()
    result = out if out.dtype == torch.float32 else torch.zeros(out.shape, dtype=torch.float32)
    carrier = _CARRIER.get(k_cache.dtype)
    slots = block_size * head_dim
    with runtime.parallel_section:
        paged_attention_kernel(
            _flat(queries),
            (queries.stride(0), queries.stride(1)),
            (_flat(k_cache, carrier), _flat(v_cache, carrier)),
            (num_kv_heads * slots, slots, head_dim),
            (
                block_tables.contiguous().numpy(),
                cu_seqlens_q.contiguous().numpy(),
                context_lens.contiguous().numpy(),
            ),
            (num_kv_heads, q.shape[1] // num_kv_heads, block_size, head_dim),
            (sliding_window or 0, float(scale), float(softcap or 0.0)),
            _flat(result),
            (result.stride(0), result.stride(1)),
            runtime.thread_count(),
        )
    if result is not out:
        computed = int(cu_seqlens_q[-1])
        out[:computed] = result[:computed]


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """As `dispatch.write_kv`."""
    _, num_kv_heads, block_size, head_dim = k_cache.shape
    bits = _BITS[k_cache.element_size()]
    k_rows, v_rows = k.to(k_cache.dtype), v.to(v_cache.dtype)
    kv_cache.write_rows(
        _flat(k_rows, bits),
        (k_rows.stride(0), k_rows.stride(1)),
        _flat(v_rows, bits),
        (v_rows.stride(0), v_rows.stride(1)),
        _flat(k_cache, bits),
        _flat(v_cache, bits),
        slot_mapping.contiguous().numpy(),
        (num_kv_heads, block_size, head_dim),
    )


def copy_blocks(kv: torch.Tensor, block_copies: torch.Tensor) -> None:
    """As `dispatch.copy_blocks`."""
    planes = kv.view(kv.shape[0] * 2, kv.shape[2], -1).view(_BITS[kv.element_size()])
    kv_cache.copy_rows(planes.numpy(), block_copies.to(torch.int64).contiguous().numpy())


def warm_up(dtype: torch.dtype, *, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int) -> None:
    """Compile, or load from the code cache, everything a worker with this KV dtype will run; takes seconds once."""
    kv = torch.zeros(1, 2, 2, num_kv_heads, block_size, head_dim, dtype=dtype)
    rows = torch.zeros(2, num_heads, head_dim, dtype=dtype)
    write_kv(rows[:, :num_kv_heads], rows[:, :num_kv_heads], kv[0, 0], kv[0, 1], torch.tensor([0, -1]))
    copy_blocks(kv, torch.tensor([[0, 1]]))
    paged_attention(
        rows,
        kv[0, 0],
        kv[0, 1],
        torch.zeros(1, 1, dtype=torch.int32),
        torch.tensor([0, 2], dtype=torch.int32),
        torch.tensor([2], dtype=torch.int32),
        1.0,
        None,
        None,
        torch.empty_like(rows),
    )
