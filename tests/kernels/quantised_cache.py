"""A quantised cache of one layer as the worker lays it out, and steps that fill its blocks. Plain torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from octavo.kernels import reference_quantised
from octavo.kernels.layer_cache import quantised_block_bytes, quantised_layers

FORMATS = [torch.float8_e4m3fn, torch.int8]


class Cache:
    """K and V of one layer with their scales, full of another owner's leavings."""

    def __init__(
        self, num_blocks: int, kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype
    ) -> None:
        self._dtype = dtype
        self._shape = {"num_kv_heads": kv_heads, "block_size": block_size, "head_dim": head_dim}
        generator = torch.Generator().manual_seed(0)
        sizes = (1, 2, num_blocks, quantised_block_bytes(**self._shape))
        self._lay(torch.randint(0, 256, sizes, dtype=torch.uint8, generator=generator))
        for scales in self.scales:
            scales.fill_(2.0**100)

    def _lay(self, raw: torch.Tensor) -> None:
        self.raw = raw
        (layer,) = quantised_layers(raw, self._dtype, **self._shape)
        assert layer.scales is not None
        self.k, self.v, self.scales = layer.k, layer.v, layer.scales

    def to(self, device: str) -> Cache:
        copy = object.__new__(Cache)
        copy._dtype, copy._shape = self._dtype, self._shape
        copy._lay(self.raw.to(device, copy=True))
        return copy

    def write(
        self, function: Callable[..., None], k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor
    ) -> None:
        function(k, v, self.k, self.v, self.scales, slots)

    def dequantised(self, kind: int) -> torch.Tensor:
        return reference_quantised.dequantised((self.k, self.v)[kind], self.scales[kind])


def assert_same(actual: Cache, expected: Cache) -> None:
    """Byte for byte, padding too, since nobody may write there. What a scale of NaN spoils may be anything."""
    for cache in (actual, expected):
        for bytes_, scales in zip((cache.k, cache.v), cache.scales, strict=True):
            bytes_.view(torch.uint8)[scales.isnan()] = 0
            scales.nan_to_num_(nan=-1.0)
    assert torch.equal(actual.raw.cpu(), expected.raw)


def filling_slots(counts: list[int], num_blocks: int, block_size: int, seed: int) -> Iterator[torch.Tensor]:
    """Slots of steps in which one sequence gets `counts` tokens in turn and another one each, padding among them."""
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed))
    tables = order[: num_blocks // 2 * 2].view(2, -1)
    written = [0, 0]
    for count in counts:
        slots = []
        for sequence, tokens in enumerate((count, 1)):
            positions = torch.arange(written[sequence], written[sequence] + tokens)
            slots += [tables[sequence, positions // block_size] * block_size + positions % block_size]
            written[sequence] += tokens
        yield torch.cat([slots[0], torch.tensor([-1]), slots[1], torch.tensor([-1])])


def every_number(format: torch.dtype) -> torch.Tensor:
    """float32 [16, 1, 64]: all numbers of a format, their neighbours, ties and limits, at a scale of 1."""
    numbers = torch.arange(256, dtype=torch.uint8).view(format).float()
    numbers = numbers[numbers.isfinite()].unique()
    middles = (numbers[1:] + numbers[:-1]) / 2
    values = torch.cat(
        [numbers, middles, middles.nextafter(torch.tensor(1e9)), middles.nextafter(-torch.tensor(1e9))]
    )
    values = torch.nn.functional.pad(values[values.abs() <= numbers.max()], (0, 1024))[:1024].view(16, 1, 64)
    values[0, 0, 0] = numbers.max()
    return values
