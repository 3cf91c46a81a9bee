"""Swap: the same tokens as ever, both prices in the event, and nothing left in the host pool."""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import replace

import pytest

from octavo.protos.errors import ConfigError, RequestTooLargeError
from octavo.protos.types import FinishReason
from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.events import Admitted, Preempted, PreemptionKind, Resumed
from octavo.scheduler.plan_builder import PlanBuilder

from .support import Harness, make_request

SWAP = {"num_host_blocks": 200, "kv_bytes_per_block": 1000, "host_link_bytes_per_second": 1e6}


def loaded(n=1, num_blocks=24, **config) -> Harness:
    h = Harness(num_blocks=num_blocks, **config)
    for i in range(8):
        h.add(make_request(f"r{i}", range(40 * i, 40 * i + 40), max_tokens=100 // n, seed=i, n=n))
    return h


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_d01_swap_is_invisible(depth, n, prefix_cache):
    h = loaded(n, depth=depth, preemption="swap", prefix_cache=prefix_cache, **SWAP)
    h.run()
    parked = [e for e in h.events if isinstance(e, Preempted)]
    assert parked
    assert {e.kind for e in parked} == {PreemptionKind.SWAP}
    assert sum(len(plan.swaps_out) for plan in h.plans) >= sum(len(plan.swaps_in) for plan in h.plans) > 0
    assert h.count(Resumed) == len(parked)
    assert h.scheduler.snapshot()["host_blocks_used"] == 0
    assert h.scheduler.snapshot()["recomputed_tokens"] == 0
    assert max(end[-1].metrics.num_preemptions for end in h.ends.values()) <= 10


def test_a_full_host_pool_falls_back_to_recompute_and_the_event_says_so():
    h = loaded(preemption="swap", **{**SWAP, "num_host_blocks": 3})
    h.run()
    kinds = [(e.kind, e.swap_seconds is None) for e in h.events if isinstance(e, Preempted)]
    assert (PreemptionKind.RECOMPUTE, True) in kinds


@pytest.mark.parametrize(("bandwidth", "kind"), [(1e9, PreemptionKind.SWAP), (1e3, PreemptionKind.RECOMPUTE)])
def test_auto_takes_the_cheaper_way_and_tells_both_prices(bandwidth, kind):
    h = loaded(**{**SWAP, "host_link_bytes_per_second": bandwidth})
    h.run()
    # The first steps teach what a prefill costs; from then on the ratio of prices decides.
    parked = [e for e in h.events if isinstance(e, Preempted)]
    assert parked
    for event in parked:
        assert event.kind is kind
        assert (event.swap_seconds < event.recompute_seconds) == (kind is PreemptionKind.SWAP)
        assert event.swap_seconds == pytest.approx(2 * event.freed_blocks * 1000 / bandwidth)


def test_shared_blocks_are_neither_charged_nor_moved():
    h = Harness(num_blocks=30, preemption="swap", **SWAP)
    for i in range(8):
        h.add(make_request(f"r{i}", [*range(64), *range(500 + 10 * i, 510 + 10 * i)], max_tokens=80, seed=i))
    h.run()
    parked = [e for e in h.events if isinstance(e, Preempted)]
    assert parked
    moved = sum(len(plan.swaps_out) for plan in h.plans)
    assert moved == sum(e.freed_blocks for e in parked)
    assert all(len(plan.swaps_out) <= 30 - 4 for plan in h.plans)


def test_abort_of_a_swapped_request_frees_its_host_blocks():
    h = loaded(preemption="swap", **SWAP)
    while not h.count(Preempted):
        h.step()
    victim = next(e.request_id for e in h.events if isinstance(e, Preempted))
    h.take(h.scheduler.abort(victim, h.now))
    h.run()
    assert h.ends[victim][0].reason is FinishReason.ABORT
    assert h.scheduler.snapshot()["host_blocks_used"] == 0


def test_youngest_first_when_asked():
    h = loaded(preemption="swap", victims="youngest", **SWAP)
    h.run()
    assert next(e.request_id for e in h.events if isinstance(e, Preempted)) != "r0"


def test_config_of_swap():
    with pytest.raises(ConfigError, match="host_blocks"):
        SchedulerConfig(num_blocks=8, preemption="swap")
    with pytest.raises(ConfigError, match="victims"):
        SchedulerConfig(num_blocks=8, victims="oldest")


def test_a_row_given_up_in_a_plan_is_told_nothing_in_it():
    """A duplicate block may give way in the very plan that then parks its holder."""
    plan = PlanBuilder([])
    for update in [(3, 0, 7), (1, 5, 3), (3, 1, 8), (1, 6, 4)]:
        plan.update_block(*update)
    plan.forget_row(3)
    assert plan.build(1, 1)[0].block_updates.tolist() == [[1, 5, 3], [1, 6, 4]]


def test_seconds_of_swaps_are_no_property_of_tokens():
    h = Harness(num_blocks=8)
    h.add(make_request("r", range(40), max_tokens=3))
    h.plan()
    result = h.worker.execute(h.pending.pop(0), seconds=5.0)
    h.take(h.scheduler.commit(replace(result, parts_seconds={"swap": 4.9, "forward": 0.1}), 1.0))
    learnt = h.scheduler.step_time.step_seconds(num_tokens=40, num_rows=1, context_tokens=40)
    assert 0 < learnt <= 0.1 + 1e-9


@pytest.mark.parametrize("seed", [41, 58, 72, 75, 92, 101, 0, 1, 2])
def test_nobody_overtakes_the_parked(seed):
    """Some are swapped, some wait to be computed again, new ones queue behind: the oldest of them start first.

    In the first six lives an older waiting one and a younger one once stood around a swapped one.
    """
    rng = random.Random(seed)
    num_blocks, num_host_blocks = rng.choice([12, 16, 24, 40]), rng.choice([3, 5, 8, 12])
    swap = {**SWAP, "num_host_blocks": num_host_blocks}
    h = Harness(num_blocks=num_blocks, budget=rng.choice([64, 512]), preemption="swap", **swap)
    for i in range(16):
        request = make_request(
            f"r{i:02}",
            range(40 * i, 40 * i + rng.randint(4, 40)),
            max_tokens=rng.randint(5, 100),
            seed=i,
            n=rng.choice([1, 1, 2]),
        )
        with suppress(RequestTooLargeError):
            h.add(request)
    while h.scheduler.has_work:
        before = len(h.scheduler._life.events)
        outside = [*h.scheduler._life.waiting, *h.scheduler._life.swapped]
        if h.plan():
            events = h.scheduler._life.events[before:]
            started = {e.request_id for e in events if isinstance(e, (Admitted, Resumed))}
            came = [group.order for group in outside if group.request.request_id in started]
            left = [group.order for group in outside if group.request.request_id not in started]
            assert not came or not left or max(came) < min(left)
        else:
            h.commit()
    h.check_idle()
    assert h.count(Preempted)
