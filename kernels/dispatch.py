"""The door to the kernels: one name an operation, the implementation picked by the tensors' device.

Owns the choice and the checks of shapes and dtypes that hold for every implementation. CPU tensors go to the
numba twins (`kernels.cpu`), CUDA tensors to the Triton kernels; each is imported on first use, so a machine
without triton, or without numba, runs what it has. What the operations mean is written in `kernels.reference`.

Call them without autograd (`torch.inference_mode`).

A wrong shape or dtype is a bug of the caller, not of a user: `ValueError`. What a user may choose is listed by
`supported_dtypes`, so that configuration can refuse the rest by name.
"""

from __future__ import annotations

import functools
from importlib import import_module
from typing import Any

import torch

from octavo.kernels.layer_cache import Scales
from octavo.kernels.packed_weight import PackedWeight

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
QUANTISED = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
"""Formats of a KV cache with scales, by name; on every device that has kernels."""
_MODULES = {
    "write_kv_quantised": "quantised_kv",
    "write_kv_rope_quantised": "quantised_kv",
}
"""Of the Triton kernels that do not stand in a file of their own name."""


def supported_dtypes(device_type: str) -> tuple[torch.dtype, ...]:
    """Dtypes that queries and the KV cache may have on "cpu" or "cuda"; () for a device without kernels.

    On the CPU the half formats are storage only: a block is widened to float32 as it is read, all arithmetic
    is float32, and the result is rounded once.
    """
    return _FLOATS if device_type in ("cpu", "cuda") else ()


@functools.cache
def _implementation(device_type: str, operation: str) -> Any:
    if device_type == "cpu":
        module = "octavo.kernels.cpu"
    elif device_type == "cuda":
        module = f"octavo.kernels.{_MODULES.get(operation, operation)}"
    else:
        raise ValueError(f"no kernels for device {device_type!r}")
    found = getattr(import_module(module), operation, None)
    if found is None:
        raise ValueError(f"{operation} is not for {device_type}")
    return found


def _check_caches(k_cache: torch.Tensor, v_cache: torch.Tensor, scales: Scales | None) -> None:
    if k_cache.dim() != 4 or k_cache.shape != v_cache.shape or k_cache.dtype != v_cache.dtype:
        raise ValueError(
            "k_cache and v_cache must both be [num_blocks, num_kv_heads, block_size, head_dim] of one dtype, "
            f"got {tuple(k_cache.shape)} {k_cache.dtype} and {tuple(v_cache.shape)} {v_cache.dtype}"
        )
    if k_cache.dtype not in (_FLOATS if scales is None else QUANTISED.values()):
        raise ValueError(
            f"no kernels for a KV cache of {k_cache.dtype} {'without' if scales is None else 'with'} scales"
        )
    if scales is None:
        if not (k_cache.is_contiguous() and v_cache.is_contiguous()):
            raise ValueError("a layer's KV cache must be contiguous")
        return
    if k_cache.stride() != v_cache.stride() or not k_cache[:1].is_contiguous():
        raise ValueError(
            "each block of a quantised KV cache must be contiguous, those of keys as far apart as of values"
        )
    for each in scales:
        if each.shape != k_cache.shape[:2] or each.dtype != torch.float32 or each.stride(1) != 1:
            raise ValueError(
                f"scales must be float32 {list(k_cache.shape[:2])}, heads side by side, got {each.dtype} "
                f"{tuple(each.shape)}"
            )


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    scales: Scales | None = None,
) -> None:
    """Store this step's keys and values in their slots, in place; see `reference.write_kv`.

    k, v            [T, Hkv, D], last dimension contiguous; rounded to the cache's dtype
    k_cache,v_cache [num_blocks, Hkv, block_size, D], contiguous
    slot_mapping    int64 [T], block_id * block_size + offset; negative: skipped. No slot twice
    scales          of a quantised cache, whose blocks are contiguous; see `reference_quantised.write_kv_quantised`
                    for what then holds of slot_mapping
    """
    _check_caches(k_cache, v_cache, scales)
    _, num_kv_heads, _, head_dim = k_cache.shape
    num_tokens = k.shape[0]
    if k.shape != v.shape or k.shape != (num_tokens, num_kv_heads, head_dim):
        raise ValueError(
            f"k and v must be [T, {num_kv_heads}, {head_dim}], got {tuple(k.shape)} and {tuple(v.shape)}"
        )
    if k.stride(2) != 1 or v.stride(2) != 1:
        raise ValueError("k and v must be contiguous in their last dimension")
    if slot_mapping.dtype != torch.int64 or slot_mapping.shape != (num_tokens,):
        raise ValueError(
            f"slot_mapping must be int64 [{num_tokens}], got {slot_mapping.dtype} {tuple(slot_mapping.shape)}"
        )
    if num_tokens and scales is None:
        _implementation(k_cache.device.type, "write_kv")(k, v, k_cache, v_cache, slot_mapping)
    elif num_tokens:
        _implementation(k_cache.device.type, "write_kv_quantised")(
            k, v, k_cache, v_cache, scales, slot_mapping
        )


def write_kv_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    scales: Scales | None = None,
) -> None:
    """Rotate q in place; store k, rotated, and v in their slots; see `reference.write_kv_rope`.

    q               [T, Hq, D]; k, v [T, Hkv, D]; last dimensions contiguous
    cos, sin        float32 [T, R / 2] of the same strides, last dimension contiguous, R <= D
    k_cache,v_cache [num_blocks, Hkv, block_size, D], contiguous
    slot_mapping, scales: as in `write_kv`; with scales, k may be rotated in place
    """
    _check_caches(k_cache, v_cache, scales)
    num_tokens, (_, num_kv_heads, _, head_dim) = q.shape[0], k_cache.shape
    if k.shape != v.shape or k.shape != (num_tokens, num_kv_heads, head_dim) or q.shape[2] != head_dim:
        raise ValueError(
            f"q, k and v must be [T, heads, {head_dim}], {num_kv_heads} heads of k and v, "
            f"got {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        )
    if not q.stride(2) == k.stride(2) == v.stride(2) == 1:
        raise ValueError("q, k and v must be contiguous in their last dimension")
    if (
        cos.dtype != torch.float32
        or sin.dtype != torch.float32
        or cos.shape != sin.shape
        or cos.stride() != sin.stride()
        or cos.stride(1) != 1
        or cos.shape[0] != num_tokens
        or 2 * cos.shape[1] > head_dim
    ):
        raise ValueError(
            f"cos and sin must be float32 [{num_tokens}, at most {head_dim // 2}] of the same strides, "
            f"got {cos.dtype} {tuple(cos.shape)} and {sin.dtype} {tuple(sin.shape)}"
        )
    if slot_mapping.dtype != torch.int64 or slot_mapping.shape != (num_tokens,):
        raise ValueError(
            f"slot_mapping must be int64 [{num_tokens}], got {slot_mapping.dtype} {tuple(slot_mapping.shape)}"
        )
    if num_tokens and scales is None:
        _implementation(k_cache.device.type, "write_kv_rope")(
            q, k, v, cos, sin, k_cache, v_cache, slot_mapping
        )
    elif num_tokens:
        _implementation(k_cache.device.type, "write_kv_rope_quantised")(
            q, k, v, cos, sin, k_cache, v_cache, scales, slot_mapping
        )


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """Root-mean-square norm of x, or of residual + x, which then stays in residual; see `reference.rms_norm`.

    x, residual [T, H] of one dtype, last dimension contiguous; weight [H], contiguous. Returns a new [T, H].
    """
    if x.dim() != 2 or x.stride(1) != 1 or weight.shape != x.shape[1:] or not weight.is_contiguous():
        raise ValueError(
            f"x must be [T, H] and weight [H], contiguous, got {tuple(x.shape)} and {tuple(weight.shape)}"
        )
    if residual is not None and (
        residual.shape != x.shape or residual.dtype != x.dtype or residual.stride(1) != 1
    ):
        raise ValueError(
            f"residual must match x and be contiguous in its last dimension, got {tuple(residual.shape)} "
            f"{residual.dtype} for {tuple(x.shape)} {x.dtype}"
        )
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.shape[0]:
        _implementation(x.device.type, "rms_norm")(x, weight, eps, residual, out)
    return out


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of [T, 2 * I], last dimension contiguous, gate first; see `reference.silu_mul`."""
    if gate_up.dim() != 2 or gate_up.shape[1] % 2 or gate_up.stride(1) != 1:
        raise ValueError(f"gate_up must be [T, 2 * I], rows contiguous, got {tuple(gate_up.shape)}")
    out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
    if gate_up.shape[0]:
        _implementation(gate_up.device.type, "silu_mul")(gate_up, out)
    return out


def has_int8_products() -> bool:
    """Whether this CPU has kernels for int8 weights (AVX-512 with VNNI)."""
    found: bool = _implementation("cpu", "has_int8_products")()
    return found


def pack_weight(
    weight: torch.Tensor, bias: torch.Tensor | None = None, *, gated: bool = False, int8: bool = False
) -> PackedWeight:
    """The weight of a product, laid out for `multiply`. CPU only.

    weight  float32 [N, K]; bias float32 [N]
    gated   the first N / 2 outputs are gates of the others: see `reference.multiply`
    int8    rounded: see `reference.quantised_multiply`; only where `has_int8_products`
    """
    if weight.dim() != 2 or weight.dtype != torch.float32 or (gated and weight.shape[0] % 2):
        raise ValueError(
            f"weight must be float32 [{'an even N' if gated else 'N'}, K], got {weight.dtype} {tuple(weight.shape)}"
        )
    if bias is not None and (bias.dtype != torch.float32 or bias.shape != weight.shape[:1]):
        raise ValueError(f"bias must be float32 [{weight.shape[0]}], got {bias.dtype} {tuple(bias.shape)}")
    operation = "pack_int8_weight" if int8 else "pack_weight"
    packed: PackedWeight = _implementation(weight.device.type, operation)(weight, bias, gated)
    return packed


def multiply(x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    """x @ weight.T + bias, or SiLU of its first half times its second; see `reference.multiply`. CPU only.

    x float32 [T, K], last dimension contiguous. Returns a new float32 [T, weight.out_features].
    """
    if x.dim() != 2 or x.shape[1] != weight.in_features or x.dtype != torch.float32 or x.stride(1) != 1:
        raise ValueError(
            f"x must be float32 [T, {weight.in_features}], rows contiguous, got {x.dtype} {tuple(x.shape)}"
        )
    out = x.new_empty(x.shape[0], weight.out_features)
    if x.shape[0]:
        _implementation(x.device.type, "multiply")(x, weight, out)
    return out


def normalize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows over their largest magnitudes and a row 1, -1, 0, ...; see `reference.normalize_rows`. CPU only.

    x float32 [T, N], N >= 2. Returns float32 [T + 1, N] and float32 [T].
    """
    if x.dim() != 2 or x.dtype != torch.float32 or x.shape[1] < 2:
        raise ValueError(f"x must be float32 [T, at least 2], got {x.dtype} {tuple(x.shape)}")
    rows, peaks = x.new_empty(x.shape[0] + 1, x.shape[1]), x.new_empty(x.shape[0])
    _implementation(x.device.type, "normalize_rows")(x, rows, peaks)
    return rows, peaks


def scale_rows(x: torch.Tensor, factors: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    """x *= factors, row by row, then += bias; in place. CPU only. x float32 [T, N]; factors [T]; bias [N]."""
    if x.dim() != 2 or not x.is_contiguous() or factors.shape != x.shape[:1]:
        raise ValueError(f"x must be [T, N] and factors [T], got {tuple(x.shape)}, {tuple(factors.shape)}")
    if bias is not None and bias.shape != x.shape[1:]:
        raise ValueError(f"bias must be [{x.shape[1]}], got {tuple(bias.shape)}")
    _implementation(x.device.type, "scale_rows")(x, factors, bias)


def copy_blocks(kv: torch.Tensor, block_copies: torch.Tensor) -> None:
    """Copy whole blocks, all layers, keys and values, in place; see `reference.copy_blocks`.

    kv            [num_layers, 2, num_blocks, ...], contiguous; what a block is made of does not matter
    block_copies  int32 or int64 [C, 2] of (source, destination); no destination is also a source or named twice
    """
    if kv.dim() < 4 or kv.shape[1] != 2 or not kv.is_contiguous():
        raise ValueError(f"kv must be contiguous [num_layers, 2, num_blocks, ...], got {tuple(kv.shape)}")
    if (
        block_copies.dim() != 2
        or block_copies.shape[1] != 2
        or block_copies.dtype not in (torch.int32, torch.int64)
    ):
        raise ValueError(
            f"block_copies must be int32 or int64 [C, 2], got {block_copies.dtype} {tuple(block_copies.shape)}"
        )
    if block_copies.shape[0]:
        _implementation(kv.device.type, "copy_blocks")(kv, block_copies)


def _check_batch(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_tables: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    context_lens: torch.Tensor,
) -> None:
    num_kv_heads, head_dim = k_cache.shape[1], k_cache.shape[3]
    if q.dim() != 3 or q.shape[2] != head_dim or q.shape[1] % num_kv_heads or q.stride(2) != 1:
        raise ValueError(
            f"q must be [T, a multiple of {num_kv_heads}, {head_dim}] and contiguous in its last dimension, "
            f"got {tuple(q.shape)}"
        )
    num_seqs = context_lens.shape[0]
    if block_tables.dim() != 2 or block_tables.shape[0] != num_seqs or cu_seqlens_q.shape[0] != num_seqs + 1:
        raise ValueError(
            "block_tables [S, M], cu_seqlens_q [S + 1] and context_lens [S] disagree on S: "
            f"{tuple(block_tables.shape)}, {tuple(cu_seqlens_q.shape)}, {tuple(context_lens.shape)}"
        )
    if not block_tables.dtype == cu_seqlens_q.dtype == context_lens.dtype == torch.int32:
        raise ValueError("block_tables, cu_seqlens_q and context_lens must be int32")


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    block_tables: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    out: torch.Tensor | None = None,
    scales: Scales | None = None,
    num_shared_blocks: int = 0,
) -> torch.Tensor:
    """Causal attention of a ragged batch, chunks and decodes mixed, over paged keys and values.

    q               [T, Hq, D], last dimension contiguous; Hq a multiple of Hkv
    k_cache,v_cache [num_blocks, Hkv, block_size, D], contiguous, this step's tokens written
    block_tables    int32 [S, M]; entries past a sequence's last block are never read
    cu_seqlens_q    int32 [S + 1]
    context_lens    int32 [S], tokens of the sequence including this step's
    scale, sliding_window, softcap, out: as in `reference.paged_attention`, which also says what padding means
    scales          of a quantised cache, whose blocks are contiguous
    num_shared_blocks  whole blocks that begin every table, in which no row of this step stands: they are read once for
                    all sequences, in layers without a sliding window. CUDA only: the CPU finds what is shared by itself

    Returns [T, Hq, D] in q's dtype.
    """
    _check_caches(k_cache, v_cache, scales)
    _check_batch(q, k_cache, block_tables, cu_seqlens_q, context_lens)
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window must be >= 1, got {sliding_window}")
    if softcap is not None and not softcap > 0.0:
        raise ValueError(f"softcap must be > 0, got {softcap}")
    if out is None:
        out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    elif out.shape != q.shape or out.dtype != q.dtype or out.stride(2) != 1:
        raise ValueError(
            "out must match q and be contiguous in its last dimension, "
            f"got {tuple(out.shape)} {out.dtype} for {tuple(q.shape)} {q.dtype}"
        )
    if not (q.shape[0] and context_lens.shape[0]):
        return out
    if num_shared_blocks and sliding_window is None:
        _implementation(q.device.type, "cascade_attention")(
            q,
            k_cache,
            v_cache,
            block_tables,
            cu_seqlens_q,
            context_lens,
            scale,
            softcap,
            out,
            num_shared_blocks=num_shared_blocks,
            scales=scales,
        )
    else:
        _implementation(q.device.type, "paged_attention")(
            q,
            k_cache,
            v_cache,
            block_tables,
            cu_seqlens_q,
            context_lens,
            scale,
            sliding_window,
            softcap,
            out,
            scales=scales,
        )
    return out


def gather_blocks(kv: torch.Tensor, block_ids: torch.Tensor, staging: torch.Tensor) -> None:
    """Copy blocks of the pool into staging memory on the same device; see `reference.gather_blocks`. CUDA only.

    kv         [num_layers, 2, num_blocks, ...], contiguous; what a block is made of does not matter
    block_ids  int64 [N], contiguous
    staging    [N or more, num_layers, 2, ...], contiguous, of the same dtype
    """
    _check_staging(kv, block_ids, staging)
    if block_ids.shape[0]:
        _swap_kernels(kv).gather_blocks(kv, block_ids, staging)


def scatter_blocks(staging: torch.Tensor, block_ids: torch.Tensor, kv: torch.Tensor) -> None:
    """The way back of `gather_blocks`, no id twice. CUDA only."""
    _check_staging(kv, block_ids, staging)
    if block_ids.shape[0]:
        _swap_kernels(kv).scatter_blocks(staging, block_ids, kv)


def _swap_kernels(kv: torch.Tensor) -> Any:
    if kv.device.type != "cuda":
        raise ValueError(f"blocks on {kv.device.type} are swapped without staging")
    return import_module("octavo.kernels.swap_blocks")


def _check_staging(kv: torch.Tensor, block_ids: torch.Tensor, staging: torch.Tensor) -> None:
    expected = (*kv.shape[:2], *kv.shape[3:])
    if kv.dim() < 4 or kv.shape[1] != 2 or staging.shape[1:] != expected or staging.dtype != kv.dtype:
        raise ValueError(
            f"staging must be {kv.dtype} [N, {', '.join(map(str, expected))}], got {staging.dtype} "
            f"{tuple(staging.shape)}"
        )
    if not (kv.is_contiguous() and staging.is_contiguous()):
        raise ValueError("kv and staging must be contiguous")
    if block_ids.dtype != torch.int64 or block_ids.dim() != 1 or block_ids.shape[0] > staging.shape[0]:
        raise ValueError(
            f"block_ids must be int64 and at most {staging.shape[0]}, got {block_ids.dtype} {tuple(block_ids.shape)}"
        )
