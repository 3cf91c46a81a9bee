"""The checklist: each piece of advice comes when it should, says why and what to do, and goes when it is mended."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace

import pytest

from octavo.cluster.advice import setup_advice
from octavo.cluster.backend import HealthReport, HealthStatus
from octavo.cluster.guards import PREFIX_TOKENS, REPEATS_MIN, Guards
from octavo.cluster.service import Service
from octavo.cluster.service_config import ServiceConfig
from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.events import Preempted, PreemptionKind
from octavo.scheduler.scheduler import Scheduler
from octavo.scheduler.step_time import StepTimeModel

from .fake_cluster import Cluster
from .support import collect, make_request, run, until


def scheduler(**options) -> Scheduler:
    """1 ms a step and 0.1 ms a token."""
    return Scheduler(
        SchedulerConfig(num_blocks=64, **options), StepTimeModel.of_coefficients(1e-3, 1e-4, 0.0, 0.0)
    )


def codes(advice) -> list[str]:
    return [one.code for one in advice]


@pytest.mark.parametrize(("block_size", "word"), [(8, "small"), (24, "large"), (64, "large")])
def test_block_sizes_beside_16_and_32(block_size, word):
    (one,) = ServiceConfig(block_size=block_size).setup_advice()
    assert (one.code, one.remedy) == ("block_size", "set block_size to 16 or 32")
    assert f"block_size is {block_size}, and {word} blocks" in one.reason
    assert not ServiceConfig(block_size=16).setup_advice()
    assert not ServiceConfig(block_size=32).setup_advice()


def test_utilisation_above_0_95():
    config = ServiceConfig(gpu_memory_utilization=0.97, allow_high_gpu_memory_utilization=True)
    (one,) = config.setup_advice()
    assert "0.97" in one.reason
    assert one.remedy == "set gpu_memory_utilization to at most 0.95"
    assert not ServiceConfig(gpu_memory_utilization=0.95).setup_advice()


def test_repeated_prefixes_while_the_prefix_cache_is_off():
    prompt = list(range(5, 5 + PREFIX_TOKENS + 10))
    off = Guards(prefix_cache=False)
    for number in range(REPEATS_MIN):
        off.on_request(make_request(f"r{number}", prompt))
    for number in range(100):
        off.on_request(make_request(f"short {number}", prompt[:20]))
        off.on_request(make_request(f"other {number}", [number, *prompt]))
    assert not off.look({}, 0.0), "one less than is worth a word"
    off.on_request(make_request("one more", prompt))
    (one,) = off.look({}, 0.0)
    assert f"prefix_cache is off, and {REPEATS_MIN} of {REPEATS_MIN + 101} prompts" in one.reason
    assert one.remedy == "set prefix_cache to true"
    on = Guards(prefix_cache=True)
    for number in range(2 * REPEATS_MIN):
        on.on_request(make_request(f"r{number}", prompt))
    assert not on.look({}, 0.0)


def test_a_budget_that_does_not_fit_the_itl_target():
    guards = Guards()
    (one,) = guards.look({"worker-0": scheduler(max_num_batched_tokens=1000, itl_target=0.05)}, 0.0)
    assert "max_num_batched_tokens (1000) takes worker-0 0.101 s, and itl_target is 0.05 s" in one.reason
    assert one.remedy == "set max_num_batched_tokens to at most 490, or itl_target to at least 0.1"
    (one,) = guards.look({"worker-0": scheduler(itl_target=0.0005)}, 0.0)
    assert "not one token fits" in one.remedy
    for good in (scheduler(max_num_batched_tokens=490, itl_target=0.05), scheduler()):
        assert not guards.look({"worker-0": good}, 0.0)


def test_preemptions_in_the_last_minute_and_no_longer(caplog):
    guards = Guards()
    event = Preempted("r", 1.0, PreemptionKind.RECOMPUTE, 3, 40, 0.1)
    guards.on_events([event, event], now=10.0)
    guards.on_events([event], now=30.0)
    with caplog.at_level(logging.WARNING):
        (one,) = guards.look({}, 31.0)
        guards.look({}, 32.0)
    assert "preempted 3 times in the last minute" in one.reason
    assert "max_num_seqs" in one.remedy
    assert len(caplog.records) == 1, "told once"
    assert guards.num_preempted(71.0) == 1
    assert not guards.look({}, 90.0)


def test_the_coordinator_tells_its_health_and_its_stats():
    """Too few blocks, and the same prompt again and again: the advice reaches whoever asks over the wire."""

    async def test():
        options = {"prefix_cache": False, "preemption": "recompute"}
        advice = setup_advice(block_size=8, gpu_memory_utilization=0.5)
        async with Cluster(
            info={"num_blocks": 40}, scheduler_options=options, setup_advice=advice
        ) as cluster:
            backend = await cluster.backend()
            await until(lambda: codes(cluster.core.health().advice) == ["block_size"])
            tasks = []
            for number in range(REPEATS_MIN + 1):
                request = make_request(f"r{number}", [7] * 70, max_tokens=60, ignore_eos=True)
                tasks.append(asyncio.create_task(collect(backend, request)))
            await asyncio.gather(*tasks)
            report = await backend.health()
            assert codes(report.advice) == ["block_size", "prefix_cache", "preemptions"]
            assert report.advice[0] == advice[0]
            assert (await backend.stats())["preemptions_last_minute"] > 0

    run(test())


def test_octavo_serve_logs_advice_when_it_first_holds(caplog):
    service = Service(ServiceConfig(block_size=8))
    reports = [
        HealthReport(status=HealthStatus.READY, advice=advice)
        for advice in (
            service.config.setup_advice(),
            service.config.setup_advice(),
            (),
            service.config.setup_advice(),
        )
    ]
    service._system = SimpleNamespace(poll=lambda: reports.pop(0))
    with caplog.at_level(logging.WARNING):
        told = []
        for _ in range(4):
            assert service.alive()
            told.append(len(caplog.records))
    assert told == [1, 1, 1, 2]
    assert "block_size is 8, and small blocks" in caplog.text
    assert "set block_size to 16 or 32" in caplog.text
