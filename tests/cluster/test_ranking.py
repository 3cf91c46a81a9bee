"""The order of choices: mean log-probability per token, best first."""

from __future__ import annotations

import pytest

from octavo.cluster.ranking import best_branches, num_branches_told
from octavo.protos.types import SamplingParams, TokenLogprobs


def entries(*values: float) -> list[TokenLogprobs]:
    return [TokenLogprobs(value) for value in values]


@pytest.mark.parametrize(
    ("branches", "n", "best"),
    [
        # Per token, not in sum: the longer one has the lower sum and the higher mean.
        ([entries(-1.0), entries(-0.5, -0.5, -0.5)], 1, [1]),
        ([entries(-3.0), entries(-1.0), entries(-2.0)], 2, [1, 2]),
        ([entries(-1.0), entries(-1.0), entries(-1.0)], 2, [0, 1]),
        ([entries(), entries(float("-inf")), entries(-9.0)], 3, [2, 0, 1]),
    ],
)
def test_best_branches(branches: list[list[TokenLogprobs]], n: int, best: list[int]) -> None:
    assert best_branches(branches, n) == best


def test_branches_that_are_told() -> None:
    assert num_branches_told(SamplingParams(n=2)) == 2
    assert num_branches_told(SamplingParams(n=2, best_of=5)) == 5
    assert num_branches_told(SamplingParams(n=2, beam_width=4)) == 2
