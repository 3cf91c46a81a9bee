"""Every request that has been accepted and has not ended: whom it answers, where it runs, what its caller has got.

Owns the promise of exactly one terminal reply, and the counts of how requests end. Knows nothing of how a worker is
chosen: `coordinator_core.py` sets `link`, and finds here who has none.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from octavo.cluster.delivered import Delivered
from octavo.cluster.worker_link import WorkerLink
from octavo.protos.errors import IntegrityError, OctavoError, RequestFailedError
from octavo.protos.types import FinishReason, OutputDelta, Request, Resume


class IngressSink(Protocol):
    """Where outputs of one ingress go. Calls must not wait."""

    def push(self, deltas: list[OutputDelta]) -> None: ...


@dataclass(slots=True, eq=False)
class OpenRequest:
    """One unfinished request."""

    sink: IngressSink
    so_far: Delivered
    link: WorkerLink | None = None
    """Where it runs; None: it waits for a worker."""
    num_losses: int = 0
    """Workers lost with it since it last made a token."""
    num_outputs_at_loss: int = -1

    @property
    def request(self) -> Request:
        return self.so_far.request

    def on_loss(self) -> None:
        """Its worker is gone."""
        self.link = None
        progress = self.so_far.num_outputs
        self.num_losses = self.num_losses + 1 if progress == self.num_outputs_at_loss else 1
        self.num_outputs_at_loss = progress


class OpenRequests:
    """All of one coordinator, in order of arrival."""

    def __init__(
        self,
        clock: Callable[[], float],
        on_end: Callable[[str, str], None] = lambda request_id, outcome: None,
    ) -> None:
        """`on_end`: request id and outcome, one of `counts`, of each that ends."""
        self._on_end = on_end
        self.counts = dict.fromkeys(("submitted", "rejected", "finished", "failed", "aborted"), 0)
        self.errors: Counter[str] = Counter()
        """Requests that failed, by class of `errors.py`."""
        self.idle = asyncio.Event()
        """Set while there is none."""
        self.idle.set()
        self._clock = clock
        self._entries: dict[str, OpenRequest] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[OpenRequest]:
        """A copy: entries may end meanwhile."""
        return iter(list(self._entries.values()))

    def get(self, request_id: str) -> OpenRequest | None:
        return self._entries.get(request_id)

    def open(self, request: Request, sink: IngressSink, resume: Resume | None = None) -> OpenRequest:
        """Accept a request whose id is not in use."""
        assert request.request_id not in self._entries
        entry = OpenRequest(sink, Delivered(request, self._clock(), resume))
        self._entries[request.request_id] = entry
        self.counts["submitted"] += 1
        self.idle.clear()
        return entry

    def deliver(self, deltas: list[OutputDelta], link: WorkerLink | None) -> None:
        """Hand on what `link` made, all that goes to one ingress together. What it says of a request that has ended or
        runs elsewhere now goes nowhere."""
        batches: dict[int, tuple[IngressSink, list[OutputDelta]]] = {}
        broken: list[tuple[OpenRequest, IntegrityError]] = []
        for delta in deltas:
            entry = self._entries.get(delta.request_id)
            if entry is None or entry.link is not link:
                continue
            try:
                entry.so_far.take(delta)
            except IntegrityError as error:
                broken.append((entry, error))
                continue
            batches.setdefault(id(entry.sink), (entry.sink, []))[1].append(delta)
            if delta.request_finished:
                if delta.error is not None:
                    self.errors[delta.error_name or RequestFailedError.__name__] += 1
                self.close(entry, "finished" if delta.error is None else "failed")
        for sink, batch in batches.values():
            sink.push(batch)
        for entry, fault in broken:
            self.fail(entry, RequestFailedError(fault.message))

    def fail(self, entry: OpenRequest, error: OctavoError) -> None:
        """The terminal reply is `error`."""
        if not self.close(entry, "failed"):
            return
        self.errors[type(error).__name__] += 1
        if entry.link is not None:
            entry.link.abort(entry.request.request_id)
        entry.sink.push(entry.so_far.end(FinishReason.ERROR, self._clock(), error=error))

    def abort(self, entry: OpenRequest) -> None:
        """Nobody waits for a reply."""
        if self.close(entry, "aborted") and entry.link is not None:
            entry.link.abort(entry.request.request_id)

    def close(self, entry: OpenRequest, outcome: str) -> bool:
        """False for one that has ended already."""
        if self._entries.get(entry.request.request_id) is not entry:
            return False
        del self._entries[entry.request.request_id]
        self.counts[outcome] += 1
        self._on_end(entry.request.request_id, outcome)
        if not self._entries:
            self.idle.set()
        return True
