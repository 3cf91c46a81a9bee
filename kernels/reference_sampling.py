"""Oracle of sampling: the distribution that a row is drawn from, and the draw, in plain torch and float64."""

from __future__ import annotations

import torch


def probabilities(
    logits: torch.Tensor, *, temperature: float, top_k: int, top_p: float, min_p: float
) -> torch.Tensor:
    """float64 [V] of one row float32 [V], in this order:

    temperature  logits are divided by it
    top_k        the likeliest so many stay, lower ids first among equals; 0: all
    top_p        of those, the fewest likeliest whose share reaches it; 1: all
    min_p        of those, the ones at least so likely relative to the likeliest
    """
    weights = ((logits.double() - logits.double().max()) / temperature).exp()
    order = torch.argsort(logits, descending=True, stable=True)
    if 0 < top_k < len(logits):
        order = order[:top_k]
    if top_p < 1.0:
        sums = weights[order].cumsum(0)
        order = order[: int((sums < top_p * sums[-1]).sum()) + 1]
    kept = torch.zeros_like(weights)
    kept[order] = weights[order]
    kept[kept < min_p] = 0.0
    return kept / kept.sum()


def draw(chances: torch.Tensor, number: float) -> int:
    """The token at which the running sum of `chances` [V], in order of ids, passes `number` in [0, 1)."""
    return int(torch.searchsorted(chances.cumsum(0), torch.tensor([number], dtype=torch.float64), right=True))
