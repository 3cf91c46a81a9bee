"""What the router decided, for `/metrics`; why it decided one request so is in that request's timeline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from octavo.cluster.metrics import table
from octavo.cluster.metrics.histogram import Histogram
from octavo.scheduler.events import Event
from octavo.scheduler.router import Routed


class RouterMeter:
    """Of all workers together."""

    def __init__(self) -> None:
        self._decisions: Counter[str] = Counter()
        """By worker id; one that was let go stays, as counters must."""
        self._scores = {name: Histogram(table.ROUTER_SCORE.buckets) for name in ("chosen", "best_other")}
        self._expected_cached_tokens = 0

    def observe(self, events: Iterable[Event]) -> None:
        """Take in what `Router.route` said."""
        for event in events:
            if not isinstance(event, Routed):
                continue
            self._decisions[event.worker_id] += 1
            chosen, *others = event.scores
            self._expected_cached_tokens += chosen.expected_tokens
            self._scores["chosen"].observe(chosen.total_seconds)
            if others:
                self._scores["best_other"].observe(min(score.total_seconds for score in others))

    def snapshot(self) -> dict[str, Any]:
        """JSON-able, by the keys that `table.py` reads."""
        return {
            "decisions": dict(self._decisions),
            "scores": {name: histogram.snapshot() for name, histogram in self._scores.items()},
            "expected_cached_tokens": self._expected_cached_tokens,
        }
