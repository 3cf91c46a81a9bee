"""Beam search over one request: which hypotheses go on, which have finished, and when to stop.

Owns scores and finished hypotheses. Knows nothing of blocks, rows or plans: `lifecycle.py` forks and drops branches
as it is told here.

Semantics follow Hugging Face transformers' `generate(num_beams=...)`, whose ranking goes back to Wu et al.
(arXiv:1609.08144, section 7) with the length penalty as a plain power of the number of output tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from octavo.protos.types import FinishReason, Request, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """One finished answer."""

    token_ids: tuple[int, ...]
    """Output tokens, the stop token included."""
    logprobs: tuple[TokenLogprobs, ...]
    """One a token, or none where the request did not ask."""
    score: float
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class Continuation:
    """A running beam extended by one token."""

    beam: int
    """Which of the beams that ran so far."""
    token: int
    logprob: float
    """Of all output tokens together."""
    entry: TokenLogprobs | None
    """Of the new token, where the request asked."""


class BeamSearch:
    """The search of one request. Beams are numbered by rank, the best first."""

    def __init__(self, request: Request, max_tokens: int) -> None:
        params = request.params
        assert params.beam_width is not None
        self.width = params.beam_width
        self.finished: list[Hypothesis] = []
        """At most `width`, best first."""
        self._params = params
        self._stop_ids = request.stop_ids
        self._max_tokens = max_tokens
        self._num_outputs = 0
        self._running: list[tuple[float, tuple[TokenLogprobs, ...]]] = [(0.0, ())]
        """Log-probability and per-token entries of each running beam."""

    def advance(
        self, candidates: Sequence[TokenLogprobs], output_of: Callable[[int], Sequence[int]]
    ) -> list[Continuation]:
        """Take one step of all beams; returns those that go on, best first, none when the search is over.

        `candidates`: of each running beam its likeliest next tokens (`Request.num_beam_candidates` or the whole
        vocabulary). `output_of(beam)`: its output tokens so far, asked only for those that finish.
        """
        params, length = self._params, self._num_outputs + 1
        extended = self._extended(candidates)
        last = length >= self._max_tokens
        norm = length**params.length_penalty
        # A token beyond the first `width` may go on in place of one that ends, but is too unlikely to end a beam.
        for step in extended[: self.width]:
            stops = step.token in self._stop_ids
            if stops or last:
                self.finished.append(
                    Hypothesis(
                        (*output_of(step.beam), step.token),
                        self._entries(step),
                        step.logprob / norm,
                        FinishReason.STOP if stops else FinishReason.LENGTH,
                    )
                )
        self.finished.sort(key=lambda hypothesis: -hypothesis.score)
        del self.finished[self.width :]
        going_on = [step for step in extended if step.token not in self._stop_ids][: self.width]
        if last or not going_on or self._cannot_improve(going_on[0].logprob, length):
            return []
        self._running = [(step.logprob, self._entries(step)) for step in going_on]
        self._num_outputs = length
        return going_on

    def _extended(self, candidates: Sequence[TokenLogprobs]) -> list[Continuation]:
        """All beams by all candidates, likeliest first; equals by beam, then by token."""
        banned = self._stop_ids if self._num_outputs < self._params.min_tokens else frozenset()
        wanted = self._params.logprobs
        found = []
        for beam, ((logprob, _), tops) in enumerate(zip(self._running, candidates, strict=True)):
            shown = None if wanted is None else (tops.top_ids[:wanted], tops.top_logprobs[:wanted])
            for token, own in zip(tops.top_ids, tops.top_logprobs, strict=True):
                if token not in banned:
                    entry = None if shown is None else TokenLogprobs(own, *shown)
                    found.append(Continuation(beam, token, logprob + own, entry))
        found.sort(key=lambda step: (-step.logprob, step.beam, step.token))
        return found

    def _entries(self, step: Continuation) -> tuple[TokenLogprobs, ...]:
        return () if step.entry is None else (*self._running[step.beam][1], step.entry)

    def _cannot_improve(self, best_logprob: float, length: int) -> bool:
        """Whether enough have finished and the best running beam is given up."""
        params = self._params
        if len(self.finished) < self.width:
            return False
        if params.early_stopping is True:
            return True
        # A positive penalty favours length, so the most that a beam can reach is at the limit.
        if params.early_stopping == "never" and params.length_penalty > 0:
            length = self._max_tokens
        reachable: float = best_logprob / length**params.length_penalty
        return reachable <= self.finished[-1].score
