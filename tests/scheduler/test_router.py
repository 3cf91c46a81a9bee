"""Policies of the router, and that what it predicts is what the worker finds."""

from __future__ import annotations

import random

import numpy as np
import pytest

from octavo.protos.errors import ConfigError
from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.events import Admitted
from octavo.scheduler.load import Load
from octavo.scheduler.router import ROUTER_POLICIES, SCORES_MAX, Router
from octavo.scheduler.scheduler import Scheduler
from octavo.scheduler.start_time import may_lack_room, predict
from octavo.scheduler.step_time import StepTimeModel

from .support import Harness, make_request

STEP = (0.01, 1e-4, 1e-4, 1e-7)


def fleet_of(n: int, *, num_blocks: int = 60, **config) -> dict[str, Harness]:
    fleet = {f"w{i}": Harness(num_blocks=num_blocks, block_size=4, budget=32, **config) for i in range(n)}
    for h in fleet.values():
        h.scheduler.step_time.coefficients = STEP
        h.scheduler.step_time.observe = lambda **_: None
    return fleet


def route(router: Router, fleet: dict[str, Harness], request) -> str:
    chosen, events = router.route(request, {name: h.scheduler for name, h in fleet.items()}, 0.0)
    fleet[chosen].requests[request.request_id] = request
    fleet[chosen].limits[request.request_id] = request.params.max_tokens
    fleet[chosen].events += events
    return chosen


def run_all(fleet: dict[str, Harness]) -> None:
    for h in fleet.values():
        h.run()


def test_an_unknown_policy_is_refused():
    with pytest.raises(ConfigError) as caught:
        Router(policy="best")
    assert caught.value.param == "router_policy"


def test_round_robin_takes_turns():
    router, fleet = Router(policy="round_robin"), fleet_of(3)
    chosen = [route(router, fleet, make_request(f"r{i}", [1, 2, 3], max_tokens=2)) for i in range(7)]
    assert chosen == ["w0", "w1", "w2", "w0", "w1", "w2", "w0"]


def test_least_loaded_counts_branches():
    router, fleet = Router(policy="least_loaded"), fleet_of(2)
    first = route(router, fleet, make_request("a", [1], max_tokens=2, n=3))
    others = {route(router, fleet, make_request(f"r{i}", [1], max_tokens=2)) for i in range(3)}
    assert others == {"w0", "w1"} - {first}


def test_prefix_goes_where_most_is_cached_however_long_the_queue_is():
    router, fleet = Router(policy="prefix"), fleet_of(3)
    home = route(router, fleet, make_request("a", range(40), max_tokens=2))
    run_all(fleet)
    again = {route(router, fleet, make_request(f"r{i}", range(40), max_tokens=2)) for i in range(9)}
    assert again == {home}


def test_a_hot_prefix_spreads_when_waiting_costs_more_than_computing():
    router, fleet = Router(), fleet_of(3, num_blocks=500)
    home = route(router, fleet, make_request("a", range(100), max_tokens=2))
    run_all(fleet)
    chosen = [
        route(router, fleet, make_request(f"r{i}", [*range(90), *[1000 + i] * 30], max_tokens=2))
        for i in range(30)
    ]
    assert chosen[0] == home
    assert set(chosen) == set(fleet), "nobody waits where computing again is sooner"
    # What it costs to compute again is far more than one waits for a few cached ones.
    assert chosen.count(home) > len(chosen) / len(fleet)
    run_all(fleet)
    # Now all have it.
    assert len({route(router, fleet, make_request(f"s{i}", range(90), max_tokens=2)) for i in range(3)}) == 3


@pytest.mark.parametrize("policy", ROUTER_POLICIES)
@pytest.mark.parametrize("seed", range(3))
def test_predicted_and_realised_cached_tokens_are_equal(policy, seed):
    """What a score says is cached is what the worker finds when it admits the request in its next plan."""
    rng = random.Random(seed)
    router = Router(seed, policy=policy)
    fleet = fleet_of(4, num_host_blocks=20, kv_bytes_per_block=1, host_link_bytes_per_second=1e9)
    hits = 0
    for i in range(60):
        prompt = [n // 7 for n in range(rng.randint(1, 70))] + [rng.randint(1, 3)] * rng.randint(1, 12)
        chosen, events = router.route(
            make_request(f"r{i}", prompt, max_tokens=rng.randint(1, 9)),
            {name: h.scheduler for name, h in fleet.items()},
            0.0,
        )
        assert len(events[0].scores) == min(SCORES_MAX, len(fleet))
        assert events[0].scores[0].worker_id == chosen
        predicted = events[0].scores[0].cached_tokens
        for score in events[0].scores[1:]:
            exact = fleet[score.worker_id].scheduler.cached_tokens_of(make_request("?", prompt))
            assert 0 <= exact - score.cached_tokens < 4, (
                "whole blocks, and no more than the part of one is missed"
            )
        h = fleet[chosen]
        while h.scheduler.has_work:
            plan = h.scheduler.plan(0.0)
            if plan is not None:
                events += h.scheduler.commit(h.worker.execute(plan), 0.0)
        admitted = next(event for event in events if isinstance(event, Admitted))
        assert admitted.cached_tokens == predicted
        hits += predicted > 0
    assert hits > 10


def test_a_fork_goes_to_the_worker_that_runs_its_parent():
    router, fleet = Router(), fleet_of(4)
    parent = route(router, fleet, make_request("p", range(50), max_tokens=20, cache=False))
    for _ in range(4):
        fleet[parent].step()
    request = make_request("c", range(50), max_tokens=2, cache=False, fork_of="p")
    assert route(router, fleet, request) == parent


def test_a_worker_that_joins_brings_its_prefixes_and_one_that_leaves_takes_them():
    router, fleet = Router(policy="prefix"), fleet_of(3)
    late = fleet["w2"]
    late.add(make_request("a", range(40), max_tokens=2))
    late.run()
    first_two = {name: fleet[name] for name in ("w0", "w1")}
    route(router, first_two, make_request("b", range(40), max_tokens=2))
    assert route(router, fleet, make_request("c", range(40), max_tokens=2)) == "w2"
    assert route(router, first_two, make_request("d", range(40), max_tokens=2)) != "w2"
    run_all(fleet)
    router.adopt({})
    assert router.index_bytes == 0


def test_one_step_time_that_is_not_known_yet_neither_draws_nor_repels_everybody():
    known = StepTimeModel.of_coefficients(*STEP)
    config = SchedulerConfig(num_blocks=100)
    workers = {"known": Scheduler(config, known), "new": Scheduler(config)}
    router = Router()
    chosen = [router.route(make_request(f"r{i}", range(i, i + 9)), workers, 0.0)[0] for i in range(8)]
    assert sorted(chosen) == ["known"] * 4 + ["new"] * 4


def test_what_is_queued_is_promised_to_those_who_come_behind():
    """Nothing is cached yet, but a second of two equal prompts would find the first one's blocks."""
    router, fleet = Router(), fleet_of(3, num_blocks=500)
    home = route(router, fleet, make_request("a", range(100), max_tokens=2))
    _, events = router.route(
        make_request("b", range(100), max_tokens=2), {name: h.scheduler for name, h in fleet.items()}, 0.0
    )
    scores = {score.worker_id: score for score in events[0].scores}
    assert (scores[home].cached_tokens, scores[home].expected_tokens) == (0, 96)
    assert all(score.expected_tokens == 0 for name, score in scores.items() if name != home)
    # A promise ends with the request that made it.
    for h in fleet.values():
        h.scheduler.abort("a", 0.0)
        h.scheduler.abort("b", 0.0)
    _, events = router.route(
        make_request("c", range(100), max_tokens=2), {name: h.scheduler for name, h in fleet.items()}, 0.0
    )
    assert all(score.expected_tokens == 0 for score in events[0].scores)


def loads_of(**columns: list[float]) -> np.ndarray:
    """[workers, columns] of `Load`: four branches decode on each and hold all of 100 blocks, unless said otherwise."""
    defaults = {
        "RUNNING_BRANCHES": 4,
        "USED_BLOCKS": 100,
        "EXCLUSIVE_BLOCKS": 100,
        "MEAN_OUTPUT_TOKENS": 50,
        "NUM_BLOCKS": 100,
        "BLOCK_SIZE": 4,
        "BUDGET_TOKENS": 64,
        "MAX_BRANCHES": 16,
        "FIXED_SECONDS": 0.01,
        "TOKEN_SECONDS": 1e-4,
        "ROW_SECONDS": 1e-4,
        "CONTEXT_SECONDS": 1e-6,
    }
    num = len(next(iter(columns.values())))
    loads = np.zeros((num, len(Load)))
    for name, value in {**defaults, **columns}.items():
        loads[:, Load[name]] = value
    return loads


def test_branches_that_share_a_prefix_each_read_it():
    loads = loads_of(CONTEXT_TOKENS=[400, 4000], NUM_BLOCKS=[1000, 1000])
    zero = np.zeros(2)
    alone, shared = predict(loads, 64, zero, zero, zero).ttft
    steps = 2  # 64 tokens beside four decodes
    assert shared - alone == pytest.approx(steps * 3600 * 1e-6)


def test_room_comes_from_what_is_shared_with_nobody_and_goes_to_what_is_not_there():
    zero = np.zeros(2)
    few, all_own = predict(loads_of(EXCLUSIVE_BLOCKS=[10, 100]), 64, zero, zero, zero).ttft
    assert few > 5 * all_own
    held = np.full(2, 15.0)
    loads = loads_of(EXCLUSIVE_BLOCKS=[100, 100])
    assert may_lack_room(loads, 64).all()
    in_use, free = predict(loads, 64, held, zero, np.array([15.0, 0.0])).ttft
    assert in_use < free
    idle = loads_of(RUNNING_BRANCHES=[0, 0], USED_BLOCKS=[0, 0], EXCLUSIVE_BLOCKS=[0, 0])
    assert predict(idle, 500, zero, zero, zero).ttft.max() < 1.0, "nobody has to end first"
