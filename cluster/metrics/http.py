"""What the HTTP front door counts: the rows of `table.py` of the scope HTTP.

Knows nothing of routes. One registry an app, so that tests and several apps in one process do not meet.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import Metric as Family

from octavo.cluster.metrics import table
from octavo.cluster.metrics.exposition import CONTENT_TYPE_LATEST, backend_families, text
from octavo.cluster.metrics.table import Kind, Metric

__all__ = ["CONTENT_TYPE_LATEST", "HttpMetrics"]


class HttpMetrics:
    """Counters of one HTTP app."""

    def __init__(self, replica: str = "") -> None:
        """`replica` labels every sample of this app, where several stand behind one address."""
        self._registry = CollectorRegistry()
        self._labels = ("replica",) if replica else ()
        self._values = (replica,) if replica else ()
        self._requests = self._new(table.HTTP_REQUESTS)
        self._seconds = self._new(table.HTTP_REQUEST_SECONDS)
        self.in_flight = self._bound(table.HTTP_IN_FLIGHT)
        self._streams = self._bound(table.HTTP_STREAMS)
        self._tokens = self._bound(table.HTTP_OUTPUT_TOKENS)
        self._first_tokens = self._bound(table.HTTP_CHOICES_STARTED)
        self._choices = self._new(table.HTTP_CHOICES_FINISHED)
        self._first_token_seconds = self._bound(table.HTTP_FIRST_TOKEN_SECONDS)
        self._batch_lines = self._new(table.BATCH_LINES)
        self.batches_running = self._bound(table.BATCHES_RUNNING)
        self.num_streams = 0

    def _new(self, metric: Metric) -> Any:
        """The library's object for a row, its own labels still to be given."""
        name, labels = metric.name, (*self._labels, *metric.labels)
        if metric.kind is Kind.HISTOGRAM:
            return Histogram(name, metric.help, labels, buckets=metric.buckets, registry=self._registry)
        kind = Counter if metric.kind is Kind.COUNTER else Gauge
        return kind(name, metric.help, labels, registry=self._registry)

    def _bound(self, metric: Metric) -> Any:
        """The same for a row without labels of its own."""
        made = self._new(metric)
        return made.labels(*self._values) if self._values else made

    def on_request(self, method: str, route: str, status: int, seconds: float) -> None:
        """One HTTP exchange is over."""
        self._requests.labels(*self._values, method, route, str(status)).inc()
        self._seconds.labels(*self._values, route).observe(seconds)

    def on_stream(self, change: int) -> None:
        """A stream opened (+1) or closed (-1)."""
        self.num_streams += change
        self._streams.inc(change)

    def on_tokens(self, count: int, *, first: bool) -> None:
        """`count` output tokens came for one choice; `first`: its first ones."""
        self._tokens.inc(count)
        if first and count:
            self._first_tokens.inc()

    def on_choice(self, reason: str) -> None:
        self._choices.labels(*self._values, reason).inc()

    def on_first_token(self, seconds: float) -> None:
        self._first_token_seconds.observe(seconds)

    def on_batch_line(self, succeeded: bool) -> None:
        """A line of a batch has its answer."""
        self._batch_lines.labels(*self._values, "completed" if succeeded else "failed").inc()

    def families(self) -> list[Family]:
        return [_without_created(family) for family in self._registry.collect()]

    def render(self, stats: Mapping[str, Any] | None) -> bytes:
        """All of it as Prometheus text. `stats`: the backend's, or None when it did not answer."""
        return text([*self.families(), *backend_families(stats)])


def _without_created(family: Family) -> Family:
    """The library adds the birth time of every counter, which doubles the page and tells nobody anything."""
    family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
    return family
