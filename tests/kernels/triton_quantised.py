"""The quantised KV cache against its oracle, bit by bit where it is written. Run by `test_triton_properties.py`."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.kernels import reference, reference_quantised
from octavo.kernels.cascade_attention import cascade_attention
from octavo.kernels.paged_attention import paged_attention
from octavo.kernels.quantised_kv import write_kv_quantised

from .batches import Shape, ragged_batch
from .triton_device import DEVICE, INTERPRETED

FORMATS = [torch.float8_e4m3fn, torch.int8]


class Cache:
    """K and V of one layer with their scales, full of another owner's leavings."""

    def __init__(
        self, num_blocks: int, kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        sizes = (2, num_blocks, kv_heads, block_size, head_dim)
        self.kv = torch.randint(0, 256, sizes, dtype=torch.uint8, generator=generator).view(dtype)
        self.scales = torch.full(sizes[:3], 2.0**100)

    def to(self, device: str) -> Cache:
        copy = object.__new__(Cache)
        copy.kv = self.kv.view(torch.uint8).to(device, copy=True).view(self.kv.dtype)
        copy.scales = self.scales.to(device, copy=True)
        return copy

    def write(self, function: object, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        function(k, v, self.kv[0], self.kv[1], self.scales[0], self.scales[1], slots)  # type: ignore[operator]

    def dequantised(self, kind: int) -> torch.Tensor:
        return reference_quantised.dequantised(self.kv[kind], self.scales[kind])


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
    expected = Cache(2 * (60 // block_size + 1), kv_heads, block_size, head_dim, format)
    actual = expected.to(DEVICE)
    order = torch.randperm(expected.kv.shape[1], generator=generator)
    tables = order.view(2, -1)
    written = [0, 0]
    for step, count in enumerate(steps):
        slots = []
        for sequence, tokens in enumerate((count, 1)):
            positions = torch.arange(written[sequence], written[sequence] + tokens)
            slots += [tables[sequence, positions // block_size] * block_size + positions % block_size]
            written[sequence] += tokens
        slot_mapping = torch.cat([slots[0], torch.tensor([-1]), slots[1], torch.tensor([-1])])
        rows = torch.randn(len(slot_mapping), 3 * kv_heads, head_dim, generator=generator) * growth**step
        k, v = rows.to(dtype)[:, kv_heads : 2 * kv_heads], rows.to(dtype)[:, 2 * kv_heads :]
        expected.write(reference_quantised.write_kv_quantised, k, v, slot_mapping)
        actual.write(write_kv_quantised, k.to(DEVICE), v.to(DEVICE), slot_mapping.to(DEVICE))
    assert torch.equal(actual.scales.cpu(), expected.scales)
    assert torch.equal(actual.kv.view(torch.uint8).cpu(), expected.kv.view(torch.uint8))


@pytest.mark.parametrize("format", FORMATS)
def test_every_byte_comes_back(format: torch.dtype) -> None:
    """All numbers of a format, their neighbours, ties and limits, at a scale of 1."""
    numbers = torch.arange(256, dtype=torch.uint8).view(format).float()
    numbers = numbers[numbers.isfinite()].unique()
    middles = (numbers[1:] + numbers[:-1]) / 2
    values = torch.cat(
        [numbers, middles, middles.nextafter(torch.tensor(1e9)), middles.nextafter(-torch.tensor(1e9))]
    )
    values = torch.nn.functional.pad(values[values.abs() <= numbers.max()], (0, 1024))[:1024].view(16, 1, 64)
    values[0, 0, 0] = numbers.max()
    expected = Cache(1, 1, 16, 64, format)
    actual = expected.to(DEVICE)
    slots = torch.arange(16)
    expected.write(reference_quantised.write_kv_quantised, values, values, slots)
    actual.write(write_kv_quantised, values.to(DEVICE), values.to(DEVICE), slots.to(DEVICE))
    assert expected.scales.unique().tolist() == [1.0]
    assert torch.equal(actual.kv.view(torch.uint8).cpu(), expected.kv.view(torch.uint8))


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
    options=st.sampled_from([{}, {"softcap": 3.0}]),
    seed=st.integers(0, 2**32 - 1),
)
def test_attention_reads_what_was_written(
    format: torch.dtype, dtype: torch.dtype, block_size: int, mode: str, options: dict[str, float], seed: int
) -> None:
    shape = Shape(heads=6, kv_heads=2, head_dim=20, block_size=block_size, dtype=dtype)
    batch = ragged_batch([(1, 300), (4, 290), (0, 280)], shape, seed=seed)
    if mode == "cascade":
        batch.block_tables[:, : 240 // block_size] = batch.block_tables[0, : 240 // block_size].clone()
    cache = Cache(*batch.k_cache.shape, format)
    cache.kv.view(torch.uint8).bitwise_and_(0xBF)  # no NaN among the bytes
    cache.scales.fill_(torch.nan)
    for table, length in zip(batch.block_tables, batch.context_lens.tolist(), strict=True):
        blocks = table[: -(-length // block_size)].long()
        exponents = torch.randint(-6, -3, (2, len(blocks), 2), generator=torch.Generator().manual_seed(seed))
        cache.scales[:, blocks] = 2.0**exponents
    moved = cache.to(DEVICE)
    arguments = batch.arguments()
    q = arguments.pop("q")
    arguments["k_cache"], arguments["v_cache"] = (cache.dequantised(kind) for kind in range(2))
    expected = reference.paged_attention(q.float(), **arguments, **options)
    arguments["k_cache"], arguments["v_cache"] = moved.kv
    moved_arguments = {
        name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value
        for name, value in arguments.items()
    }
    out = torch.zeros(q.shape, dtype=dtype, device=DEVICE)
    common = {
        "softcap": options.get("softcap"),
        "out": out,
        "k_scales": moved.scales[0],
        "v_scales": moved.scales[1],
        "upcast": INTERPRETED,
    }
    if mode == "cascade":
        cascade_attention(q.to(DEVICE), **moved_arguments, **common, num_shared_blocks=240 // block_size)
    else:
        splits = 2 if mode == "splits" else 0
        paged_attention(q.to(DEVICE), **moved_arguments, **common, sliding_window=None, splits=splits)
    limit = {torch.float32: 1e-5, torch.bfloat16: 2**-6, torch.float16: 2**-8}[dtype]
    torch.testing.assert_close(out.cpu().float(), expected, rtol=limit, atol=limit)
