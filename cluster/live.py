"""What the system is doing now, as one JSON-able object: what the page at /ui shows.

Owns the memory of the last steps of a worker and the shape of the object. Costs a step one small record; block maps are
made only when somebody looks.
"""

from __future__ import annotations

import base64
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo.protos.types import Int32Array, StepPlan, StepResult
from octavo.scheduler.block_pool import BlockState

if TYPE_CHECKING:
    from octavo.scheduler.scheduler import Scheduler

STEPS_MAX = 24
"""Of each worker."""
WORKERS_MAX = 8
"""With their blocks and steps; of others only the counts are told."""
CELLS_MAX = 4096
"""Of one block map: in a larger pool a cell stands for several blocks."""


@dataclass(slots=True)
class _Step:
    step_id: int
    budget_tokens: int
    rows: Int32Array
    num_tokens: Int32Array
    """Of each row: 1 is a decode, unless a prompt's last chunk is."""
    seconds: float | None = None
    """None: under way."""


class LastSteps:
    """Of one worker, oldest first."""

    def __init__(self) -> None:
        self._steps: deque[_Step] = deque(maxlen=STEPS_MAX)

    def on_plan(self, plan: StepPlan, *, budget_tokens: int) -> None:
        if len(plan.rows):
            self._steps.append(_Step(plan.step_id, budget_tokens, plan.rows, plan.num_tokens))

    def on_result(self, result: StepResult) -> None:
        for step in self._steps:
            if step.step_id == result.step_id:
                step.seconds = result.step_seconds

    def describe(self) -> list[dict[str, Any]]:
        """`id`, `budget`, `rows` (a row of the worker is a branch), their `tokens`, `seconds` or None."""
        return [
            {
                "id": step.step_id,
                "budget": step.budget_tokens,
                "rows": step.rows.tolist(),
                "tokens": step.num_tokens.tolist(),
                "seconds": step.seconds,
            }
            for step in self._steps
        ]


def block_map(states: bytes) -> dict[str, Any]:
    """`states` is uint8 [blocks] of `BlockState`. `cells` are such bytes in base64, each of `blocks_per_cell` blocks
    (the last perhaps of fewer): the state that most of its blocks are in. `counts` are exact, by name."""
    found = np.frombuffer(states, np.uint8)
    counts = np.bincount(found, minlength=len(BlockState))
    each = max(1, -(-len(found) // CELLS_MAX))
    cells = found
    if each > 1:
        padded = np.pad(found, (0, -len(found) % each), constant_values=255).reshape(-1, each)
        votes = np.stack([(padded == state).sum(axis=1) for state in BlockState])
        cells = votes.argmax(axis=0).astype(np.uint8)
    return {
        "blocks": len(found),
        "blocks_per_cell": each,
        "cells": base64.b64encode(cells.tobytes()).decode(),
        "counts": {state.name.lower(): int(counts[state]) for state in BlockState},
    }


def describe_worker(scheduler: Scheduler, steps: LastSteps) -> dict[str, Any]:
    """Blocks of the device, of the host (private: swapped out) and the last steps."""
    device, host = scheduler.block_states()
    return {
        "block_size": scheduler.config.block_size,
        "device_blocks": block_map(device),
        "host_blocks": block_map(host),
        "steps": steps.describe(),
    }


TOLD = (
    "running",
    "waiting",
    "swapped",
    "preemptions",
    "sampled_tokens",
    "scheduled_tokens",
    "unfinished",
    "moved",
)
"""Of `Backend.stats`, what the page reads; counters rise, and the page makes rates of them."""


MEANS = ("time_to_first_token", "inter_token_latency")
"""Histograms of each worker, of which their count and sum are told."""


def told_of(stats: Mapping[str, Any]) -> dict[str, Any]:
    """`stats` is a `Backend`'s."""
    means = {
        name: {
            "count": sum(sum(worker[name]["counts"]) for worker in stats["workers"].values()),
            "sum": sum(worker[name]["sum"] for worker in stats["workers"].values()),
        }
        for name in MEANS
    }
    return {**{name: stats[name] for name in TOLD if name in stats}, **means}
