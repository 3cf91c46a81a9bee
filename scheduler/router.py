"""Which worker gets a request: the one on which it will start soonest.

Asks each worker's scheduler, so its knowledge of cached prefixes is exact. Chooses and reserves in one call: the
request stands in the chosen queue before the next one is routed, so that a burst does not herd to one worker.
Filter, score and pick follow one another as in llm-d's scheduler; all scores go into the `Routed` event.

Predictions that differ by less than their own error say nothing: among those the emptiest worker is taken, or
else a fixed cost that dominates the model would send everybody to whoever measured a hair faster.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import xxhash

from octavo.protos.errors import OverloadedError, RequestTooLargeError, UnavailableError
from octavo.protos.types import Request, Resume
from octavo.scheduler.events import Event
from octavo.scheduler.scheduler import Scheduler

INDIFFERENCE = 0.05
"""Scores within so much of the best one are equal."""


@dataclass(frozen=True, slots=True)
class Score:
    """Why a worker was or was not chosen. Lower is better."""

    worker_id: str
    ttft_seconds: float
    """Predicted: prefill queued before this request, plus what of its own prompt is not cached."""
    load_seconds: float
    """Price of one more branch in the decode batch that it joins."""
    cached_tokens: int
    num_seqs: int
    """Branches that run or wait there."""

    @property
    def total_seconds(self) -> float:
        return self.ttft_seconds + self.load_seconds


@dataclass(frozen=True, slots=True)
class Routed(Event):
    """A worker was chosen and the request stands in its queue."""

    worker_id: str
    scores: tuple[Score, ...]


class Router:
    """Filter, score, pick, reserve. Same seed and same calls, same choices."""

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed
        self._count = 0

    def route(
        self,
        request: Request,
        workers: Mapping[str, Scheduler],
        now: float,
        resume: Resume | None = None,
    ) -> tuple[str, list[Event]]:
        """Put `request` into the best worker's queue, to go on from `resume` where it was lost elsewhere; returns that
        worker's id and what happened.

        Raises `UnavailableError` without workers, `RequestTooLargeError` when it can never fit on any, and
        `OverloadedError` when all that could take it are full.
        """
        if not workers:
            raise UnavailableError("no worker is ready")
        scores = tuple(self._score(worker_id, workers[worker_id], request) for worker_id in sorted(workers))
        self._count += 1
        refusal: RequestTooLargeError | OverloadedError | None = None
        equal = (1 + INDIFFERENCE) * min(score.total_seconds for score in scores)

        def order(score: Score) -> tuple[float, int, int]:
            return (max(equal, score.total_seconds), score.num_seqs, self._tie(score.worker_id))

        for score in sorted(scores, key=order):
            try:
                queued = workers[score.worker_id].add(request, now, resume)
            except (RequestTooLargeError, OverloadedError) as error:
                # Of several reasons the temporary one is told: the request may be sent again.
                if refusal is None or isinstance(error, OverloadedError):
                    refusal = error
                continue
            return score.worker_id, [Routed(request.request_id, now, score.worker_id, scores), *queued]
        assert refusal is not None
        raise refusal

    def _score(self, worker_id: str, scheduler: Scheduler, request: Request) -> Score:
        cached = scheduler.cached_tokens_of(request)
        uncached = request.num_prompt_tokens - cached
        chunk = scheduler.config.max_num_batched_tokens
        ttft = scheduler.step_time.prefill_seconds(scheduler.num_queued_tokens + uncached, chunk_tokens=chunk)
        rows = scheduler.num_running_seqs + scheduler.num_waiting_seqs
        load = scheduler.step_time.step_seconds(num_tokens=rows + 1, num_rows=rows + 1, context_tokens=0)
        if ttft == 0.0 and load == 0.0:
            # Nothing measured yet: a token is as good a unit as a second.
            ttft, load = float(scheduler.num_queued_tokens + uncached), float(rows + 1)
        return Score(worker_id, ttft, load, cached, rows)

    def _tie(self, worker_id: str) -> int:
        return xxhash.xxh64_intdigest(f"{self._count}/{worker_id}".encode(), seed=self._seed & (2**64 - 1))
