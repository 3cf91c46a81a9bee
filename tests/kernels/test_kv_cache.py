"""Writing KV and copying blocks on the CPU against the oracles."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.kernels import dispatch, reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    num_tokens=st.integers(0, 40),
    num_heads=st.integers(1, 4),
    head_dim=st.sampled_from([4, 20, 64]),
    block_size=st.sampled_from([8, 16, 24]),
    dtypes=st.tuples(st.sampled_from(DTYPES), st.sampled_from(DTYPES)),
    fused=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_write_kv_matches_the_oracle(
    num_tokens: int,
    num_heads: int,
    head_dim: int,
    block_size: int,
    dtypes: tuple[torch.dtype, torch.dtype],
    fused: bool,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    num_blocks = 5
    cache = torch.randn(2, num_blocks, num_heads, block_size, head_dim, generator=generator).to(dtypes[1])
    rows = torch.randn(num_tokens, 3 * num_heads, head_dim, generator=generator).to(dtypes[0])
    k, v = rows[:, num_heads : 2 * num_heads], rows[:, 2 * num_heads :]
    if not fused:
        k, v = k.contiguous(), v.contiguous()
    slots = torch.randperm(num_blocks * block_size, generator=generator)[:num_tokens]
    slots[torch.rand(num_tokens, generator=generator) < 0.2] = -1
    expected = cache.clone()
    reference.write_kv(k, v, expected[0], expected[1], slots)
    dispatch.write_kv(k, v, cache[0], cache[1], slots)
    assert torch.equal(cache, expected)


def test_a_slot_outside_the_cache_is_refused_and_nothing_written() -> None:
    cache = torch.zeros(2, 2, 1, 8, 4)
    rows = torch.ones(2, 1, 4)
    with pytest.raises(ValueError, match="slot"):
        dispatch.write_kv(rows, rows, cache[0], cache[1], torch.tensor([3, 16]))
    assert not cache.any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_copy_blocks_matches_the_oracle(dtype: torch.dtype, index_dtype: torch.dtype) -> None:
    kv = torch.randn(3, 2, 8, 2, 16, 20, generator=torch.Generator().manual_seed(1)).to(dtype)
    kv[:, :, 6] = float("nan")
    copies = torch.tensor([[0, 1], [0, 5], [6, 7]], dtype=index_dtype)
    expected = kv.clone()
    reference.copy_blocks(expected, copies)
    dispatch.copy_blocks(kv, copies)
    assert torch.equal(kv.nan_to_num(9.0), expected.nan_to_num(9.0))


def test_no_copies_is_no_work() -> None:
    kv = torch.ones(1, 2, 2, 1, 8, 4)
    dispatch.copy_blocks(kv, torch.empty(0, 2, dtype=torch.int64))
    assert (kv == 1).all()


def test_a_block_outside_the_cache_is_refused_and_nothing_copied() -> None:
    kv = torch.arange(2 * 2 * 8 * 4, dtype=torch.float32).view(1, 2, 2, 1, 8, 4)
    before = kv.clone()
    with pytest.raises(ValueError, match="block"):
        dispatch.copy_blocks(kv, torch.tensor([[0, 1], [0, 2]]))
    assert torch.equal(kv, before)
