"""Which worker gets a request: the one on which it will start soonest.

Chooses and reserves in one call: the request stands in the chosen queue before the next one is routed, so that a
burst does not herd to one worker. Filter, score and pick follow one another as in llm-d's scheduler; the best scores
go into the `Routed` event. What is known of the workers is exact and asks nobody: their cached prefixes stand in one
`PrefixIndex`, their load in one matrix whose rows the schedulers write (`load.py`).

Predictions that differ by less than their own error say nothing: among those the emptiest worker is taken, or
else a fixed cost that dominates the model would send everybody to whoever measured a hair faster.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import xxhash

from octavo.protos.errors import ConfigError, OverloadedError, RequestTooLargeError, UnavailableError
from octavo.protos.types import Request, Resume
from octavo.scheduler.events import Event, Queued
from octavo.scheduler.load import Load, Loads
from octavo.scheduler.prefix_index import INDEX_BYTES_MAX, PrefixIndex, hear_no_more
from octavo.scheduler.promised import PromisedPrefixes
from octavo.scheduler.scheduler import Scheduler
from octavo.scheduler.start_time import Floats, StartTimes, may_lack_room, predict

ROUTER_POLICIES = ("predicted_ttft", "prefix", "least_loaded", "round_robin")
"""`prefix` goes where most of the prompt is cached; the last two look at no prefix. They are there to be compared."""
INDIFFERENCE = 0.02
"""Scores within so much of the best one are equal."""
SCORES_MAX = 8
"""Scores told in a `Routed` event: the best ones, in the order of choice."""
PROMISED_SHARE = 8
"""Prompts that wait may take one byte for so many of cached prefixes."""


@dataclass(frozen=True, slots=True)
class Score:
    """Why a worker was or was not chosen. Lower is better."""

    worker_id: str
    ttft_seconds: float
    """Predicted: what is queued before this request, what of its own prompt is not cached, and what comes from the
    host tier."""
    load_seconds: float
    """Price of one more branch in the decode batch that it joins."""
    cached_tokens: int
    """Of the worker that was chosen, to the token; of the others, in whole blocks."""
    promised_tokens: int
    """Of the prompt, in whole blocks: what requests queued there before it will have computed, if that is more."""
    indexed_blocks: int
    """What the index knows of the prompt there: whole blocks, device and host."""
    num_seqs: int
    """Branches that run or wait there."""

    @property
    def expected_tokens(self) -> int:
        """Prompt tokens that will be found when the request's turn comes."""
        return max(self.cached_tokens, self.promised_tokens)

    @property
    def total_seconds(self) -> float:
        return self.ttft_seconds + self.load_seconds


@dataclass(frozen=True, slots=True)
class _KnownBlocks:
    """Blocks of one prompt's prefix, each [workers]."""

    held: Floats
    """On the device, and on the host where they would be loaded."""
    on_host: Floats
    """Of these."""
    expected: Floats
    """`held`, or what is promised where that is more."""


@dataclass(frozen=True, slots=True)
class Routed(Event):
    """A worker was chosen and the request stands in its queue."""

    worker_id: str
    scores: tuple[Score, ...]


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a request that arrives now would meet, at the worker where it would start soonest, and how full all are."""

    wait_seconds: float
    """To its first token, were its prompt a single one."""
    queued_branches: int
    """That stand before it."""
    full: float
    """Share of all rows or of all blocks that is in use, whichever is more."""
    token_seconds: float
    """A token of a prompt takes so long, on average over the workers."""


def check_policy(policy: str) -> None:
    """Raises `ConfigError` for one that is unknown."""
    if policy not in ROUTER_POLICIES:
        raise ConfigError(
            f"router_policy must be one of {', '.join(ROUTER_POLICIES)}, got {policy!r}",
            param="router_policy",
        )


class Router:
    """Filter, score, pick, reserve. Same seed and same calls, same choices."""

    def __init__(
        self, seed: int = 0, *, policy: str = "predicted_ttft", index_bytes_max: int = INDEX_BYTES_MAX
    ) -> None:
        """`index_bytes_max` for each block size among the workers. Raises `ConfigError` for an unknown policy."""
        check_policy(policy)
        self.policy = policy
        self._seed = seed
        self._index_bytes_max = index_bytes_max
        self._count = 0
        self._fleet: dict[str, Scheduler] = {}
        self._ids: list[str] = []
        self._indexes: dict[int, PrefixIndex] = {}
        self._promised: dict[int, PromisedPrefixes] = {}
        self._loads: Loads = np.zeros((0, len(Load)))
        self._with_host: list[int] = []

    @property
    def index_bytes(self) -> int:
        """What the index takes, by its own estimate."""
        return sum(index.num_bytes for index in self._indexes.values()) + sum(
            promised.num_bytes for promised in self._promised.values()
        )

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
        if workers != self._fleet:
            self.adopt(workers)
        known = self._known_blocks(request)
        times = predict(
            self._loads,
            request.num_prompt_tokens,
            known.expected,
            known.on_host,
            self._shared(request, known),
        )
        self._count += 1
        refusal: RequestTooLargeError | OverloadedError | None = None
        tried: list[int] = []
        while len(tried) < len(self._ids):
            worker = self._best(times, known.held, tried)
            tried.append(worker)
            worker_id, scheduler = self._ids[worker], self._fleet[self._ids[worker]]
            try:
                size = scheduler.config.block_size
                promised = int(known.expected[worker]) * size
                queued = scheduler.add(request, now, resume, promised_tokens=promised)
            except (RequestTooLargeError, OverloadedError) as error:
                # Of several reasons the temporary one is told: the request may be sent again.
                if refusal is None or isinstance(error, OverloadedError):
                    refusal = error
                continue
            cached = sum(event.cached_tokens for event in queued if isinstance(event, Queued))
            if request.use_prefix_cache and scheduler.config.prefix_cache:
                whole = request.num_prompt_tokens // size
                tokens = request.prompt_token_ids[: whole * size].tobytes()
                root_key = (request.cache_salt, request.adapter)
                self._promised[size].promise(worker, request.request_id, root_key, tokens, whole)
            scores = self._scores(times, known, worker, cached)
            return worker_id, [Routed(request.request_id, now, worker_id, scores), *queued]
        assert refusal is not None
        raise refusal

    def outlook(self, workers: Mapping[str, Scheduler]) -> Outlook:
        """Changes nothing that a choice depends on. Without workers the wait is infinite."""
        if not workers:
            return Outlook(float("inf"), 0, 0.0, 0.0)
        if workers != self._fleet:
            self.adopt(workers)
        nothing = np.zeros(len(self._ids))
        wait = predict(self._loads, 1, nothing, nothing, nothing).ttft
        best = int(wait.argmin())
        totals = self._loads.sum(axis=0)
        full = max(
            totals[Load.RUNNING_BRANCHES] / totals[Load.MAX_BRANCHES],
            totals[Load.USED_BLOCKS] / totals[Load.NUM_BLOCKS],
        )
        return Outlook(
            float(wait[best]),
            int(self._loads[best, Load.WAITING_BRANCHES]),
            float(full),
            float(totals[Load.TOKEN_SECONDS]) / len(self._ids),
        )

    # --- filter --------------------------------------------------------------------------------------------

    def adopt(self, workers: Mapping[str, Scheduler]) -> None:
        """Know these workers and no others, with all that they hold now. `route` calls this when they change."""
        # Positions in the matrix and in the index are one, so that both are rebuilt; workers come and go rarely.
        for scheduler in self._fleet.values():
            scheduler.report_load(None)
            hear_no_more(scheduler.kv.tree)
        self._fleet = dict(workers)
        self._ids = sorted(workers)
        self._loads = np.zeros((len(self._ids), len(Load)))
        self._indexes, self._promised = {}, {}
        self._with_host = []
        for position, worker_id in enumerate(self._ids):
            scheduler = workers[worker_id]
            size = scheduler.config.block_size
            if size not in self._indexes:
                self._indexes[size] = PrefixIndex(size, bytes_max=self._index_bytes_max)
                self._promised[size] = PromisedPrefixes(
                    size, self._is_due, bytes_max=self._index_bytes_max // PROMISED_SHARE
                )
            self._indexes[size].attach(position, scheduler.kv.tree)
            scheduler.report_load(self._loads[position])
            if scheduler.config.num_host_blocks:
                self._with_host.append(position)

    def _is_due(self, worker: int, request_id: str) -> bool:
        return self._fleet[self._ids[worker]].awaits_first_token(request_id)

    def _known_blocks(self, request: Request) -> _KnownBlocks:
        """What each worker has of the prompt, and could use."""
        num = len(self._ids)
        held, on_host, promised = np.zeros(num), np.zeros(num), np.zeros(num)
        if request.reads_prefix_cache:
            tokens = request.prompt_token_ids.tobytes()
            root_key = (request.cache_salt, request.adapter)
            for size, index in self._indexes.items():
                # One token short of all: that one gives the logits.
                limit = (request.num_prompt_tokens - 1) // size
                found, behind = index.lookup(root_key, tokens, limit)
                for blocks, into in (
                    (found, held),
                    (behind, on_host),
                    (self._promised[size].lookup(root_key, tokens, limit), promised),
                ):
                    if blocks:
                        into[list(blocks)] = list(blocks.values())
        for position in self._with_host:
            if on_host[position] and not self._fleet[self._ids[position]].kv.loads_from_host:
                held[position] -= on_host[position]
                on_host[position] = 0
        if request.fork_of:
            # What it goes on from may be in no tree yet; the worker that runs it knows.
            for position, worker_id in enumerate(self._ids):
                scheduler = self._fleet[worker_id]
                if scheduler.runs(request.fork_of):
                    held[position] = scheduler.cached_tokens_of(request) // scheduler.config.block_size
        return _KnownBlocks(held, on_host, np.maximum(held, promised))

    def _shared(self, request: Request, known: _KnownBlocks) -> Floats:
        """Blocks of its prefix that others hold, so that they take no room; looked up where room is short."""
        shared = np.zeros(len(self._ids))
        short = may_lack_room(self._loads, request.num_prompt_tokens) & (known.held > 0)
        for position in np.flatnonzero(short).tolist():
            scheduler = self._fleet[self._ids[position]]
            shared[position] = scheduler.num_blocks_shared(request, int(known.held[position]))
        # What is promised is held by whoever computes it.
        shared += known.expected - known.held
        return shared

    # --- score and pick ------------------------------------------------------------------------------------

    def _best(self, times: StartTimes, held: Floats, tried: list[int]) -> int:
        """Position of the worker to try next."""
        if self.policy == "round_robin":
            return (self._count - 1 + len(tried)) % len(self._ids)
        keys = {"predicted_ttft": times.total, "prefix": -held, "least_loaded": times.num_seqs}
        scores = keys[self.policy]
        if tried:
            scores = scores.copy()
            scores[tried] = np.inf
        best = scores.min()
        limit = best * (1 + INDIFFERENCE) if self.policy == "predicted_ttft" else best
        equal = np.flatnonzero(scores <= limit)
        if len(equal) > 1:
            seqs = times.num_seqs[equal]
            equal = equal[seqs == seqs.min()]
        if len(equal) == 1:
            return int(equal[0])
        return min(equal.tolist(), key=self._tie)

    def _tie(self, position: int) -> int:
        name = f"{self._count}/{self._ids[position]}"
        return xxhash.xxh64_intdigest(name.encode(), seed=self._seed & (2**64 - 1))

    def _scores(self, times: StartTimes, known: _KnownBlocks, chosen: int, cached: int) -> tuple[Score, ...]:
        """The chosen worker's first, with its `cached` tokens, then those with the best predictions."""
        order = np.argsort(times.total, kind="stable")[:SCORES_MAX].tolist()
        order = [chosen, *[position for position in order if position != chosen]][:SCORES_MAX]
        sizes = self._loads[:, Load.BLOCK_SIZE]
        scores = [
            Score(
                self._ids[at],
                float(times.ttft[at]),
                float(times.load[at]),
                int(known.held[at] * sizes[at]),
                int(known.expected[at] * sizes[at]) if known.expected[at] > known.held[at] else 0,
                int(known.held[at]),
                int(times.num_seqs[at]),
            )
            for at in order
        ]
        scores[0] = replace(scores[0], cached_tokens=cached)
        return tuple(scores)
