"""Which tokens of a step's prompts have log-probabilities to be told, and where the logits are that foretell them.

Owns one rule: a token foretells the next one, so that the first of a prompt is never told, and its last foretells the
first output. Knows nothing of torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from octavo.protos.types import Int32Array, StepPlan


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """What one row of a plan tells of its prompt."""

    index: int
    """Into the plan's `rows`."""
    first: int
    """Position of the first token that is told; the chunk begins with the token before it."""
    count: int


def find_prompt_chunks(
    plan: StepPlan, active: Int32Array, prompt_lens: Int32Array, num_logprobs: Int32Array
) -> list[PromptChunk]:
    """Of the plan's rows `active` (indices). `prompt_lens` and `num_logprobs` (-1: not asked for) are by row."""
    asked = active[num_logprobs[plan.rows[active]] >= 0]
    if not len(asked):
        return []
    starts = plan.start_positions[asked]
    ends = np.minimum(starts + plan.num_tokens[asked], prompt_lens[plan.rows[asked]] - 1)
    return [
        PromptChunk(index, start + 1, end - start)
        for index, start, end in zip(asked.tolist(), starts.tolist(), ends.tolist(), strict=True)
        if end > start
    ]


@dataclass(frozen=True, slots=True, eq=False)
class PromptRows:
    """All chunks of a step, R tokens in all."""

    logit_indices: npt.NDArray[np.int64]
    """[R] row of the logits that foretell the token."""
    token_ids: Int32Array
    """[R]"""
    num_logprobs: Int32Array
    """[R] likeliest tokens to tell beside each."""
    chunks: list[PromptChunk]

    @classmethod
    def of(
        cls,
        chunks: list[PromptChunk],
        rows: Int32Array,
        logit_indices: npt.NDArray[np.int64],
        tokens: Int32Array,
        num_logprobs: Int32Array,
    ) -> PromptRows:
        """`rows` are the plan's; `tokens` [rows, L] and `num_logprobs` are by row."""
        owners = [int(rows[chunk.index]) for chunk in chunks]
        told = [
            tokens[row, chunk.first : chunk.first + chunk.count]
            for row, chunk in zip(owners, chunks, strict=True)
        ]
        counts = np.repeat(num_logprobs[owners], [chunk.count for chunk in chunks])
        return cls(logit_indices, np.concatenate(told), counts, chunks)
