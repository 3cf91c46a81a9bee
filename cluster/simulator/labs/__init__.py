"""Small experiments on the real scheduler, each with figures, three sentences and a plot."""

from __future__ import annotations

from collections.abc import Callable

from octavo.cluster.simulator.labs.lab import LabResult
from octavo.cluster.simulator.labs.memory import block_size, branches, fragmentation, incident
from octavo.cluster.simulator.labs.steps import batching, chunked, crossover, thrash

LABS: dict[str, Callable[[], LabResult]] = {
    "fragmentation": fragmentation,
    "batching": batching,
    "block-size": block_size,
    "chunked": chunked,
    "crossover": crossover,
    "incident": incident,
    "thrash": thrash,
    "branches": branches,
}
