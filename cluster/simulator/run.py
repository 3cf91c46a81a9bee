"""Runs one configuration on one trace, whichever system it names."""

from __future__ import annotations

from collections.abc import Callable

from octavo.cluster.simulator.fleet import FleetConfig, RunRecord, Simulation
from octavo.cluster.simulator.history import system
from octavo.cluster.simulator.static_batching import StaticBatching
from octavo.cluster.simulator.traces import Trace


def simulate(
    config: FleetConfig, trace: Trace, *, on_progress: Callable[[int], None] = lambda done: None
) -> RunRecord:
    """`on_progress(done)` as requests arrive."""
    kind = StaticBatching if system(config.system).static else Simulation
    return kind(config, trace, on_progress=on_progress).run()
