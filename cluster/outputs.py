"""What a finished call gives back: the same objects from the in-process Engine and from the HTTP client.

Owns the shape of results that people's code reads. Knows nothing of how they were made.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.protos.types import RequestMetrics, TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One branch of a request, complete."""

    index: int
    """0 .. n-1."""
    text: str
    token_ids: tuple[int, ...]
    """Sampled tokens. Over HTTP, empty when the server does not know `return_token_ids`."""
    finish_reason: str | None
    """A value of `FinishReason`: "stop", "length", "abort", "error"."""
    logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """[len(token_ids)] when `SamplingParams.logprobs` asked for them, else None."""
    cumulative_logprob: float | None = None
    """Sum over the chosen tokens, natural log; None when log-probabilities were not asked for."""
    score: float | None = None
    """What a beam search ranked it by; None for sampled branches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """One request, complete: `outputs` has one entry for each of `n` branches, in order of `index`; with `best_of` and
    beams that is best first."""

    request_id: str
    prompt: str | None
    """The text as given; None for a prompt of token ids or chat messages."""
    prompt_token_ids: tuple[int, ...]
    """Over HTTP, empty when the server does not know `return_token_ids`."""
    outputs: tuple[CompletionOutput, ...]
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """One for each prompt token, None for the first, when `SamplingParams.prompt_logprobs` asked for them."""
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    forked_at: int | None = None
    """Of a fork: output tokens of its parent that the prompt ends with."""
