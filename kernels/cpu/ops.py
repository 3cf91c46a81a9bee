"""torch tensors in, numba arrays through: the CPU side of `kernels.dispatch`, and the warm-up.

Owns the views between the two worlds. Arguments were checked by dispatch.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from octavo.kernels.cpu import elementwise, gemm, int8, kv_cache, quantised_kv, runtime
from octavo.kernels.cpu.attention import paged_attention_float32, paged_attention_kernel
from octavo.kernels.cpu.packing import pack_weight
from octavo.kernels.layer_cache import Scales
from octavo.kernels.packed_weight import PackedWeight

# How the attention kernel is told a number format: by an integer dtype that holds its bits.
_CARRIER = {
    torch.bfloat16: torch.uint16,
    torch.float16: torch.int16,
    torch.float8_e4m3fn: torch.uint8,
    torch.int8: torch.uint8,
}
_BITS = {4: torch.int32, 2: torch.int16, 1: torch.uint8}
_FORMATS = {torch.int8: quantised_kv.INT8, torch.float8_e4m3fn: quantised_kv.FP8}


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
    *,
    scales: Scales | None = None,
) -> None:
    """As `dispatch.paged_attention`. Narrow formats are widened to float32 on reading and `out` is rounded once."""
    num_blocks, num_kv_heads, block_size, head_dim = k_cache.shape
    shape = (num_kv_heads, q.shape[1] // num_kv_heads, block_size, head_dim)
    options = (sliding_window or 0, float(scale), float(softcap or 0.0))
    # Held by name until the call returns: the kernel sees only their addresses.
    tables, offsets, lengths = (tensor.contiguous() for tensor in (block_tables, cu_seqlens_q, context_lens))
    if q.dtype == k_cache.dtype == out.dtype == torch.float32:
        with runtime.parallel_section:
            paged_attention_float32(
                (q.data_ptr(), q.stride(0), q.stride(1)),
                k_cache.data_ptr(),
                v_cache.data_ptr(),
                num_blocks,
                (tables.data_ptr(), tables.shape[0], tables.shape[1]),
                offsets.data_ptr(),
                lengths.data_ptr(),
                shape,
                options,
                (out.data_ptr(), out.stride(0), out.stride(1)),
                q.shape[0],
                runtime.thread_count(),
            )
        return
    queries = q if q.dtype == torch.float32 else q.float()
    result = out if out.dtype == torch.float32 else torch.zeros(out.shape, dtype=torch.float32)
    carrier = _CARRIER.get(k_cache.dtype)
    k_scales, v_scales = (None, None) if scales is None else map(_flat, scales)
    slots = block_size * head_dim
    with runtime.parallel_section:
        paged_attention_kernel(
            _flat(queries),
            (queries.stride(0), queries.stride(1)),
            (
                _flat(k_cache, carrier),
                _flat(v_cache, carrier),
                k_scales,
                v_scales,
                k_cache.dtype == torch.int8,
            ),
            (k_cache.stride(0), slots, head_dim, 0 if scales is None else scales[0].stride(0)),
            (tables.numpy(), offsets.numpy(), lengths.numpy()),
            shape,
            options,
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


def write_kv_quantised(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    scales: Scales,
    slot_mapping: torch.Tensor,
) -> None:
    """As `dispatch.write_kv` with scales."""
    k_rows, v_rows = k.float(), v.float()
    quantised_kv.write_quantised_rows(
        _flat(k_rows),
        (k_rows.stride(0), k_rows.stride(1)),
        _flat(v_rows),
        (v_rows.stride(0), v_rows.stride(1)),
        (_flat(k_cache, torch.uint8), _flat(v_cache, torch.uint8)),
        (_flat(scales[0]), _flat(scales[1])),
        (k_cache.stride(0), scales[0].stride(0)),
        slot_mapping.contiguous().numpy(),
        tuple(k_cache.shape),
        _FORMATS[k_cache.dtype],
    )


def write_kv_rope_quantised(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    scales: Scales,
    slot_mapping: torch.Tensor,
) -> None:
    """As `dispatch.write_kv_rope` with scales: a scale needs all of a block's new keys, turned, so these go through
    a plain cache of one token a block."""
    num_tokens, num_kv_heads, head_dim = k.shape
    turned = torch.empty(2, num_tokens, num_kv_heads, 1, head_dim)
    write_kv_rope(q, k, v, cos, sin, turned[0], turned[1], torch.arange(num_tokens))
    write_kv_quantised(turned[0, :, :, 0], turned[1, :, :, 0], k_cache, v_cache, scales, slot_mapping)


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
    """As `dispatch.write_kv_rope`. Half formats go the long way, through float32 copies."""
    if q.dtype != torch.float32 or k_cache.dtype != torch.float32:
        wide_q, wide_k = q.float().contiguous(), k.float().contiguous()
        _rotate(wide_q, cos, sin)
        _rotate(wide_k, cos, sin)
        q.copy_(wide_q)
        write_kv(wide_k, v, k_cache, v_cache, slot_mapping)
        return
    slots = slot_mapping.contiguous()
    with runtime.parallel_section:
        kv_cache.write_kv_rope_kernel(
            q.shape[0],
            (q.data_ptr(), q.stride(0), q.stride(1)),
            (k.data_ptr(), k.stride(0), k.stride(1)),
            (v.data_ptr(), v.stride(0), v.stride(1)),
            q.shape[1],
            (cos.data_ptr(), sin.data_ptr(), cos.stride(0), cos.shape[1]),
            (k_cache.data_ptr(), v_cache.data_ptr()),
            k_cache.shape[0],
            (k_cache.shape[1], k_cache.shape[2], k_cache.shape[3]),
            slots.data_ptr(),
            runtime.thread_count(),
        )


def _rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    half = cos.shape[1]
    first, second = heads[..., :half].clone(), heads[..., half : 2 * half].clone()
    heads[..., :half] = first * cos[:, None] - second * sin[:, None]
    heads[..., half : 2 * half] = second * cos[:, None] + first * sin[:, None]


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None, out: torch.Tensor
) -> None:
    """As `dispatch.rms_norm`. Half formats go the long way, through float32 copies."""
    if x.dtype != torch.float32 or weight.dtype != torch.float32:
        if residual is not None:
            residual += x
            x = residual
        wide = torch.empty(x.shape, dtype=torch.float32)
        rms_norm(x.float(), weight.float(), eps, None, wide)
        out.copy_(wide)
        return
    num_rows, size = x.shape
    with runtime.parallel_section:
        elementwise.rms_norm_kernel(
            num_rows,
            size,
            x.data_ptr(),
            x.stride(0),
            weight.data_ptr(),
            eps,
            0 if residual is None else residual.data_ptr(),
            0 if residual is None else residual.stride(0),
            out.data_ptr(),
            runtime.thread_count(),
        )


def silu_mul(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """As `dispatch.silu_mul`. Half formats go the long way, through float32 copies."""
    if gate_up.dtype != torch.float32:
        wide = torch.empty(out.shape, dtype=torch.float32)
        silu_mul(gate_up.float(), wide)
        out.copy_(wide)
        return
    num_rows, size = out.shape
    with runtime.parallel_section:
        elementwise.silu_mul_kernel(
            num_rows, size, gate_up.data_ptr(), gate_up.stride(0), out.data_ptr(), runtime.thread_count()
        )


def multiply(x: torch.Tensor, weight: PackedWeight, out: torch.Tensor) -> None:
    """As `dispatch.multiply`."""
    bias_at = 0 if weight.bias is None else weight.bias.data_ptr()
    if weight.int8 is not None:
        begins, scales = weight.int8
        with runtime.parallel_section:
            int8.multiply_int8_kernel(
                x.shape[0],
                weight.in_features,
                (x.data_ptr(), x.stride(0)),
                (weight.panels.data_ptr(), begins.data_ptr(), scales.data_ptr(), weight.out_features),
                out.data_ptr(),
                bias_at,
                weight.gated,
                runtime.thread_count(),
            )
        return
    with runtime.parallel_section:
        gemm.multiply_kernel(
            x.shape[0],
            (x.data_ptr(), x.stride(0)),
            (weight.panels.data_ptr(), weight.in_features, weight.out_features),
            out.data_ptr(),
            bias_at,
            weight.gated,
            runtime.thread_count(),
            None,
        )


def normalize_rows(x: torch.Tensor, rows: torch.Tensor, peaks: torch.Tensor) -> None:
    """As `dispatch.normalize_rows`."""
    x = x.contiguous()
    with runtime.parallel_section:
        elementwise.normalize_rows_kernel(
            x.shape[0], x.shape[1], x.data_ptr(), rows.data_ptr(), peaks.data_ptr(), runtime.thread_count()
        )


def scale_rows(x: torch.Tensor, factors: torch.Tensor, bias: torch.Tensor | None) -> None:
    """As `dispatch.scale_rows`."""
    with runtime.parallel_section:
        elementwise.scale_rows_kernel(
            x.shape[0],
            x.shape[1],
            x.data_ptr(),
            factors.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            runtime.thread_count(),
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
    angles = torch.zeros(2, head_dim // 2)
    write_kv_rope(
        rows,
        rows[:, :num_kv_heads],
        rows[:, :num_kv_heads],
        angles,
        angles,
        kv[0, 0],
        kv[0, 1],
        torch.tensor([0, -1]),
    )
    rms_norm(rows[:, 0], rows[0, 0], 1e-6, None, torch.empty_like(rows[:, 0]))
    silu_mul(rows.view(2, -1)[:, :2], torch.empty(2, 1, dtype=dtype))
    multiply(torch.zeros(1, 8), pack_weight(torch.zeros(8, 8), None), torch.empty(1, 8))
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
