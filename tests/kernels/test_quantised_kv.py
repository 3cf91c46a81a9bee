"""The quantised KV cache on the CPU: written byte for byte like the oracle, read like its numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.kernels import dispatch, reference, reference_quantised
from octavo.kernels.layer_cache import Scales

from .batches import Shape, ragged_batch
from .quantised_cache import FORMATS, Cache, assert_same, every_number, filling_slots
from .test_cpu_attention import TOLERANCE


def write(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    scales: Scales,
    slots: torch.Tensor,
) -> None:
    dispatch.write_kv(k, v, k_cache, v_cache, slots, scales=scales)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    kv_heads=st.integers(1, 3),
    head_dim=st.sampled_from([8, 20, 64]),
    block_size=st.sampled_from([8, 16, 24, 64, 5]),
    format=st.sampled_from(FORMATS),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    steps=st.lists(st.integers(1, 20), min_size=1, max_size=4),
    growth=st.sampled_from([1.0, 0.3, 5.0, 900.0, 1e-9]),
    seed=st.integers(0, 2**32 - 1),
)
def test_steps_that_fill_blocks(
    kv_heads: int,
    head_dim: int,
    block_size: int,
    format: torch.dtype,
    dtype: torch.dtype,
    steps: list[int],
    growth: float,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    num_blocks = 2 * (80 // block_size + 1)
    expected = Cache(num_blocks, kv_heads, block_size, head_dim, format)
    actual = expected.to("cpu")
    for step, slots in enumerate(filling_slots(steps, num_blocks, block_size, seed)):
        rows = torch.randn(len(slots), 3 * kv_heads, head_dim, generator=generator) * growth**step
        k, v = rows.to(dtype)[:, kv_heads : 2 * kv_heads], rows.to(dtype)[:, 2 * kv_heads :]
        expected.write(reference_quantised.write_kv_quantised, k, v, slots)
        actual.write(write, k, v, slots)
    assert_same(actual, expected)


@pytest.mark.parametrize("format", FORMATS)
def test_every_byte_comes_back(format: torch.dtype) -> None:
    values = every_number(format)
    expected = Cache(1, 1, 16, 64, format)
    actual = expected.to("cpu")
    expected.write(reference_quantised.write_kv_quantised, values, values, torch.arange(16))
    actual.write(write, values, values, torch.arange(16))
    assert_same(actual, expected)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_number_that_is_not_finite_spoils_its_block_until_it_starts_anew(
    format: torch.dtype, bad: float
) -> None:
    cache = Cache(2, 1, 8, 16, format)
    rows = torch.ones(10, 1, 16)
    rows[3, 0, 5] = bad
    cache.write(write, rows[:5], rows[:5], torch.arange(5))
    cache.write(write, rows[5:], rows[5:], torch.arange(5, 10))
    assert cache.dequantised(0)[0].isnan().all()
    assert (cache.dequantised(0)[1, :, :2] == 1).all()
    cache.write(write, rows[:1], rows[:1], torch.tensor([0]))
    assert (cache.dequantised(0)[0, :, 0] == 1).all()


def test_keys_are_turned_before_they_are_stored() -> None:
    generator = torch.Generator().manual_seed(5)
    rows = torch.randn(7, 4, 20, generator=generator)
    angles = torch.rand(7, 8, generator=generator) * 100
    slots = torch.tensor([3, 4, -1, 16, 17, 18, 19])
    expected, actual = Cache(4, 1, 8, 20, torch.int8), Cache(4, 1, 8, 20, torch.int8)
    q, k, v = rows.clone().split((2, 1, 1), dim=1)
    turned = torch.empty(2, 7, 1, 1, 20)
    reference.write_kv_rope(q, k, v, angles.cos(), angles.sin(), turned[0], turned[1], torch.arange(7))
    expected.write(reference_quantised.write_kv_quantised, turned[0, :, :, 0], turned[1, :, :, 0], slots)
    own_q, k, v = rows.split((2, 1, 1), dim=1)
    dispatch.write_kv_rope(
        own_q, k, v, angles.cos(), angles.sin(), actual.k, actual.v, slots, scales=actual.scales
    )
    torch.testing.assert_close(own_q, q, rtol=1e-5, atol=1e-5)
    assert_same(actual, expected)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    format=st.sampled_from(FORMATS),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    shape=st.builds(
        lambda kv_heads, group, head_dim, block_size: Shape(
            heads=kv_heads * group, kv_heads=kv_heads, head_dim=head_dim, block_size=block_size
        ),
        kv_heads=st.integers(1, 3),
        group=st.sampled_from([1, 3, 4]),
        head_dim=st.sampled_from([8, 20, 64]),
        block_size=st.sampled_from([8, 16, 24, 64, 5]),
    ),
    sequences=st.lists(
        st.tuples(st.sampled_from([0, 1, 1, 4, 30]), st.integers(1, 700)), min_size=1, max_size=3
    ),
    options=st.sampled_from([{}, {"softcap": 3.0}, {"sliding_window": 130}]),
    seed=st.integers(0, 2**32 - 1),
)
def test_attention_reads_what_was_written(
    format: torch.dtype,
    dtype: torch.dtype,
    shape: Shape,
    sequences: list[tuple[int, int]],
    options: dict[str, Any],
    seed: int,
) -> None:
    batch = ragged_batch([(rows, rows + before) for rows, before in sequences], shape, seed=seed)
    cache = Cache(*batch.k_cache.shape, format)
    cache.raw.bitwise_and_(0xBF)  # no NaN among the bytes
    for scales in cache.scales:
        scales.fill_(torch.nan)  # of blocks that nobody owns
    generator = torch.Generator().manual_seed(seed)
    for table, length in zip(batch.block_tables, batch.context_lens.tolist(), strict=True):
        blocks = table[: -(-length // shape.block_size)].long()
        for scales in cache.scales:
            exponents = torch.randint(-6, -3, (len(blocks), shape.kv_heads), generator=generator)
            scales[blocks] = 2.0**exponents
    arguments = batch.arguments() | {"q": batch.q.to(dtype)}
    numbers = {"k_cache": cache.dequantised(0), "v_cache": cache.dequantised(1)}
    stored = {"k_cache": cache.k, "v_cache": cache.v, "scales": cache.scales}
    expected = reference.paged_attention(**arguments | numbers, **options)
    actual = dispatch.paged_attention(**arguments | stored, **options)
    # Some scores are large: their weights lose what float32 loses of the exponent.
    torch.testing.assert_close(actual, expected, rtol=TOLERANCE[dtype]["rtol"], atol=1e-4)


def test_the_door_refuses_what_is_no_quantised_cache() -> None:
    cache, rows = Cache(2, 1, 8, 4, torch.int8), torch.ones(1, 1, 4)
    with pytest.raises(ValueError, match="without scales"):
        dispatch.write_kv(rows, rows, cache.k, cache.v, torch.tensor([0]))
    plain, wrong = torch.zeros(2, 1, 8, 4), (cache.scales[0].T, cache.scales[1])
    with pytest.raises(ValueError, match="with scales"):
        dispatch.write_kv(rows, rows, plain, plain, torch.tensor([0]), scales=cache.scales)
    with pytest.raises(ValueError, match="scales must be"):
        dispatch.write_kv(rows, rows, cache.k, cache.v, torch.tensor([0]), scales=wrong)
    with pytest.raises(ValueError, match="slot"):
        dispatch.write_kv(rows, rows, cache.k, cache.v, torch.tensor([16]), scales=cache.scales)
