"""Prometheus metrics: what the HTTP front door counts itself, and what the backend's `stats()` say.

Owns names, types and help texts (`octavo_*`, counters end in `_total`, base units). Knows nothing of routes. One
registry an app, so that tests and several apps in one process do not meet.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

__all__ = ["CONTENT_TYPE_LATEST", "HttpMetrics", "backend_metrics"]

SECONDS_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)

BACKEND_COUNTERS = {
    "steps": ("octavo_steps", "Steps planned."),
    "scheduled_tokens": (
        "octavo_scheduled_tokens",
        "Tokens run, prompt and output, recomputed ones included.",
    ),
    "sampled_tokens": ("octavo_generation_tokens", "Output tokens sampled."),
    "step_seconds": ("octavo_step_seconds", "Wall time of the workers' steps."),
    "cache_hit_tokens": ("octavo_prefix_cache_hit_tokens", "Prompt tokens whose KV was found."),
    "cache_query_tokens": ("octavo_prompt_tokens", "Prompt tokens of admitted requests."),
    "recomputed_tokens": (
        "octavo_recomputed_tokens",
        "Tokens computed again because of preemption or a loss.",
    ),
    "block_steps": ("octavo_kv_block_steps", "KV blocks in use, summed over steps."),
    "blocks_demoted": ("octavo_kv_blocks_demoted", "Cached blocks that moved from the device to the host."),
    "blocks_promoted": ("octavo_kv_blocks_promoted", "Cached blocks that were loaded from the host again."),
    "preemptions": ("octavo_preemptions", "Requests parked, by kind."),
    "finished": ("octavo_requests_finished", "Requests that ended, by reason."),
    "moved": ("octavo_requests_moved", "Requests that went on after their worker or coordinator was lost."),
}
"""Key of `stats()` to (name without _total, help). A mapping as value becomes one sample a key."""

BACKEND_GAUGES = {
    "running": ("octavo_requests_running", "Requests that hold blocks and run."),
    "waiting": ("octavo_requests_waiting", "Requests in the queue."),
    "without_worker": ("octavo_requests_without_worker", "Requests that wait for a lost worker's return."),
    "swapped": ("octavo_requests_swapped", "Requests parked in host memory."),
    "blocks_total": ("octavo_kv_blocks", "KV blocks of the pool."),
    "blocks_used": ("octavo_kv_blocks_used", "KV blocks that requests hold."),
    "blocks_cached": ("octavo_kv_blocks_cached", "KV blocks kept for their prefix, free to take."),
    "blocks_free": ("octavo_kv_blocks_free", "KV blocks with nothing in them."),
    "host_blocks_total": ("octavo_host_kv_blocks", "KV blocks of the swap space in host memory."),
    "host_blocks_used": ("octavo_host_kv_blocks_used", "Host blocks that swapped requests hold."),
    "host_blocks_cached": (
        "octavo_host_kv_blocks_cached",
        "Host blocks kept for their prefix, free to take.",
    ),
    "block_size": ("octavo_kv_block_size_tokens", "Tokens a block."),
    "max_step_tokens": ("octavo_step_tokens_max", "Most tokens of any step so far."),
    "peak_blocks": ("octavo_kv_blocks_used_max", "Most blocks in use so far."),
    "peak_waste": (
        "octavo_kv_waste_ratio",
        "Share of allocated slots without a token, at the fullest moment.",
    ),
}

LABELS = {"preemptions": "kind", "finished": "reason"}


class HttpMetrics:
    """Counters of one HTTP app."""

    def __init__(self, replica: str = "") -> None:
        """`replica` labels every sample of this app, where several stand behind one address."""
        self.registry = CollectorRegistry()
        labels = ["replica"] if replica else []
        values = [replica] if replica else []

        def bound(metric: Any) -> Any:
            return metric.labels(*values) if values else metric

        self._requests = Counter(
            "octavo_http_requests",
            "HTTP requests answered; status 499: the client left first.",
            [*labels, "method", "route", "status"],
            registry=self.registry,
        )
        self._seconds = Histogram(
            "octavo_http_request_seconds",
            "From request to the last byte of the reply.",
            [*labels, "route"],
            buckets=SECONDS_BUCKETS,
            registry=self.registry,
        )
        self._values = values
        self.in_flight = bound(
            Gauge("octavo_http_requests_in_flight", "HTTP requests open.", labels, registry=self.registry)
        )
        self._streams = bound(
            Gauge("octavo_http_streams", "Event streams open.", labels, registry=self.registry)
        )
        self._tokens = bound(
            Counter(
                "octavo_http_output_tokens",
                "Output tokens that reached this app, of aborted requests too.",
                labels,
                registry=self.registry,
            )
        )
        self._first_tokens = bound(
            Counter(
                "octavo_http_choices_started", "Choices with a first token.", labels, registry=self.registry
            )
        )
        self._choices = Counter(
            "octavo_http_choices_finished",
            "Choices that ended, by reason; those of aborted calls are missing.",
            [*labels, "reason"],
            registry=self.registry,
        )
        self._first_token_seconds = bound(
            Histogram(
                "octavo_time_to_first_token_seconds",
                "From a call's arrival to its first token.",
                labels,
                buckets=SECONDS_BUCKETS,
                registry=self.registry,
            )
        )
        self.num_streams = 0

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

    def render(self, stats: Mapping[str, Any] | None) -> bytes:
        """All of it as Prometheus text. `stats`: the backend's, or None when it did not answer."""
        scrape = CollectorRegistry()
        scrape.register(_Fixed([*map(_without_created, self.registry.collect()), *backend_metrics(stats)]))
        return generate_latest(scrape)


class _Fixed:
    """A collector of metrics that were made beforehand."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = list(metrics)

    def collect(self) -> Iterator[Metric]:
        return iter(self._metrics)


def _without_created(metric: Metric) -> Metric:
    """The library adds the birth time of every counter, which doubles the page and tells nobody anything."""
    metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
    return metric


def backend_metrics(stats: Mapping[str, Any] | None) -> list[Metric]:
    """The backend's `stats()` as metrics. Keys outside the two tables are left out, as is what is no number."""
    metrics: list[Metric] = [
        GaugeMetricFamily(
            "octavo_backend_up", "1 when the backend answered this scrape.", value=float(stats is not None)
        )
    ]
    for key, value in (stats or {}).items():
        if key in BACKEND_COUNTERS:
            metrics.append(_family(CounterMetricFamily, *BACKEND_COUNTERS[key], key, value))
        elif key in BACKEND_GAUGES:
            metrics.append(_family(GaugeMetricFamily, *BACKEND_GAUGES[key], key, value))
    return metrics


def _family(kind: type[Any], name: str, text: str, key: str, value: Any) -> Metric:
    if isinstance(value, Mapping):
        family = kind(name, text, labels=[LABELS.get(key, "kind")])
        for label, number in value.items():
            family.add_metric([str(label)], float(number))
        return family  # type: ignore[no-any-return]
    return kind(name, text, value=float(value))  # type: ignore[no-any-return]
