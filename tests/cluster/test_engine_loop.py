"""The in-process driver over the fake worker: delivery, aborts from any thread, failure, closing."""

from __future__ import annotations

import asyncio
import queue
import threading

import pytest

from octavo.cluster.backend import HealthStatus
from octavo.cluster.engine_backend import EngineBackend
from octavo.cluster.engine_loop import EngineLoop
from octavo.protos.errors import RequestTooLargeError, UnavailableError
from octavo.protos.types import FinishReason, ModelInfo
from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.scheduler import Scheduler
from tests.scheduler.fake_worker import FakeWorker, expected_tokens
from tests.scheduler.support import make_request


class Executor(FakeWorker):
    def __init__(self, *args):
        super().__init__(*args)
        self.gate = threading.Event()
        self.gate.set()
        self.broken = False

    def execute(self, plan, **kwargs):
        assert self.gate.wait(10)
        if self.broken:
            raise RuntimeError("the device is gone")
        return super().execute(plan, **kwargs)

    def check_integrity(self):
        assert not self.rows


@pytest.fixture
def parts():
    executor = Executor(50, 16, 16, 64)
    config = SchedulerConfig(num_blocks=50, max_num_seqs=16, max_num_batched_tokens=64, pipeline_depth=1)
    loop = EngineLoop(Scheduler(config), executor)
    yield loop, executor
    executor.gate.set()
    loop.close()


def drain(deltas):
    found = []
    while True:
        found.append(deltas.get(timeout=10))
        if found[-1].request_finished:
            return found


def test_requests_of_many_threads_share_batches_and_get_their_own_tokens(parts):
    loop, _ = parts
    requests = [make_request(f"r{i}", range(i, i + 30), max_tokens=40, n=1 + i % 2, seed=i) for i in range(8)]
    results = {}

    def run(request):
        deltas: queue.SimpleQueue = queue.SimpleQueue()
        loop.submit(request, deltas.put)
        results[request.request_id] = drain(deltas)

    threads = [threading.Thread(target=run, args=(request,)) for request in requests]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for request in requests:
        for branch in range(request.params.n):
            mine = [delta for delta in results[request.request_id] if delta.branch == branch]
            assert [token for delta in mine for token in delta.token_ids] == expected_tokens(
                request, branch, 40
            )
            assert mine[-1].finish_reason is FinishReason.LENGTH
        assert results[request.request_id][-1].metrics is not None
    loop.check_integrity()
    assert loop.snapshot()["blocks_used"] == 0


def test_abort_while_a_step_runs(parts):
    loop, executor = parts
    executor.gate.clear()
    deltas: queue.SimpleQueue = queue.SimpleQueue()
    loop.submit(make_request("r", range(30), max_tokens=40), deltas.put)
    loop.abort("r")
    executor.gate.set()
    last = drain(deltas)[-1]
    assert last.finish_reason is FinishReason.ABORT
    loop.abort("r")
    deadline = threading.Event()
    for _ in range(100):
        if loop.snapshot()["blocks_used"] == 0 and not executor.rows:
            break
        deadline.wait(0.02)
    loop.check_integrity()


def test_refusals_reach_the_caller_and_nobody_else(parts):
    loop, _ = parts
    with pytest.raises(RequestTooLargeError):
        loop.submit(make_request("big", range(2000), max_tokens=1), lambda delta: None)
    deltas: queue.SimpleQueue = queue.SimpleQueue()
    loop.submit(make_request("small", range(9), max_tokens=2), deltas.put)
    assert drain(deltas)[-1].finish_reason is FinishReason.LENGTH


def test_a_broken_step_ends_every_request_with_an_error(parts):
    loop, executor = parts
    executor.broken = True
    deltas: queue.SimpleQueue = queue.SimpleQueue()
    loop.submit(make_request("r", range(9), max_tokens=2), deltas.put)
    last = drain(deltas)[-1]
    assert last.finish_reason is FinishReason.ERROR
    assert "the device is gone" in last.error
    with pytest.raises(UnavailableError, match="the device is gone"):
        loop.submit(make_request("s", range(9), max_tokens=2), deltas.put)


def test_close_ends_what_is_unfinished(parts):
    loop, executor = parts
    executor.gate.clear()
    deltas: queue.SimpleQueue = queue.SimpleQueue()
    loop.submit(make_request("r", range(9), max_tokens=30), deltas.put)
    closer = threading.Thread(target=loop.close)
    closer.start()
    executor.gate.set()
    closer.join(10)
    assert drain(deltas)[-1].error is not None
    with pytest.raises(UnavailableError, match="closed"):
        loop.submit(make_request("s", range(9)), deltas.put)


def test_backend_aborts_when_its_iterator_is_closed(parts):
    loop, _ = parts
    backend = EngineBackend(loop, ModelInfo(name="fake", vocab_size=1000, max_model_len=800))

    async def run():
        stream = backend.submit(make_request("r", range(9), max_tokens=500))
        first = await stream.__anext__()
        assert first.token_ids
        await stream.aclose()
        for _ in range(200):
            if (await backend.stats())["running"] == 0:
                break
            await asyncio.sleep(0.01)
        assert (await backend.stats())["blocks_used"] == 0
        tokens = []
        request = make_request("s", range(9), max_tokens=5)
        async for delta in backend.submit(request):
            tokens += delta.token_ids
        assert tokens == expected_tokens(request, 0, 5)
        assert (await backend.health()).status is HealthStatus.READY

    asyncio.run(run())


def test_the_backend_tells_a_requests_timeline(parts):
    loop, _ = parts
    backend = EngineBackend(loop, ModelInfo(name="fake", vocab_size=1000, max_model_len=800))

    async def scenario():
        deltas = [delta async for delta in backend.submit(make_request("r", range(100), max_tokens=4))]
        return deltas[-1].metrics, await backend.timeline("r")

    metrics, told = asyncio.run(scenario())
    assert [entry["event"] for entry in told["events"]] == [
        *("queued", "admitted", "prefill_chunks", "finished"),
    ]
    assert told["events"][2]["num_tokens"] == 100
    assert told["events"][2]["num_chunks"] == 2
    assert told["outcome"] == "length"
    assert told["seconds"]["total"] == pytest.approx(metrics.total_seconds, abs=1e-5)
