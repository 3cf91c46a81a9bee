"""The quantised KV cache against its oracle, bit by bit where it is written. Run by `test_triton_properties.py`."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.kernels import reference, reference_quantised
from octavo.kernels.cascade_attention import cascade_attention
from octavo.kernels.paged_attention import paged_attention
from octavo.kernels.quantised_kv import write_kv_quantised, write_kv_rope_quantised

from .batches import Shape, ragged_batch
from .quantised_cache import FORMATS, Cache, assert_same, every_number, filling_slots
from .triton_device import DEVICE, INTERPRETED, assert_within_ulps


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    kv_heads=st.integers(1, 2),
    head_dim=st.sampled_from([8, 20, 64]),
    block_size=st.sampled_from([8, 16, 24]),
    format=st.sampled_from(FORMATS),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    steps=st.lists(st.integers(1, 20), min_size=1, max_size=3),
    growth=st.sampled_from([1.0, 0.3, 5.0, 900.0]),
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
    num_blocks = 2 * (60 // block_size + 1)
    expected = Cache(num_blocks, kv_heads, block_size, head_dim, format)
    actual = expected.to(DEVICE)
    for step, slots in enumerate(filling_slots(steps, num_blocks, block_size, seed)):
        rows = torch.randn(len(slots), 3 * kv_heads, head_dim, generator=generator) * growth**step
        k, v = rows.to(dtype)[:, kv_heads : 2 * kv_heads], rows.to(dtype)[:, 2 * kv_heads :]
        expected.write(reference_quantised.write_kv_quantised, k, v, slots)
        actual.write(write_kv_quantised, k.to(DEVICE), v.to(DEVICE), slots.to(DEVICE))
    assert_same(actual, expected)


@settings(max_examples=10, deadline=None, derandomize=True)
@given(
    kv_heads=st.integers(1, 2),
    group=st.sampled_from([1, 3, 4]),
    head_dim=st.sampled_from([8, 20, 64]),
    unturned=st.sampled_from([0, 2, 4]),
    block_size=st.sampled_from([8, 16, 64]),
    format=st.sampled_from(FORMATS),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    steps=st.lists(st.integers(1, 20), min_size=1, max_size=2),
    seed=st.integers(0, 2**32 - 1),
)
def test_keys_are_turned_on_the_way(
    kv_heads: int,
    group: int,
    head_dim: int,
    unturned: int,
    block_size: int,
    format: torch.dtype,
    dtype: torch.dtype,
    steps: list[int],
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    num_blocks = 2 * (40 // block_size + 1)
    expected = Cache(num_blocks, kv_heads, block_size, head_dim, format)
    actual = expected.to(DEVICE)
    heads = kv_heads * group
    for slots in filling_slots(steps, num_blocks, block_size, seed):
        rows = torch.randn(len(slots), heads + 2 * kv_heads, head_dim, generator=generator).to(dtype)
        angles = torch.rand(len(slots), (head_dim - unturned) // 2, generator=generator) * 100
        # As rotary modules give them: every angle twice, side by side.
        cos, sin = (
            torch.cat([half, half], dim=1)[:, : half.shape[1]] for half in (angles.cos(), angles.sin())
        )
        moved = rows.to(DEVICE, copy=True)
        q, k, v = moved.split((heads, kv_heads, kv_heads), dim=1)
        write_kv_rope_quantised(
            q, k, v, cos.to(DEVICE), sin.to(DEVICE), actual.k, actual.v, actual.scales, slots.to(DEVICE)
        )
        # The oracle turns keys into a cache of one token a block first.
        turned = torch.empty(2, len(slots), kv_heads, 1, head_dim)
        q, k, v = rows.split((heads, kv_heads, kv_heads), dim=1)
        reference.write_kv_rope(q, k, v, cos, sin, turned[0], turned[1], torch.arange(len(slots)))
        expected.write(reference_quantised.write_kv_quantised, turned[0, :, :, 0], turned[1, :, :, 0], slots)
        assert_within_ulps(moved[:, :heads], q, 1.01, floor=4e-6)
    for kind in range(2):
        scales = expected.scales[kind]
        written = scales != 2.0**100
        # A key that lies between two numbers may go either way, by the last bit of a sine.
        quantum = scales[written].max() * (32.0 if format == torch.float8_e4m3fn else 1.0)
        places = written.nonzero(as_tuple=True)
        # Bytes that nobody wrote may be NaN.
        one, other = (each.dequantised(kind).cpu()[places].nan_to_num() for each in (actual, expected))
        assert (one != other).float().mean() < 0.01
        assert (one - other).abs().max() <= quantum


@pytest.mark.parametrize("format", FORMATS)
def test_every_byte_comes_back(format: torch.dtype) -> None:
    values = every_number(format)
    expected = Cache(1, 1, 16, 64, format)
    actual = expected.to(DEVICE)
    slots = torch.arange(16)
    expected.write(reference_quantised.write_kv_quantised, values, values, slots)
    actual.write(write_kv_quantised, values.to(DEVICE), values.to(DEVICE), slots.to(DEVICE))
    assert expected.scales[0].unique().tolist() == [1.0]
    assert_same(actual, expected)


@pytest.mark.parametrize(("format", "bad"), itertools.product(FORMATS, [torch.nan, torch.inf]))
def test_a_number_that_is_not_finite_spoils_its_block_until_it_starts_anew(
    format: torch.dtype, bad: float
) -> None:
    cache = Cache(2, 1, 8, 16, format).to(DEVICE)
    rows = torch.ones(10, 1, 16, device=DEVICE)
    rows[3, 0, 5] = bad
    cache.write(write_kv_quantised, rows, rows, torch.arange(10, device=DEVICE))
    assert cache.dequantised(0)[0].isnan().all()
    assert (cache.dequantised(0)[1, :, :2] == 1).all()
    cache.write(write_kv_quantised, rows[:1], rows[:1], torch.tensor([0], device=DEVICE))
    assert (cache.dequantised(0)[0, :, 0] == 1).all()


@settings(max_examples=10, deadline=None, derandomize=True)
@given(
    format=st.sampled_from(FORMATS),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    block_size=st.sampled_from([8, 16, 24]),
    mode=st.sampled_from(["whole", "splits", "cascade"]),
    options=st.sampled_from([{}, {"softcap": 3.0}, {"sliding_window": 130}]),
    seed=st.integers(0, 2**32 - 1),
)
def test_attention_reads_what_was_written(
    format: torch.dtype, dtype: torch.dtype, block_size: int, mode: str, options: dict[str, Any], seed: int
) -> None:
    shape = Shape(heads=6, kv_heads=2, head_dim=20, block_size=block_size, dtype=dtype)
    if mode == "cascade":
        options = {name: value for name, value in options.items() if name != "sliding_window"}
    batch = ragged_batch([(1, 300), (4, 290), (0, 280)], shape, seed=seed)
    if mode == "cascade":
        batch.block_tables[:, : 240 // block_size] = batch.block_tables[0, : 240 // block_size].clone()
    cache = Cache(*batch.k_cache.shape, format)
    cache.raw.bitwise_and_(0xBF)  # no NaN among the bytes
    for scales in cache.scales:
        scales.fill_(torch.nan)
    for table, length in zip(batch.block_tables, batch.context_lens.tolist(), strict=True):
        blocks = table[: -(-length // block_size)].long()
        exponents = torch.randint(-6, -3, (2, len(blocks), 2), generator=torch.Generator().manual_seed(seed))
        for kind in range(2):
            cache.scales[kind][blocks] = 2.0 ** exponents[kind]
    moved = cache.to(DEVICE)
    arguments = batch.arguments()
    q = arguments.pop("q")
    arguments["k_cache"], arguments["v_cache"] = (cache.dequantised(kind) for kind in range(2))
    expected = reference.paged_attention(q.float(), **arguments, **options)
    arguments["k_cache"], arguments["v_cache"] = moved.k, moved.v
    moved_arguments = {
        name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value
        for name, value in arguments.items()
    }
    out = torch.zeros(q.shape, dtype=dtype, device=DEVICE)
    common = {
        "softcap": options.get("softcap"),
        "out": out,
        "scales": moved.scales,
        "upcast": INTERPRETED,
    }
    if mode == "cascade":
        cascade_attention(q.to(DEVICE), **moved_arguments, **common, num_shared_blocks=240 // block_size)
    else:
        splits = 2 if mode == "splits" else 0
        paged_attention(
            q.to(DEVICE),
            **moved_arguments,
            **common,
            sliding_window=options.get("sliding_window"),
            splits=splits,
        )
    limit = {torch.float32: 1e-5, torch.bfloat16: 2**-6, torch.float16: 2**-8}[dtype]
    torch.testing.assert_close(out.cpu().float(), expected, rtol=limit, atol=limit)
