"""A weight as the CPU's own products read it. Owns the layout's name and nothing of its use."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """Weights [N, K] of a product, in panels; made by `dispatch.pack_weight`, read by `dispatch.multiply`."""

    panels: torch.Tensor
    """float32 [P, K, width] or int8 [P, ceil(K / 4), width, 4], zeros after the last output; on a cache line."""
    bias: torch.Tensor | None
    """float32 [P * width], in the order of the panels."""
    in_features: int
    out_features: int
    gated: bool
    """Half of each panel holds gates, the other half what they let through: `out_features` is N / 2."""
    int8: tuple[torch.Tensor, torch.Tensor] | None = None
    """Of int8 panels: where the sums of each group of inputs begin, int32 [P, groups, width], and the outputs' scales,
    float32 [P * width]."""
