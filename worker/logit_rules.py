"""What one request asks of single logits before sampling: bans, biases and penalties.

Owns the counts of tokens seen that the penalties need. A branch that asks for none of this has no `LogitRules`
and costs nothing. Rules know token ids and numbers, never tensors; `sampler.py` applies all rows' edits at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.protos.types import Int32Array, Request

Int64Array = npt.NDArray[np.int64]
Float64Array = npt.NDArray[np.float64]

_MIN_CAPACITY = 64


class _TokenCounts:
    """Distinct tokens of a branch and how often each was generated; O(1) a new token."""

    def __init__(self, prompt: Int32Array, outputs: Int32Array) -> None:
        # Sparse, not one counter a vocabulary entry: applying a penalty costs as much as there are distinct tokens.
        distinct, inverse = np.unique(np.concatenate([prompt, outputs]), return_inverse=True)
        self.size = len(distinct)
        capacity = max(_MIN_CAPACITY, 2 * self.size)
        self._ids = np.empty(capacity, np.int64)
        self._counts = np.zeros(capacity, np.int64)
        self._ids[: self.size] = distinct
        np.add.at(self._counts, inverse.reshape(-1)[len(prompt) :], 1)
        self._place = {token: place for place, token in enumerate(distinct.tolist())}

    @property
    def ids(self) -> Int64Array:
        return self._ids[: self.size]

    @property
    def output_counts(self) -> Int64Array:
        """0 for a token that is only in the prompt."""
        return self._counts[: self.size]

    def add(self, token: int) -> None:
        place = self._place.setdefault(token, self.size)
        if place == self.size:
            if self.size == len(self._ids):
                self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[place] = token
            self.size += 1
        self._counts[place] += 1

    def copy(self) -> _TokenCounts:
        twin = object.__new__(_TokenCounts)
        twin.size = self.size
        twin._ids, twin._counts, twin._place = self._ids.copy(), self._counts.copy(), dict(self._place)
        return twin


class LogitRules:
    """Rules of one branch. `of` gives None when there are none to apply, now or later."""

    def __init__(self, request: Request, token_ids: Int32Array, vocab_size: int) -> None:
        params, prompt_len = request.params, request.num_prompt_tokens
        self.min_tokens = params.min_tokens
        self.repetition = params.repetition_penalty
        self.presence = params.presence_penalty
        self.frequency = params.frequency_penalty
        self.bias_ids = np.fromiter(params.logit_bias.keys(), np.int64, len(params.logit_bias))
        self.biases = np.fromiter(params.logit_bias.values(), np.float64, len(params.logit_bias))
        stops = sorted(token for token in request.stop_ids if 0 <= token < vocab_size)
        self.stop_ids = np.array(stops, np.int64)
        penalises = self.repetition != 1.0 or self.presence != 0.0 or self.frequency != 0.0
        self.counts = _TokenCounts(token_ids[:prompt_len], token_ids[prompt_len:]) if penalises else None

    @classmethod
    def of(cls, request: Request, token_ids: Int32Array, vocab_size: int) -> LogitRules | None:
        """Rules of a branch whose tokens so far are `token_ids` [P + outputs]."""
        rules = cls(request, token_ids, vocab_size)
        wanted = rules.counts is not None or len(rules.bias_ids) or (rules.min_tokens and len(rules.stop_ids))
        return rules if wanted else None

    def applies(self, num_outputs: int) -> bool:
        """Whether there is anything to edit after so many output tokens."""
        return self.counts is not None or len(self.bias_ids) > 0 or num_outputs < self.min_tokens

    def add(self, token: int) -> None:
        """Take a newly sampled token into the counts."""
        if self.counts is not None:
            self.counts.add(token)

    def fork(self) -> LogitRules:
        """An independent twin for a child branch."""
        twin = object.__new__(LogitRules)
        twin.__dict__.update(self.__dict__)
        if self.counts is not None:
            twin.counts = self.counts.copy()
        return twin


@dataclass(frozen=True, slots=True, eq=False)
class LogitEdits:
    """Edits of many rows, as flat arrays. Within each of the three kinds no (sample, token) occurs twice."""

    ban_samples: Int64Array
    """[B] index of the sample; the token's logit becomes minus infinity."""
    ban_ids: Int64Array
    bias_samples: Int64Array
    """[A] the token's logit grows by the bias."""
    bias_ids: Int64Array
    biases: Float64Array
    penalty_samples: Int64Array
    """[P] the logit is divided (if positive, else multiplied) by `repetitions`, then loses `deductions`."""
    penalty_ids: Int64Array
    repetitions: Float64Array
    deductions: Float64Array

    @classmethod
    def collect(cls, rules: dict[int, LogitRules], num_outputs: dict[int, int]) -> LogitEdits:
        """Edits of this step. Both map the index of a sample: to its rules, and to its output tokens so far."""
        bans = [(k, rule.stop_ids) for k, rule in rules.items() if num_outputs[k] < rule.min_tokens]
        counted = [(k, rule, rule.counts) for k, rule in rules.items() if rule.counts is not None]
        return cls(
            ban_samples=_repeated([(k, len(ids)) for k, ids in bans]),
            ban_ids=_joined([ids for _, ids in bans], np.int64),
            bias_samples=_repeated([(k, len(rule.bias_ids)) for k, rule in rules.items()]),
            bias_ids=_joined([rule.bias_ids for rule in rules.values()], np.int64),
            biases=_joined([rule.biases for rule in rules.values()], np.float64),
            penalty_samples=_repeated([(k, counts.size) for k, _, counts in counted]),
            penalty_ids=_joined([counts.ids for _, _, counts in counted], np.int64),
            repetitions=_joined(
                [np.full(counts.size, rule.repetition) for _, rule, counts in counted], np.float64
            ),
            deductions=_joined(
                [
                    rule.presence * (counts.output_counts > 0) + rule.frequency * counts.output_counts
                    for _, rule, counts in counted
                ],
                np.float64,
            ),
        )


def _repeated(runs: list[tuple[int, int]]) -> Int64Array:
    values, lengths = zip(*runs, strict=True) if runs else ((), ())
    return np.repeat(np.array(values, np.int64), np.array(lengths, np.int64))


def _joined(parts: list[npt.NDArray[Any]], dtype: type) -> npt.NDArray[Any]:
    return np.concatenate(parts) if parts else np.empty(0, dtype)
