"""The table on Ray's dashboard: every few seconds the families of `/metrics` go into `ray.util.metrics`.

Owns the translation between the two kinds of metric objects. Absolute values come in; Ray's counters take increments,
so what was told last is remembered. Nothing here runs at a step or a token.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from prometheus_client.core import Metric as Family
from ray.util import metrics as ray_metrics

logger = logging.getLogger(__name__)

PUBLISH_SECONDS = 5.0
"""Ray's own agent is asked about as often."""
_TOTAL = "_total"


class RayExporter:
    """Of one process. Ray adds its prefix, the node and the process."""

    def __init__(self) -> None:
        self._metrics: dict[str, Any] = {}
        self._told: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        """Counter values so far, by name and labels."""

    def publish(self, families: Iterable[Family]) -> None:
        """Tell Ray where everything stands now."""
        for family in families:
            for sample in family.samples:
                if family.type == "counter":
                    self._count(family, sample)
                else:
                    # A histogram's samples are gauges to Ray, whose own histograms take one value at a time.
                    self._metric(ray_metrics.Gauge, sample.name, family, sample).set(
                        sample.value, tags=sample.labels
                    )

    def _count(self, family: Family, sample: Any) -> None:
        key = sample.name, tuple(sorted(sample.labels.items()))
        # Less than before: whoever counted has begun anew, and all of it is new.
        before = self._told.get(key, 0.0)
        more = sample.value - before if sample.value >= before else sample.value
        self._told[key] = sample.value
        if more > 0:
            # Ray adds the suffix itself.
            name = sample.name.removesuffix(_TOTAL)
            self._metric(ray_metrics.Counter, name, family, sample).inc(more, tags=sample.labels)

    def _metric(self, kind: Any, name: str, family: Family, sample: Any) -> Any:
        found = self._metrics.get(name)
        if found is None:
            found = self._metrics[name] = kind(name, family.documentation, tag_keys=tuple(sample.labels))
        return found


async def keep_publishing(
    families: Callable[[], Awaitable[Iterable[Family]]], *, interval_seconds: float = PUBLISH_SECONDS
) -> None:
    """Until cancelled. A round that fails is told of once and tried again."""
    exporter = RayExporter()
    failed = False
    while True:
        await asyncio.sleep(interval_seconds)
        try:
            # Not on the loop: thousands of series take Ray milliseconds, and steps wait for nobody's dashboard.
            await asyncio.to_thread(exporter.publish, await families())
            failed = False
        except Exception as error:
            if not failed:
                logger.warning("metrics did not reach Ray: %s: %s", type(error).__name__, error)
            failed = True
