"""One simulated worker: a real Scheduler whose steps take the time that a StepTimeModel says.

Owns the pipeline of plans under way and when each ends. Steps run one after the other, in order, as on a worker; each
commit is followed by as many plans as the scheduler gives.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt

import numpy as np

from octavo.protos.types import StepPlan, StepResult
from octavo.scheduler.events import Event
from octavo.scheduler.scheduler import Scheduler
from octavo.scheduler.step_time import StepTimeModel

TOKEN = 1
"""What every step samples. No request of a simulation ends by a token."""


@dataclass(slots=True)
class _Step:
    """A plan under way."""

    step_id: int
    epoch: int
    num_samples: int
    num_tokens: int
    num_rows: int
    context_tokens: int
    link_seconds: float


class SimulatedWorker:
    """`on_events(events)` hears of all that happens; `on_steps(seconds, count, rows)` of `count` steps of the same
    `rows` samples that took `seconds` together."""

    def __init__(
        self,
        scheduler: Scheduler,
        device: StepTimeModel,
        *,
        on_events: Callable[[list[Event]], None],
        on_steps: Callable[[float, int, int], None],
        collapse: bool = True,
    ) -> None:
        self.scheduler = scheduler
        self.busy_seconds = 0.0
        self._device = device
        self._on_events = on_events
        self._on_steps = on_steps
        self._collapse = collapse
        self._steps: deque[_Step] = deque()
        self._end = 0.0
        """When the first step under way ends."""
        config = scheduler.config
        link = config.host_link_bytes_per_second
        self._block_seconds = config.kv_bytes_per_block / link if link > 0 else 0.0
        self._tokens = np.full(config.max_num_seqs, TOKEN, np.int32)

    @property
    def next_seconds(self) -> float:
        """When something happens here next; infinite for an idle worker."""
        return self._end if self._steps else float("inf")

    def wake(self, now: float) -> None:
        """A request has come: an idle worker begins at once."""
        if not self._steps and self._fill(now):
            self._end = now + self._seconds(self._steps[0])

    def run_until(self, now: float) -> None:
        """Take in every step that has ended by `now`."""
        while self._steps and self._end <= now:
            if self._collapse and self._skip(now):
                continue
            step, end = self._steps.popleft(), self._end
            seconds = self._seconds(step)
            self.busy_seconds += seconds
            result = StepResult(
                step_id=step.step_id,
                epoch=step.epoch,
                token_ids=self._tokens[: step.num_samples],
                step_seconds=seconds,
                parts_seconds={"swap": step.link_seconds},
            )
            if step.num_samples:
                self._on_steps(seconds, 1, step.num_samples)
            self._on_events(self.scheduler.commit(result, end))
            self._fill(end)
            if self._steps:
                self._end = end + self._seconds(self._steps[0])

    def _fill(self, now: float) -> bool:
        while (plan := self.scheduler.plan(now)) is not None:
            self._steps.append(self._step(plan))
        return bool(self._steps)

    def _step(self, plan: StepPlan) -> _Step:
        tokens = int(plan.num_tokens.sum())
        moved = len(plan.swaps_in) + len(plan.swaps_out)
        return _Step(
            plan.step_id,
            plan.epoch,
            len(plan.sample_rows),
            tokens,
            len(plan.rows),
            int(plan.start_positions.sum()) + tokens,
            moved * self._block_seconds,
        )

    def _seconds(self, step: _Step) -> float:
        seconds = step.link_seconds
        if step.num_rows:
            seconds += self._device.step_seconds(
                num_tokens=step.num_tokens, num_rows=step.num_rows, context_tokens=step.context_tokens
            )
        return seconds

    def _skip(self, now: float) -> bool:
        """Take in at once the steps up to `now` in which the scheduler has nothing to decide, if there are any."""
        step = self._steps[0]
        if step.num_tokens != step.num_rows:
            return False
        first = self._seconds(step)
        stretch = self.scheduler.stretch()
        if stretch is None or any(one.link_seconds for one in self._steps):
            return False
        # The i-th step from now takes first + i * more seconds, as each branch reads one token more.
        more = self._device.coefficients[3] * step.num_rows
        room = now - self._end
        half = first + more / 2
        count = int(room / first if more == 0 else (sqrt(half * half + 2 * more * room) - half) / more)
        count = min(count + 1, stretch.max_steps)
        while count > 0 and _sum(first, more, count) - first > room:
            count -= 1
        if count < 1:
            return False
        self.scheduler.skip(stretch, count, TOKEN)
        spent = _sum(first, more, count)
        self._on_steps(spent, count, stretch.num_rows)
        self.busy_seconds += spent
        for one in self._steps:
            one.step_id += count
            one.context_tokens += count * stretch.num_rows
        self._end += _sum(first, more, count + 1) - first
        return True


def _sum(first: float, more: float, count: int) -> float:
    """first + (first + more) + ..., `count` terms."""
    return count * first + more * count * (count - 1) / 2
