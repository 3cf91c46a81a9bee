"""The autoscaling policy: what it asks for and when, and what holds for any load."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.protos.errors import ConfigError
from octavo.scheduler.autoscaling import Autoscaler, AutoscalingConfig, FleetLoad

CONFIG = AutoscalingConfig(workers_min=1, workers_max=8)
IDLE = FleetLoad(
    num_expected=2,
    num_serving=2,
    wait_seconds=0.02,
    queued=0,
    full=0.0,
    prompt_seconds=1e-4,
    prompt_tokens=0,
    preemptions=0,
)
CALM = dataclasses.replace(IDLE, full=0.5)
"""Neither too much nor too little for two workers."""


def load(base: FleetLoad = CALM, **changes) -> FleetLoad:
    return dataclasses.replace(base, **changes)


class Fleet:
    """A policy and a clock; what it asks for is there at once."""

    def __init__(self, config: AutoscalingConfig = CONFIG, num_workers: int = 2) -> None:
        self.policy = Autoscaler(config)
        self.num_workers = num_workers
        self.now = 0.0
        self.changes: list[tuple[float, int, str]] = []

    def spend(self, seconds: int, make=lambda now: CALM) -> None:
        """One look a second."""
        for _ in range(seconds):
            self.now += 1.0
            one = load(make(self.now), num_expected=self.num_workers, num_serving=self.num_workers)
            decision = self.policy.observe(one, self.now)
            if decision.num_workers != self.num_workers:
                self.num_workers = decision.num_workers
                self.changes.append((self.now, decision.num_workers, decision.reason))


@pytest.mark.parametrize(
    ("changes", "wanted", "says"),
    [
        ({"wait_seconds": 2.5}, 3, "a request waits 2.5 s"),
        ({"wait_seconds": 50.0}, 4, "a request waits 50.0 s"),
        ({"queued": 9}, 3, "9 branches are queued"),
        ({"full": 0.9}, 3, "90% of the capacity"),
        ({"wait_seconds": 2.5, "full": 0.95}, 4, "95% of the capacity"),
    ],
)
def test_what_lasts_asks_for_more_and_says_why(changes, wanted, says):
    fleet = Fleet()
    fleet.spend(60)
    fleet.spend(10, lambda now: load(**changes))
    assert fleet.changes == []
    fleet.spend(1, lambda now: load(**changes))
    [(_, num_workers, reason)] = fleet.changes
    assert (num_workers, reason[: len(says)]) == (wanted, says)


def test_a_burst_asks_for_nothing():
    fleet = Fleet()
    fleet.spend(1000, lambda now: load(wait_seconds=9.0) if now % 20 < 9 else CALM)
    assert fleet.changes == []


def test_time_spent_on_prompts_is_capacity_in_use():
    """10,000 tokens a second of 0.1 ms each keep two workers busy by half, 18,000 by nine tenths."""
    fleet = Fleet()
    fleet.spend(120, lambda now: load(prompt_tokens=int(10_000 * now)))
    assert fleet.changes == []
    fleet.spend(60, lambda now: load(prompt_tokens=int(1_200_000 + 18_000 * (now - 120))))
    assert fleet.changes[0][1] == 3
    assert "of the capacity" in fleet.changes[0][2]


def test_more_than_zero_preemptions_for_a_minute_ask_for_more():
    fleet = Fleet()
    fleet.spend(60)
    fleet.spend(58, lambda now: load(preemptions=int(now / 5)))
    assert fleet.changes == []
    fleet.spend(10, lambda now: load(preemptions=int(now / 5)))
    [(at, num_workers, reason)] = fleet.changes
    assert num_workers == 3
    assert 120 <= at <= 125
    assert "12 preemptions a minute" in reason


def test_one_preemption_asks_for_nothing():
    fleet = Fleet()
    fleet.spend(300, lambda now: load(preemptions=int(now >= 60)))
    assert fleet.changes == []


def test_nothing_is_asked_for_while_a_worker_is_missing():
    policy = Autoscaler(CONFIG)
    for now in range(500):
        decision = policy.observe(load(num_serving=1, wait_seconds=60.0, full=1.0), float(now))
        assert decision.num_workers == 2
    assert decision.reason == "1 of 2 workers serve"


def test_an_idle_fleet_shrinks_step_by_step_to_its_least():
    fleet = Fleet(num_workers=8)
    fleet.spend(2000, lambda now: IDLE)
    assert [num_workers for _, num_workers, _ in fleet.changes] == [4, 2, 1]
    times = [at for at, _, _ in fleet.changes]
    assert all(b - a >= CONFIG.cooldown_down for a, b in itertools.pairwise(times))


def test_the_busiest_moment_counts_for_how_many_may_go():
    fleet = Fleet(num_workers=8)
    fleet.spend(400, lambda now: load(full=0.5 if now == 200 else 0.1))
    assert [num_workers for _, num_workers, _ in fleet.changes] == [7]


def test_a_number_outside_the_limits_is_put_right_at_once():
    config = dataclasses.replace(CONFIG, workers_min=3, workers_max=5)
    for num, wanted in ((1, 3), (9, 5)):
        assert Autoscaler(config).observe(load(num_expected=num, num_serving=num), 0.0).num_workers == wanted


demands = st.lists(st.tuples(st.integers(30, 400), st.floats(0.0, 12.0)), min_size=1, max_size=6)
"""Stretches of time, and the work that comes in them, in workers."""


def spend_demand(fleet: Fleet, seconds: int, demand: float) -> None:
    def look(now: float) -> FleetLoad:
        share = demand / fleet.num_workers
        return load(
            IDLE,
            full=min(1.0, share),
            queued=20 if share > 1 else 0,
            wait_seconds=0.02 if share <= 1 else 4 * share,
        )

    fleet.spend(seconds, look)


@settings(max_examples=40)
@given(demands, st.integers(1, 8))
def test_whatever_comes_the_number_keeps_its_limits_and_cooldowns_and_is_repeatable(demands, num_workers):
    fleets = [Fleet(num_workers=num_workers) for _ in range(2)]
    for fleet in fleets:
        for seconds, demand in demands:
            spend_demand(fleet, seconds, demand)
    assert fleets[0].changes == fleets[1].changes
    before = [(0.0, num_workers), *((at, num) for at, num, _ in fleets[0].changes)]
    for (last, old), (at, new, reason) in zip(before, fleets[0].changes, strict=False):
        assert CONFIG.workers_min <= new <= CONFIG.workers_max
        assert -(-old // 2) <= new <= 2 * old
        assert at - last >= (CONFIG.cooldown_up if new > old else CONFIG.cooldown_down)
        assert reason


@settings(max_examples=25)
@given(st.floats(0.0, 12.0), st.integers(1, 8))
def test_under_a_steady_load_it_settles_and_stays(demand, num_workers):
    """At a number that is enough and not twice what is needed, after changes in one direction or one turn."""
    fleet = Fleet(num_workers=num_workers)
    spend_demand(fleet, 2000, demand)
    settled, before = fleet.num_workers, len(fleet.changes)
    spend_demand(fleet, 2000, demand)
    assert (fleet.num_workers, len(fleet.changes)) == (settled, before)
    assert demand / settled <= CONFIG.busy_max or settled == CONFIG.workers_max
    numbers = [num_workers, *(number for _, number, _ in fleet.changes)]
    signs = [b > a for a, b in itertools.pairwise(numbers)]
    assert sum(a != b for a, b in itertools.pairwise(signs)) <= 1


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"workers_max": 0}, "workers_max"),
        ({"workers_max": True}, "workers_max"),
        ({"workers_min": 3, "workers_max": 2}, "workers_max"),
        ({"workers_max": 2, "queued_max": 0}, "queued_max"),
        ({"workers_max": 2, "wait_target": 0.0}, "wait_target"),
        ({"workers_max": 2, "down_after": float("nan")}, "down_after"),
        ({"workers_max": 2, "busy_target": 0.9}, "busy_target"),
        ({"workers_max": 2, "busy_max": 1.5}, "busy_target"),
    ],
)
def test_wrong_options_are_named(options, param):
    with pytest.raises(ConfigError) as error:
        AutoscalingConfig(**options)
    assert error.value.param == param
