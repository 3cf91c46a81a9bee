"""The elementwise and copying kernels against their oracles. Run by `test_triton_properties.py`."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.kernels import reference
from octavo.kernels.copy_blocks import copy_blocks
from octavo.kernels.rms_norm import rms_norm
from octavo.kernels.silu_mul import silu_mul
from octavo.kernels.swap_blocks import gather_blocks, scatter_blocks
from octavo.kernels.write_kv import write_kv
from octavo.kernels.write_kv_rope import write_kv_rope

from .triton_device import DEVICE, assert_within_ulps

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
few = settings(max_examples=30, deadline=None, derandomize=True)
seeds = st.integers(0, 2**32 - 1)


@few
@given(
    num_rows=st.integers(1, 5),
    width=st.sampled_from([1, 17, 64, 576, 1500]),
    dtype=DTYPES,
    added=st.booleans(),
    wider=st.booleans(),
    seed=seeds,
)
def test_rms_norm(num_rows: int, width: int, dtype: torch.dtype, added: bool, wider: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    padded = torch.full((num_rows, width + 3 * wider), torch.nan, dtype=dtype)
    x = padded[:, :width]
    x.copy_(torch.randn(num_rows, width, generator=generator) * 10)
    weight = torch.randn(width, generator=generator).to(dtype)
    residual = torch.randn(num_rows, width, generator=generator).to(dtype) if added else None
    kept = None if residual is None else residual.to(DEVICE, copy=True)
    actual = torch.empty(num_rows, width, dtype=dtype, device=DEVICE)
    rms_norm(padded.to(DEVICE)[:, :width], weight.to(DEVICE), 1e-5, kept, actual)
    if residual is not None:
        assert kept is not None
        reference_residual = residual.clone()
        reference.rms_norm(x, weight, 1e-5, reference_residual)
        assert_within_ulps(kept, reference_residual, 1.01)
        # The norm is of what was stored; rounding differences there are not its own.
        x = kept.cpu()
    assert_within_ulps(actual, reference.rms_norm(x, weight, 1e-5), 8 if dtype == torch.float32 else 1.01)


@few
@given(
    num_rows=st.integers(1, 4),
    width=st.sampled_from([1, 40, 1024, 1536]),
    dtype=DTYPES,
    seed=seeds,
)
def test_silu_mul(num_rows: int, width: int, dtype: torch.dtype, seed: int) -> None:
    gate_up = torch.randn(num_rows, 2 * width, generator=torch.Generator().manual_seed(seed)).to(dtype) * 4
    gate_up[0, 0] = -200.0  # exp(200) is infinite in float32
    actual = torch.empty(num_rows, width, dtype=dtype, device=DEVICE)
    silu_mul(gate_up.to(DEVICE), actual)
    assert_within_ulps(actual, reference.silu_mul(gate_up), 8 if dtype == torch.float32 else 1.01)


@few
@given(
    num_tokens=st.integers(1, 6),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 3, 4]),
    head_dim=st.sampled_from([8, 20, 64, 72]),
    unturned=st.sampled_from([0, 2, 4]),
    block_size=st.sampled_from([8, 16, 24, 64]),
    dtype=DTYPES,
    seed=seeds,
)
def test_write_kv_rope(
    num_tokens: int,
    kv_heads: int,
    group: int,
    head_dim: int,
    unturned: int,
    block_size: int,
    dtype: torch.dtype,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    heads = kv_heads * group
    rows = torch.randn(num_tokens, heads + 2 * kv_heads, head_dim, generator=generator).to(dtype)
    angles = torch.rand(num_tokens, (head_dim - unturned) // 2, generator=generator) * 100
    cos, sin = angles.cos(), angles.sin()
    cache = torch.full((2, 3, kv_heads, block_size, head_dim), torch.nan, dtype=dtype)
    slots = torch.randperm(3 * block_size, generator=generator)[:num_tokens]
    slots[torch.rand(num_tokens, generator=generator) < 0.3] = -1

    def parts(fused: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return fused[:, :heads], fused[:, heads : heads + kv_heads], fused[:, heads + kv_heads :]

    moved, moved_cache = rows.to(DEVICE, copy=True), cache.to(DEVICE, copy=True)
    write_kv_rope(
        *parts(moved), cos.to(DEVICE), sin.to(DEVICE), moved_cache[0], moved_cache[1], slots.to(DEVICE)
    )
    reference.write_kv_rope(*parts(rows), cos, sin, cache[0], cache[1], slots)
    # Terms up to 4 may cancel: float32's error is of theirs, not of the difference.
    assert_within_ulps(moved, rows, 1.01, floor=4e-6)
    assert_within_ulps(moved_cache, cache, 1.01, floor=4e-6)


@few
@given(
    num_tokens=st.integers(1, 20),
    kv_heads=st.integers(1, 3),
    head_dim=st.sampled_from([8, 20, 64, 72]),
    block_size=st.sampled_from([8, 16, 24, 64]),
    dtypes=st.tuples(DTYPES, DTYPES),
    seed=seeds,
)
def test_write_kv(
    num_tokens: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    dtypes: tuple[torch.dtype, torch.dtype],
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(num_tokens, 3 * kv_heads, head_dim, generator=generator).to(dtypes[0])
    k, v = rows[:, kv_heads : 2 * kv_heads], rows[:, 2 * kv_heads :]
    cache = torch.full((2, 4, kv_heads, block_size, head_dim), torch.nan, dtype=dtypes[1])
    slots = torch.randperm(4 * block_size, generator=generator)[:num_tokens]
    slots[torch.rand(num_tokens, generator=generator) < 0.3] = -1
    moved = cache.to(DEVICE, copy=True)
    write_kv(k.to(DEVICE), v.to(DEVICE), moved[0], moved[1], slots.to(DEVICE))
    reference.write_kv(k, v, cache[0], cache[1], slots)
    assert_within_ulps(moved, cache, 0 if dtypes[1] != torch.bfloat16 else 1.01, floor=0.0)


@few
@given(
    num_layers=st.integers(1, 3),
    sizes=st.sampled_from([(1, 8, 5), (2, 24, 72), (3, 16, 20), (1, 64, 64), (5008,)]),
    num_copies=st.integers(1, 4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.uint8]),
    wide=st.booleans(),
    seed=seeds,
)
def test_copied_blocks(
    num_layers: int, sizes: tuple[int, ...], num_copies: int, dtype: torch.dtype, wide: bool, seed: int
) -> None:
    """Blocks of heads, or of bytes with scales among them; one source may have several copies."""
    generator = torch.Generator().manual_seed(seed)
    kv = (torch.randn(num_layers, 2, 9, *sizes, generator=generator) * 50).abs().to(dtype)
    if dtype.is_floating_point:
        kv[:, :, 0] = torch.nan
    order = torch.randperm(9, generator=generator)
    sources = order[torch.randint(0, 9 - num_copies, (num_copies,), generator=generator)]
    copies = torch.stack([sources, order[9 - num_copies :]], dim=1).to(torch.int64 if wide else torch.int32)
    moved = kv.to(DEVICE, copy=True)
    copy_blocks(moved, copies.to(DEVICE))
    reference.copy_blocks(kv, copies)
    assert torch.equal(moved.cpu().view(torch.uint8), kv.view(torch.uint8))


@few
@given(
    num_layers=st.integers(1, 3),
    sizes=st.sampled_from([(1, 8, 5), (2, 24, 72), (3, 16, 20)]),
    num_moved=st.integers(1, 4),
    dtype=DTYPES,
    seed=seeds,
)
def test_swapped_blocks(
    num_layers: int, sizes: tuple[int, int, int], num_moved: int, dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    kv = torch.randn(num_layers, 2, 6, *sizes, generator=generator).to(dtype)
    kv[:, :, 0] = torch.nan
    staging = torch.full((num_moved + 1, num_layers, 2, *sizes), 7.0, dtype=dtype)
    out, back = (
        torch.randperm(6, generator=generator)[:num_moved],
        torch.randperm(6, generator=generator)[:num_moved],
    )
    moved_kv, moved_staging = kv.to(DEVICE, copy=True), staging.to(DEVICE, copy=True)
    gather_blocks(moved_kv, out.to(DEVICE), moved_staging)
    scatter_blocks(moved_staging, back.to(DEVICE), moved_kv)
    reference.gather_blocks(kv, out, staging)
    reference.scatter_blocks(staging, back, kv)
    assert torch.equal(moved_staging.cpu().nan_to_num(9.0), staging.nan_to_num(9.0))
    assert torch.equal(moved_kv.cpu().nan_to_num(9.0), kv.nan_to_num(9.0))
