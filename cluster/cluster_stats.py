"""One set of numbers from the schedulers of many workers, lost ones included.

Owns which numbers add up and which do not. The keys are those of `Scheduler.snapshot`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

COUNTERS = (
    "steps",
    "scheduled_tokens",
    "sampled_tokens",
    "step_seconds",
    "cache_hit_tokens",
    "cache_query_tokens",
    "recomputed_tokens",
    "block_steps",
    "blocks_demoted",
    "blocks_promoted",
    "preemptions",
    "finished",
)
"""Never fall, so a worker's stay in the sum after it is lost."""
GAUGES = (
    "running",
    "waiting",
    "swapped",
    "blocks_total",
    "blocks_used",
    "blocks_cached",
    "blocks_free",
    "host_blocks_total",
    "host_blocks_used",
    "host_blocks_cached",
)
"""Of the workers that serve now; they add up."""
MAXIMA = ("block_size", "max_step_tokens", "waste", "peak_blocks", "peak_wasted_slots", "peak_waste")
"""Of the workers that serve now; the cluster's is the largest of theirs."""


def total(live: Iterable[Mapping[str, Any]], lost: Iterable[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """Snapshots of workers that serve and last snapshots of those that are lost, as one snapshot."""
    live, lost = list(live), list(lost)
    totals: dict[str, Any] = {
        key: _sum(snapshot.get(key, 0) for snapshot in (*live, *lost)) for key in COUNTERS
    }
    totals |= {key: _sum(snapshot.get(key, 0) for snapshot in live) for key in GAUGES}
    totals |= {key: max((snapshot.get(key, 0) for snapshot in live), default=0) for key in MAXIMA}
    return totals


def _sum(values: Iterable[Any]) -> Any:
    """Numbers add up; mappings add up key by key."""
    result: Any = 0
    for value in values:
        if isinstance(value, Mapping):
            result = result or {}
            for key, number in value.items():
                result[key] = result.get(key, 0) + number
        elif value:
            result += value
    return result
