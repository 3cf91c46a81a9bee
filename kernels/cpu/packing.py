"""Weights of products in the layouts that `gemm` and `int8` read. Owns the layouts and the rounding to int8."""

from __future__ import annotations

from itertools import pairwise

import torch

from octavo.kernels.cpu.gemm import GROUP_MAX, count_parts, part_begin
from octavo.kernels.cpu.int8 import PEAK, PEAK_MIN
from octavo.kernels.cpu.simd import HAS_VNNI
from octavo.kernels.cpu.tile import LINE, PANEL
from octavo.kernels.packed_weight import PackedWeight


def has_int8_products() -> bool:
    """Whether this CPU has what `pack_int8_weight` is for."""
    return HAS_VNNI


def pack_weight(weight: torch.Tensor, bias: torch.Tensor | None, gated: bool = False) -> PackedWeight:
    """As `dispatch.pack_weight`, in float32."""
    num_outputs, in_features = weight.shape
    places, num_panels = _places(num_outputs, gated)
    rows = torch.zeros(num_panels * PANEL, in_features)
    rows[places] = weight
    panels = _on_a_line(torch.float32, num_panels, in_features, PANEL)
    panels.copy_(rows.view(num_panels, PANEL, in_features).transpose(1, 2))
    return PackedWeight(
        panels, _placed(bias, places, num_panels), in_features, num_outputs // (1 + gated), gated
    )


def pack_int8_weight(weight: torch.Tensor, bias: torch.Tensor | None, gated: bool = False) -> PackedWeight:
    """As `dispatch.pack_weight`, in int8, each output's weights with a scale of their own."""
    num_outputs, in_features = weight.shape
    places, num_panels = _places(num_outputs, gated)
    depth = -(-in_features // 4)
    peaks = weight.abs().amax(dim=1)
    factors = torch.where(peaks > PEAK_MIN, torch.tensor(float(PEAK)) / peaks, 0.0)
    rows = torch.zeros(num_panels * PANEL, depth * 4, dtype=torch.int8)
    rows[places, :in_features] = (weight * factors[:, None]).round_().to(torch.int8)
    words = rows.view(num_panels, PANEL, depth, 4)
    panels = _on_a_line(torch.int8, num_panels, depth, PANEL, 4)
    panels.copy_(words.transpose(1, 2))
    num_groups = count_parts(depth, GROUP_MAX)
    bounds = [part_begin(group, num_groups, depth) for group in range(num_groups + 1)]
    sums = [words[:, :, first:last].sum(dim=(2, 3), dtype=torch.int32) for first, last in pairwise(bounds)]
    begins = -128 * torch.stack(sums, dim=1)
    placed_scales = _placed(peaks / PEAK, places, num_panels)
    assert placed_scales is not None
    return PackedWeight(
        panels,
        _placed(bias, places, num_panels),
        in_features,
        num_outputs // (1 + gated),
        gated,
        (begins, placed_scales),
    )


def _places(num_outputs: int, gated: bool) -> tuple[torch.Tensor, int]:
    """Where in the panels each output stands, int64 [num_outputs], and how many panels that takes."""
    parts = 2 if gated else 1
    width, part_outputs = PANEL // parts, num_outputs // parts
    output = torch.arange(part_outputs)
    within = output // width * PANEL + output % width
    return torch.cat([within + part * width for part in range(parts)]), -(-part_outputs // width)


def _placed(numbers: torch.Tensor | None, places: torch.Tensor, num_panels: int) -> torch.Tensor | None:
    """float32 [panels * PANEL] of a number for each output."""
    if numbers is None:
        return None
    placed = torch.zeros(num_panels * PANEL)
    placed[places] = numbers
    return placed


def _on_a_line(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """An empty tensor that begins on a cache line."""
    size = torch.Size(shape).numel()
    spare = LINE // dtype.itemsize
    storage = torch.empty(size + spare, dtype=dtype)
    skipped = -storage.data_ptr() % LINE // dtype.itemsize
    return storage[skipped : skipped + size].view(shape)
