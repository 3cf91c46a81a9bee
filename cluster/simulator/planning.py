"""The smallest fleet that holds an SLO on a trace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from octavo.cluster.simulator.fleet import FleetConfig
from octavo.cluster.simulator.report import Slo, Summary, summarise
from octavo.cluster.simulator.run import simulate
from octavo.cluster.simulator.traces import Trace


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """`answer` is the run of the smallest fleet that was good enough; None: not even the largest was."""

    answer: Summary | None
    tried: tuple[Summary, ...]
    """Every run, in the order in which they were made."""


def smallest_fleet(
    config: FleetConfig,
    trace: Trace,
    slo: Slo,
    *,
    share: float,
    workers_max: int,
    on_run: Callable[[Summary], None] = lambda summary: None,
) -> FleetPlan:
    """Doubles the workers until `share` of all requests are within the SLO, then halves the gap.

    Takes for granted that more workers never serve worse; a fleet that was too small is simulated all the same to its
    end, since how far it falls short is of interest.
    """
    tried: list[Summary] = []

    def run(num_workers: int) -> Summary:
        record = simulate(replace(config, num_workers=num_workers), trace)
        tried.append(summarise(record, slo))
        on_run(tried[-1])
        return tried[-1]

    too_few, count = 0, 1
    while (found := run(count)).slo_share < share:
        if count == workers_max:
            return FleetPlan(None, tuple(tried))
        too_few, count = count, min(workers_max, 2 * count)
    best = found
    while best.workers - too_few > 1:
        middle = (too_few + best.workers) // 2
        found = run(middle)
        if found.slo_share >= share:
            best = found
        else:
            too_few = middle
    return FleetPlan(best, tuple(tried))
