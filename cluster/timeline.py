"""What happened to each recent request, and where its time went: the answer to "why was mine slow".

Owns the memory of scheduler events by request, within a limit of bytes, and how they read as JSON. Lives where the
schedulers live: in the coordinator, or beside the in-process engine's. Never waits, and costs a look into a dictionary
a token. Knows nothing of HTTP or gRPC; not thread-safe: the owner calls it where it touches the scheduler.
"""

from __future__ import annotations

import enum
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any

from octavo.protos.errors import NotFoundError
from octavo.scheduler.events import (
    Admitted,
    ChunkPlanned,
    Event,
    Finished,
    Forked,
    Preempted,
    PromptLogprobsOut,
    Queued,
    Repredicted,
    Resumed,
    TokensOut,
)
from octavo.scheduler.router import Routed

BYTES_MAX = 32 * 2**20
"""Of all timelines together; those that ended first are forgotten first."""
ENTRIES_MAX = 256
"""Of one timeline. What comes later is counted, except its end."""
TIMELINE_BYTES = 800
ENTRY_BYTES = 320
"""What a timeline and an entry weigh, a little more than measured."""
SCORE_BYTES = 160
PHASE_BYTES = 130
LATEST_MAX = 24
"""Running ones, and as many that ended, in `latest`."""


class Phase(enum.StrEnum):
    """What a request spends its time with. Computing again what it had lost is prefill too."""

    QUEUED = "queued"
    PREFILL = "prefill"
    PARKED = "parked"
    """Preempted, or without a worker after its own was lost."""
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class Migrated(Event):
    """Its worker, or the coordinator that knew it, was lost: it goes on elsewhere from what its caller has got."""

    from_worker: str | None
    reason: str


@dataclass(frozen=True, slots=True)
class Chunks(Event):
    """Chunks of one branch's prefill that followed one another with nothing in between."""

    branch: int
    start: int
    num_tokens: int
    num_chunks: int
    first_step_id: int
    last_step_id: int
    last_time: float


_NAMES: dict[type[Event], str] = {
    Queued: "queued",
    Routed: "routed",
    Repredicted: "repredicted",
    Admitted: "admitted",
    Chunks: "prefill_chunks",
    Forked: "forked",
    Preempted: "preempted",
    Resumed: "resumed",
    Migrated: "migrated",
    Finished: "finished",
}
_PHASE_AFTER: dict[type[Event], Phase] = {
    Admitted: Phase.PREFILL,
    Resumed: Phase.PREFILL,
    Preempted: Phase.PARKED,
}


class _Timeline:
    """One request."""

    __slots__ = (
        "arrived_at",
        "entries",
        "num_omitted",
        "outcome",
        "phase",
        "phases",
        "seconds",
        "since",
        "worker_id",
    )

    def __init__(self, now: float) -> None:
        self.arrived_at = now
        self.phase = Phase.QUEUED
        self.since = now
        """When `phase` began, or when the request ended."""
        self.seconds = dict.fromkeys(Phase, 0.0)
        self.phases: list[tuple[Phase, float, float]] = []
        """(phase, from, to) of those that are over, `ENTRIES_MAX` at most."""
        self.entries: list[Event] = []
        self.num_omitted = 0
        self.worker_id: str | None = None
        self.outcome: str | None = None
        """How it ended; None while it runs."""

    def enter(self, phase: Phase, now: float) -> None:
        now = max(self.since, now)
        self.seconds[self.phase] += now - self.since
        if now > self.since and len(self.phases) < ENTRIES_MAX:
            self.phases.append((self.phase, self.since, now))
        self.phase, self.since = phase, now

    @property
    def num_bytes(self) -> int:
        scores = sum(len(entry.scores) for entry in self.entries if isinstance(entry, Routed))
        return (
            TIMELINE_BYTES
            + ENTRY_BYTES * len(self.entries)
            + SCORE_BYTES * scores
            + PHASE_BYTES * len(self.phases)
        )

    def append(self, event: Event) -> None:
        if isinstance(event, ChunkPlanned):
            self._append_chunk(event)
        elif len(self.entries) < ENTRIES_MAX or (isinstance(event, Finished) and event.request_finished):
            self.entries.append(event)
        else:
            self.num_omitted += 1

    def _append_chunk(self, chunk: ChunkPlanned) -> None:
        last = self.entries[-1] if self.entries else None
        if (
            isinstance(last, Chunks)
            and last.branch == chunk.branch
            and last.start + last.num_tokens == chunk.start
        ):
            self.entries[-1] = replace(
                last,
                num_tokens=last.num_tokens + chunk.num_tokens,
                num_chunks=last.num_chunks + 1,
                last_step_id=chunk.step_id,
                last_time=chunk.time,
            )
            return
        self.append(
            Chunks(
                chunk.request_id,
                chunk.time,
                chunk.branch,
                chunk.start,
                chunk.num_tokens,
                num_chunks=1,
                first_step_id=chunk.step_id,
                last_step_id=chunk.step_id,
                last_time=chunk.time,
            )
        )


class Timelines:
    """Of all requests that run and of those that ended last."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        *,
        wall_clock: Callable[[], float] = time.time,
        bytes_max: int = BYTES_MAX,
        on_end: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        """`clock` is the one whose times the events carry. `on_end` gets what `describe` says of each that ends."""
        self._clock = clock
        self._wall_offset = wall_clock() - clock()
        self._bytes_max = bytes_max
        self._on_end = on_end
        self._running: dict[str, _Timeline] = {}
        """Bounded as unfinished requests are."""
        self._ended: OrderedDict[str, tuple[_Timeline, int]] = OrderedDict()
        """With their bytes, oldest first."""
        self._ended_bytes = 0

    @property
    def num_ended(self) -> int:
        return len(self._ended)

    def observe(self, events: Iterable[Event], worker_id: str | None = None) -> None:
        """Take in what the scheduler of `worker_id` said. What a worker says of a request that runs elsewhere, or has
        ended, is dropped."""
        for event in events:
            timeline = self._running.get(event.request_id)
            if isinstance(event, TokensOut):
                if timeline is None or timeline.phase is Phase.DECODE:
                    continue
                if timeline.worker_id == worker_id:
                    timeline.enter(Phase.DECODE, event.time)
                continue
            if isinstance(event, PromptLogprobsOut):
                continue  # a part of the answer, and says nothing of where time went
            if timeline is None:
                if not isinstance(event, (Queued, Routed, Migrated)):
                    continue
                timeline = self._running[event.request_id] = _Timeline(event.time)
            if isinstance(event, (Queued, Routed)):
                timeline.worker_id = worker_id
            elif timeline.worker_id != worker_id:
                continue
            timeline.append(event)
            phase = _PHASE_AFTER.get(type(event))
            if phase is not None:
                timeline.enter(phase, event.time)
            if isinstance(event, Finished) and event.request_finished:
                self._end(event.request_id, timeline, event.reason.value, event.time)

    def on_migration(
        self, request_id: str, reason: str, *, from_worker: str | None = None, age_seconds: float = 0.0
    ) -> None:
        """The request waits for another worker. One that is not known yet arrived `age_seconds` ago."""
        now = self._clock()
        timeline = self._running.get(request_id)
        if timeline is None:
            timeline = self._running[request_id] = _Timeline(now - age_seconds)
        timeline.append(Migrated(request_id, now, from_worker, reason))
        timeline.worker_id = None
        timeline.enter(Phase.QUEUED if timeline.phase is Phase.QUEUED else Phase.PARKED, now)

    def end(self, request_id: str, outcome: str) -> None:
        """The request ended without its scheduler's doing. One that has ended is left alone."""
        timeline = self._running.get(request_id)
        if timeline is not None:
            self._end(request_id, timeline, outcome, self._clock())

    def describe(self, request_id: str) -> dict[str, Any]:
        """The timeline as a JSON-able object. Raises `NotFoundError` for one that is not, or no longer, known."""
        timeline = self._running.get(request_id)
        if timeline is None and request_id in self._ended:
            timeline, _ = self._ended[request_id]
        if timeline is None:
            raise NotFoundError(
                f"no request {request_id!r:.100} is known here; only those that run and the last that ended are",
                param="request_id",
                code="request_not_found",
            )
        return self._object(request_id, timeline)

    def latest(self) -> list[dict[str, Any]]:
        """Those that compute or are parked, those that queue, and those that ended last; of each the newest first,
        `LATEST_MAX` unfinished ones and as many ended, without their events."""
        newest_first = list(self._running.items())[::-1]
        unfinished = sorted(newest_first, key=lambda item: item[1].phase is Phase.QUEUED)
        running = unfinished[:LATEST_MAX]
        ended = [(name, one) for name, (one, _) in islice(reversed(self._ended.items()), LATEST_MAX)]
        return [self._object(name, one, with_events=False) for name, one in (*running, *ended)]

    def _end(self, request_id: str, timeline: _Timeline, outcome: str, now: float) -> None:
        timeline.enter(timeline.phase, now)
        timeline.outcome = outcome
        del self._running[request_id]
        if self._on_end is not None:
            self._on_end(self._object(request_id, timeline))
        self._forget(request_id)  # an id that was used before
        self._ended[request_id] = (timeline, timeline.num_bytes)
        self._ended_bytes += timeline.num_bytes
        while self._ended_bytes > self._bytes_max:
            self._forget(next(iter(self._ended)))

    def _forget(self, request_id: str) -> None:
        _, num_bytes = self._ended.pop(request_id, (None, 0))
        self._ended_bytes -= num_bytes

    def _object(self, request_id: str, timeline: _Timeline, *, with_events: bool = True) -> dict[str, Any]:
        seconds = dict(timeline.seconds)
        if timeline.outcome is None:
            seconds[timeline.phase] += max(0.0, self._clock() - timeline.since)
        parked = sum(isinstance(entry, Preempted) for entry in timeline.entries)
        moved = sum(isinstance(entry, Migrated) for entry in timeline.entries)
        admitted = next((entry for entry in timeline.entries if isinstance(entry, Admitted)), None)
        told = {
            "id": request_id,
            "object": "request.timeline",
            "created": timeline.arrived_at + self._wall_offset,
            "status": "finished" if timeline.outcome else timeline.phase.value,
            "outcome": timeline.outcome,
            "worker": timeline.worker_id,
            "summary": _summary(seconds, timeline.outcome, parked, moved),
            "seconds": {
                "total": _rounded(sum(seconds.values())),
                **{phase.value: _rounded(spent) for phase, spent in seconds.items()},
            },
            "prompt_tokens": admitted.num_prompt_tokens if admitted else None,
            "cached_tokens": admitted.cached_tokens if admitted else None,
            "preemptions": parked,
            "migrations": moved,
        }
        if with_events:
            told["phases"] = [
                {
                    "phase": phase.value,
                    "at": _rounded(since - timeline.arrived_at),
                    "seconds": _rounded(until - since),
                }
                for phase, since, until in timeline.phases
            ]
            told["events"] = [_entry(entry, timeline.arrived_at) for entry in timeline.entries]
            told["events_omitted"] = timeline.num_omitted
        return told


def _entry(event: Event, arrived_at: float) -> dict[str, Any]:
    fields = asdict(event)
    del fields["request_id"], fields["time"]
    if isinstance(event, Chunks):
        fields["last_at"] = _rounded(fields.pop("last_time") - arrived_at)
    elif isinstance(event, Routed):
        for told, score in zip(fields["scores"], event.scores, strict=True):
            told["total_seconds"] = score.total_seconds
    elif isinstance(event, Finished):
        del fields["metrics"]  # counts that the timeline itself tells
    return {"event": _NAMES[type(event)], "at": _rounded(event.time - arrived_at), **fields}


def _summary(seconds: dict[Phase, float], outcome: str | None, num_parked: int, num_moved: int) -> str:
    """One sentence: where the time went, the greatest part first."""
    total = sum(seconds.values())
    words = {
        Phase.QUEUED: "queued",
        Phase.PREFILL: "in prefill",
        Phase.PARKED: "parked",
        Phase.DECODE: "in decode",
    }
    parts = sorted(
        ((spent, phase) for phase, spent in seconds.items() if spent > 0), key=lambda part: -part[0]
    )
    spent_on = ", ".join(f"{spent:.3f} s {words[phase]}" for spent, phase in parts) or "nothing yet"
    notes = [
        f"{count} {noun}{'s' if count > 1 else ''}"
        for count, noun in ((num_parked, "preemption"), (num_moved, "migration"))
        if count
    ]
    ended = f"ended ({outcome}) after" if outcome else "has run for"
    return f"It {ended} {total:.3f} s: {spent_on}{', with ' + ' and '.join(notes) if notes else ''}."


def _rounded(seconds: float) -> float:
    return round(seconds, 6)
