"""What is remembered of a request: its events, where its time went, and how much of it is kept."""

import asyncio
import json

import pytest

from octavo.cluster.timeline import ENTRIES_MAX, Timelines
from octavo.protos.errors import NotFoundError
from octavo.protos.types import FinishReason
from octavo.scheduler.events import (
    Admitted,
    ChunkPlanned,
    Finished,
    Preempted,
    PreemptionKind,
    Queued,
    TokensOut,
)
from octavo.scheduler.router import Routed, Router

from ..scheduler.support import Harness
from ..scheduler.support import make_request as make_scheduled
from .fake_cluster import Cluster
from .support import collect, make_request, run, until


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def timelines(clock):
    return Timelines(clock, wall_clock=lambda: 1000.0)


def names(timeline):
    return [entry["event"] for entry in timeline["events"]]


def finished(name, now, branch=0, last=True):
    return Finished(name, now, branch, FinishReason.STOP, request_finished=last, num_output_tokens=1)


def test_every_second_is_somewhere(timelines, clock):
    request, worker = make_scheduled("r", range(100)), Harness(num_blocks=24).scheduler
    _, routed = Router().route(request, {"w": worker}, 1.0)
    timelines.observe(routed, "w")
    clock.now = 2.5
    waiting = timelines.describe("r")
    assert waiting["status"] == "queued"
    assert waiting["seconds"] == {"total": 1.5, "queued": 1.5, "prefill": 0, "parked": 0, "decode": 0}
    timelines.observe(
        [
            Admitted("r", 3.0, 100, 16),
            ChunkPlanned("r", 3.0, 0, 16, 50, 7),
            ChunkPlanned("r", 3.5, 0, 66, 34, 8),
            TokensOut("r", 4.0, 0, 0, (5,)),
            Preempted("r", 5.0, PreemptionKind.RECOMPUTE, 7, 101, 0.4, None),
        ],
        "w",
    )
    clock.now = 5.25
    timelines.on_migration("r", "its worker was lost", from_worker="w")
    timelines.observe([TokensOut("r", 5.5, 0, 1, (6,)), finished("r", 5.5)], "w")
    timelines.observe([Routed("r", 6.0, "v", ()), Queued("r", 6.0, 1)], "v")
    timelines.observe([Admitted("r", 8.0, 100, 0), TokensOut("r", 9.0, 0, 1, (6,)), finished("r", 9.5)], "v")
    clock.now = 100.0
    told = json.loads(json.dumps(timelines.describe("r")))
    assert told["status"] == "finished"
    assert told["outcome"] == "stop"
    assert told["worker"] == "v"
    assert told["created"] == 1001.0
    assert told["seconds"] == {"total": 8.5, "queued": 2.0, "prefill": 2.0, "parked": 3.0, "decode": 1.5}
    assert told["summary"] == (
        "It ended (stop) after 8.500 s: 3.000 s parked, 2.000 s queued, 2.000 s in prefill, 1.500 s in decode, "
        "with 1 preemption and 1 migration."
    )
    assert names(told) == [
        *("routed", "queued", "admitted", "prefill_chunks", "preempted", "migrated"),
        *("routed", "queued", "admitted", "finished"),
    ]
    (score,) = told["events"][0]["scores"]
    assert score["total_seconds"] == score["ttft_seconds"] + score["load_seconds"] > 0
    chunks = told["events"][3]
    assert (chunks["num_chunks"], chunks["start"], chunks["num_tokens"]) == (2, 16, 84)
    assert (chunks["at"], chunks["last_at"]) == (2.0, 2.5)
    assert told["events"][4]["kind"] == "recompute"
    assert {"recompute_seconds", "swap_seconds"} <= set(told["events"][4])


def test_only_so_much_is_kept(clock):
    timelines = Timelines(clock, bytes_max=100_000)
    for number in range(500):
        timelines.observe([Queued(f"r{number}", 0.0, 1), finished(f"r{number}", 1.0)])
    assert 50 < timelines.num_ended < 100
    assert timelines.describe("r499")["outcome"] == "stop"
    for name in ("r0", "never there"):
        with pytest.raises(NotFoundError, match="is known here"):
            timelines.describe(name)
    timelines.observe([Queued("long", 0.0, 1)])
    for branch in range(2 * ENTRIES_MAX):
        timelines.observe([finished("long", 1.0, branch, last=False)])
    timelines.observe([finished("long", 2.0)])
    told = timelines.describe("long")
    assert len(told["events"]) == ENTRIES_MAX + 1
    assert told["events_omitted"] == ENTRIES_MAX + 1
    assert told["outcome"] == "stop"


def test_the_schedulers_events_add_up_under_pressure():
    """Few blocks: requests wait, are parked and come back; the phases of each sum to its own count of seconds."""
    harness = Harness(num_blocks=24, budget=64)
    timelines = Timelines(lambda: harness.now)
    for number in range(6):
        harness.add(make_scheduled(f"r{number}", range(number, number + 60), max_tokens=60, seed=number))
    harness.run()
    timelines.observe(harness.events)
    preemptions = 0
    for name, ends in harness.ends.items():
        told, metrics = timelines.describe(name), ends[-1].metrics
        assert told["seconds"]["total"] == pytest.approx(metrics.total_seconds)
        assert told["seconds"]["queued"] == pytest.approx(metrics.queue_seconds)
        assert told["preemptions"] == metrics.num_preemptions == names(told).count("resumed")
        preemptions += told["preemptions"]
    assert preemptions


def test_over_the_wire_and_across_a_lost_worker():
    async def test():
        async with Cluster(2, step_seconds=0.004) as cluster:
            backend = await cluster.backend()
            other = await cluster.backend()
            task = asyncio.create_task(collect(backend, make_request("r", max_tokens=60)))
            await until(lambda: cluster.core.stats()["sampled_tokens"] > 10)
            running = await other.timeline("r")
            assert running["status"] == "decode"
            await cluster.kill_worker(running["worker"])
            await task
            told = await other.timeline("r")
            assert told["migrations"] == 1
            assert told["worker"] != running["worker"]
            assert told["outcome"] == "length"
            moved = names(told).index("migrated")
            assert "routed" in names(told)[:moved]
            assert names(told)[moved:][:3] == ["migrated", "routed", "queued"]
            assert len(told["events"][0]["scores"]) == 2
            with pytest.raises(NotFoundError):
                await other.timeline("nobody")
            late = asyncio.create_task(collect(backend, make_request("late", max_tokens=2000)))
            await until(lambda: cluster.core.num_unfinished == 1)
            late.cancel()
            await until(lambda: cluster.core.num_unfinished == 0)
            assert (await other.timeline("late"))["outcome"] in ("abort", "aborted")

    run(test())
