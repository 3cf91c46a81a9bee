"""A backend's stats as metric families, and metric families as the text of `/metrics`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.utils import floatToGoString

from octavo.cluster.metrics.table import BACKEND_UP, METRICS, Kind, Metric, Scope

__all__ = ["CONTENT_TYPE_LATEST", "Family", "backend_families", "text"]


def backend_families(stats: Mapping[str, Any] | None) -> list[Family]:
    """The rows of the scopes SYSTEM and WORKER. `stats`: None when the backend did not answer."""
    up = _family(BACKEND_UP)
    up.add_metric([], float(stats is not None))
    families = [up]
    if stats is None:
        return families
    workers = stats.get("workers", {})
    for metric in METRICS:
        if metric.read is None:
            continue
        family = _family(metric)
        if metric.scope is Scope.WORKER:
            for worker_id, worker in workers.items():
                _add(family, metric, [worker_id], metric.read(worker), len(metric.labels))
        else:
            _add(family, metric, [], metric.read(stats), len(metric.labels))
        if family.samples:
            families.append(family)
    return families


def text(families: Iterable[Family]) -> bytes:
    """In Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(_Fixed(families))
    return generate_latest(registry)


def _family(metric: Metric) -> Any:
    kinds = {
        Kind.COUNTER: CounterMetricFamily,
        Kind.GAUGE: GaugeMetricFamily,
        Kind.HISTOGRAM: HistogramMetricFamily,
    }
    labels = (*(("worker",) if metric.scope is Scope.WORKER else ()), *metric.labels)
    return kinds[metric.kind](metric.name, metric.help, labels=labels)


def _add(family: Any, metric: Metric, labels: list[str], value: Any, depth: int) -> None:
    """The samples of `value`, which is a mapping by label as often as `depth` says."""
    if value is None:
        return
    if depth:
        for label, inner in value.items():
            _add(family, metric, [*labels, str(label)], inner, depth - 1)
    elif metric.kind is Kind.HISTOGRAM:
        bounds = [*map(floatToGoString, metric.buckets), floatToGoString(math.inf)]
        family.add_metric(
            labels,
            buckets=list(zip(bounds, accumulate(value["counts"]), strict=True)),
            sum_value=value["sum"],
        )
    else:
        family.add_metric(labels, float(value))


class _Fixed:
    """A collector of families that were made beforehand."""

    def __init__(self, families: Iterable[Family]) -> None:
        self._families = list(families)

    def collect(self) -> Iterator[Family]:
        return iter(self._families)
