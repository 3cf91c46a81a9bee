"""Which branches of a request are its answer: all, or with `best_of` the likeliest of those that were sampled.

Owns the order of choices, for HTTP and the in-process engine alike. Pure; knows nothing of text or JSON.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from octavo.protos.types import SamplingParams, TokenLogprobs


def num_branches_told(params: SamplingParams) -> int:
    """Branches whose outputs the scheduler tells. A beam search tells of its n best only; ranking sampled branches is
    left to the callers, because stop strings cut them first."""
    return params.best_of or params.n


def best_branches(logprobs: Sequence[Sequence[TokenLogprobs | None]], n: int) -> list[int]:
    """Indices of the `n` branches with the highest mean log-probability per token, best first, ties in order.

    `logprobs`: one sequence a branch, one entry a token. A branch without tokens comes last.
    """
    means = [_mean(entries) for entries in logprobs]
    return sorted(range(len(means)), key=lambda branch: -means[branch])[:n]


def _mean(entries: Sequence[TokenLogprobs | None]) -> float:
    if not entries:
        return -math.inf
    chosen = [entry.logprob for entry in entries if entry is not None]
    assert len(chosen) == len(entries), "where branches are ranked every token has its log-probability"
    return sum(chosen) / len(chosen)
