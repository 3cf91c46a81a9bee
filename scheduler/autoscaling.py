"""How many workers there should be: a pure policy, turned by the coordinator and by the simulator.

What the fleet says of itself comes in with the time, a number and its reason go out. More workers are asked for when a
request that arrives now would wait too long or stand behind too many, when the fleet is nearly full, and when
requests have had to give way for a whole minute; each of these must last, so that a burst asks for nothing. Fewer
are asked for once nothing of that has been so for minutes and the rest would still have room. Between the share at
which workers are added and the one that is aimed at lies the gap that keeps it from going up and down in turns.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from octavo.protos.errors import ConfigError
from octavo.scheduler.router import Outlook

RATE_SECONDS = 15.0
"""Over so long rates are taken: preemptions a minute, and the share of the time that goes into prompts."""
GROWTH_MAX = 2
"""Workers become at most so many times as many at once, and fewer by the same factor."""


_SECONDS = ("wait_target", "up_after", "preempting_after", "down_after", "cooldown_up", "cooldown_down")


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoscalingConfig:
    """Raises `ConfigError` naming the option. Times are in seconds."""

    workers_min: int = 1
    workers_max: int
    wait_target: float = 2.0
    """A request that arrives now should have its first token within so long, its own prompt aside."""
    queued_max: int = 8
    """Branches that may stand before it."""
    busy_max: float = 0.85
    """Above this share of its capacity the fleet is nearly full."""
    busy_target: float = 0.6
    """The share that a changed fleet should have; below `busy_max`."""
    up_after: float = 10.0
    """A long wait, a queue or a full fleet must last so long."""
    preempting_after: float = 60.0
    """So long must requests give way."""
    down_after: float = 300.0
    cooldown_up: float = 10.0
    """After a change, before more workers are asked for."""
    cooldown_down: float = 300.0

    def __post_init__(self) -> None:
        for name in ("workers_min", "workers_max", "queued_max"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} must be an integer of at least 1, got {value!r}", param=name)
        if self.workers_max < self.workers_min:
            raise ConfigError(
                f"workers_max must be at least workers_min ({self.workers_min}), got {self.workers_max}",
                param="workers_max",
            )
        for name in _SECONDS:
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(
                    f"{name} must be a number of seconds above 0, got {getattr(self, name)!r}", param=name
                )
        if not 0 < self.busy_target < self.busy_max <= 1:
            raise ConfigError(
                f"busy_target must be above 0 and below busy_max, which is at most 1; got {self.busy_target!r} "
                f"and {self.busy_max!r}",
                param="busy_target",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetLoad:
    """The fleet at one moment. What a new request would meet is told of the worker where it would start soonest."""

    num_expected: int
    """Workers that should be there, those that load included."""
    num_serving: int
    """Of these."""
    wait_seconds: float
    queued: int
    """Branches that would stand before it."""
    full: float
    """Share of all rows or of all blocks that is in use, whichever is more."""
    prompt_seconds: float
    """A token of a prompt takes so long."""
    prompt_tokens: int
    """Computed so far by all workers together; never falls."""
    preemptions: int
    """So far; never falls."""

    @classmethod
    def of(
        cls,
        outlook: Outlook,
        *,
        num_expected: int,
        num_serving: int,
        prompt_tokens: int,
        preemptions: int,
    ) -> FleetLoad:
        return cls(
            num_expected=num_expected,
            num_serving=num_serving,
            wait_seconds=outlook.wait_seconds,
            queued=outlook.queued_branches,
            full=outlook.full,
            prompt_seconds=outlook.token_seconds,
            prompt_tokens=prompt_tokens,
            preemptions=preemptions,
        )


@dataclass(frozen=True, slots=True)
class Decision:
    num_workers: int
    reason: str


@dataclass(frozen=True, slots=True)
class _Pressure:
    """Something that asks for more workers once it has lasted."""

    name: str
    holds: bool
    after_seconds: float
    num_workers: int
    reason: str


class Autoscaler:
    """`observe` about every second. Same calls, same decisions."""

    def __init__(self, config: AutoscalingConfig) -> None:
        self.config = config
        self._since: dict[str, float] = {}
        """When each pressure that holds began."""
        self._samples: deque[tuple[float, int, int]] = deque()
        """(time, preemptions, prompt tokens) of the last `RATE_SECONDS`."""
        self._num_expected: int | None = None
        self._changed = -math.inf
        """When the number of workers last changed, or one was last missing."""
        self._quiet_since: float | None = None
        """Since when fewer would have been enough."""
        self._peak = 0.0
        """Largest share in use since then."""

    def observe(self, load: FleetLoad, now: float) -> Decision:
        """How many workers there should be, given what is. `now` never falls."""
        config, num = self.config, load.num_expected
        preemptions, prompt_rate = self._rates(load, now)
        if num != self._num_expected or load.num_serving < num:
            self._num_expected, self._changed = num, now
            self._since.clear()
            self._quiet_since = None
        if not config.workers_min <= num <= config.workers_max:
            wanted = min(max(num, config.workers_min), config.workers_max)
            return Decision(
                wanted, f"{num} workers are not within {config.workers_min} to {config.workers_max}"
            )
        if load.num_serving < num:
            return Decision(num, f"{load.num_serving} of {num} workers serve")
        busy = max(load.full, prompt_rate * load.prompt_seconds / num)
        pressures = self._pressures(load, busy, preemptions)
        more = self._more(num, pressures, now)
        if more is not None:
            return more
        return self._fewer(num, any(one.holds for one in pressures), busy, now)

    def _rates(self, load: FleetLoad, now: float) -> tuple[float, float]:
        """(preemptions a minute, prompt tokens a second)"""
        samples = self._samples
        samples.append((now, load.preemptions, load.prompt_tokens))
        while now - samples[0][0] > RATE_SECONDS:
            samples.popleft()
        began, preemptions, tokens = samples[0]
        seconds = now - began
        if seconds <= 0:
            return 0.0, 0.0
        # Counters of a coordinator that was started anew begin again.
        return (
            60.0 * max(0, load.preemptions - preemptions) / seconds,
            max(0, load.prompt_tokens - tokens) / seconds,
        )

    def _pressures(self, load: FleetLoad, busy: float, preemptions: float) -> list[_Pressure]:
        config, num = self.config, load.num_expected
        return [
            _Pressure(
                "wait",
                load.wait_seconds > config.wait_target,
                config.up_after,
                math.ceil(num * load.wait_seconds / config.wait_target)
                if load.wait_seconds < math.inf
                else num + 1,
                f"a request waits {load.wait_seconds:.1f} s for its first token, the target is {config.wait_target:g}",
            ),
            _Pressure(
                "queue",
                load.queued > config.queued_max,
                config.up_after,
                num + 1,
                f"{load.queued} branches are queued at the best worker, the limit is {config.queued_max}",
            ),
            _Pressure(
                "busy",
                busy > config.busy_max,
                config.up_after,
                math.ceil(num * busy / config.busy_target),
                f"{busy:.0%} of the capacity is in use, the limit is {config.busy_max:.0%}",
            ),
            _Pressure(
                "preemptions",
                preemptions > 0,
                config.preempting_after,
                num + 1,
                f"{preemptions:.0f} preemptions a minute for {config.preempting_after:g} s",
            ),
        ]

    def _more(self, num: int, pressures: list[_Pressure], now: float) -> Decision | None:
        """The largest number that a pressure which has lasted asks for."""
        due = []
        for one in pressures:
            if not one.holds:
                self._since.pop(one.name, None)
            elif now - self._since.setdefault(one.name, now) >= one.after_seconds:
                due.append(one)
        if not due or num == self.config.workers_max or now - self._changed < self.config.cooldown_up:
            return None
        worst = max(due, key=lambda one: one.num_workers)
        return Decision(min(worst.num_workers, GROWTH_MAX * num, self.config.workers_max), worst.reason)

    def _fewer(self, num: int, pressed: bool, busy: float, now: float) -> Decision:
        """Once fewer would have been enough all the time: those that would have been enough at the worst moment."""
        config = self.config
        if pressed or self._enough(num, busy) >= num:
            self._quiet_since = None
            return Decision(num, "")
        if self._quiet_since is None:
            self._quiet_since, self._peak = now, 0.0
        self._peak = max(self._peak, busy)
        quiet = now - self._quiet_since
        if quiet < config.down_after or now - self._changed < config.cooldown_down:
            return Decision(num, "")
        return Decision(
            self._enough(num, self._peak),
            f"at most {self._peak:.0%} of the capacity was in use for {quiet:.0f} s",
        )

    def _enough(self, num: int, busy: float) -> int:
        """Of `num` workers, for this share of their capacity, within what a change may be."""
        needed = math.ceil(num * busy / self.config.busy_target)
        return max(needed, math.ceil(num / GROWTH_MAX), self.config.workers_min)
