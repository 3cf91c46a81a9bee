"""Ingress -> coordinator -> worker and back, over real sockets, without Ray and without a model."""

import asyncio
import collections
from dataclasses import replace

import grpc
import numpy as np
import pytest

from octavo.cluster import coordinator_servicer
from octavo.cluster.backend import HealthStatus
from octavo.cluster.cluster_stats import COUNTERS, GAUGES, MAXIMA, total
from octavo.cluster.coordinator_client import GrpcBackend
from octavo.cluster.coordinator_config import CoordinatorConfig
from octavo.protos import coordinator_pb2, coordinator_pb2_grpc, wire
from octavo.protos.errors import (
    ConfigError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    RequestTooLargeError,
    UnavailableError,
)
from octavo.protos.types import FinishReason, Request, SamplingParams
from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.scheduler import Scheduler

from .fake_cluster import Cluster
from .support import MODEL, collect, expected, make_request, run, until


def test_the_tokens_of_a_request_arrive_in_order_and_complete():
    async def test():
        async with Cluster() as cluster:
            backend = await cluster.backend()
            request = make_request("a", max_tokens=40)
            assert await collect(backend, request) == {0: expected(request)}
            await cluster.idle()

    run(test())


def test_a_branch_that_is_stopped_computes_no_more_and_its_sibling_goes_on():
    async def test():
        async with Cluster(step_seconds=0.002) as cluster:
            backend, other = await cluster.backend(), await cluster.backend()
            request = make_request("a", max_tokens=150, n=2)
            tokens, reasons = {0: [], 1: []}, {}
            async for delta in backend.submit(request):
                assert delta.offset == len(tokens[delta.branch])
                tokens[delta.branch] += delta.token_ids
                if delta.finish_reason is not None:
                    reasons[delta.branch] = delta.finish_reason
                if delta.branch == 0 and len(tokens[0]) == 3:
                    other.stop_branch("a", 1)  # not its request
                    backend.stop_branch("a", 0)
                    backend.stop_branch("a", 0)
                    backend.stop_branch("unknown", 0)
            assert reasons == {0: FinishReason.STOP, 1: FinishReason.LENGTH}
            assert tokens[1] == expected(request, 1)
            assert tokens[0] == expected(request, 0)[: len(tokens[0])]
            await cluster.idle()
            snapshot = cluster.scheduler().snapshot()
            assert snapshot["sampled_tokens"] < 150 + 75
            assert cluster.core.stats()["requests"] == {
                "submitted": 1, "rejected": 0, "finished": 1, "failed": 0, "aborted": 0
            }  # fmt: skip
            # Nothing is unfinished, and nothing happens.
            backend.stop_branch("a", 1)

    run(test())


def test_a_fork_goes_on_from_what_its_parent_has_through_any_ingress():
    async def test():
        async with Cluster(2, step_seconds=0.002) as cluster:
            backend, other = await cluster.backend(), await cluster.backend()
            parent = replace(make_request("parent", max_tokens=100, n=2), cache_salt="tenant")
            stream = backend.submit(parent)
            outputs = []
            async for delta in stream:
                if delta.branch == 1:
                    outputs += delta.token_ids
                if len(outputs) >= 10:
                    break
            found = await other.tokens("parent", 1)
            assert found.token_ids.tolist() == [
                *parent.prompt_token_ids, *expected(parent, 1)[: found.num_output_tokens]
            ]  # fmt: skip
            assert found.num_output_tokens >= 10
            assert (found.num_prompt_tokens, found.cache_salt, found.adapter) == (5, "tenant", "")
            fork = replace(
                make_request("fork", found.token_ids.tolist(), max_tokens=20),
                cache_salt=found.cache_salt,
                fork_of="parent",
            )
            assert await collect(other, fork) == {0: expected(fork)}
            with pytest.raises(InvalidRequestError) as caught:
                await backend.tokens("parent", 2)
            assert caught.value.param == "branch"
            for ended in ("fork", "never"):
                with pytest.raises(NotFoundError) as unknown:
                    await backend.tokens(ended, 0)
                assert unknown.value.param == "request_id"
            await stream.aclose()
            await cluster.idle()

    run(test())


def test_many_requests_of_two_ingresses_on_two_workers():
    async def test():
        async with Cluster(2, budget=64) as cluster:
            backends = [await cluster.backend(), await cluster.backend()]
            requests = [
                make_request(
                    f"r{number}", list(range(1, 2 + 7 * number)), max_tokens=5 + number, n=1 + number % 3
                )
                for number in range(24)
            ]
            outputs = await asyncio.gather(
                *(collect(backends[number % 2], request) for number, request in enumerate(requests))
            )
            for request, tokens in zip(requests, outputs, strict=True):
                assert tokens == {branch: expected(request, branch) for branch in range(request.params.n)}
            assert all(cluster.scheduler(worker_id).snapshot()["steps"] for worker_id in cluster.worker_ids)
            await cluster.idle()

    run(test())


def test_d01_swap_over_the_wire_is_invisible():
    async def test():
        info = {
            "num_blocks": 24,
            "num_host_blocks": 100,
            "host_link_bytes_per_second": 1e6,
            "prefill_tokens_per_second": 1000.0,
        }
        async with Cluster(info=info, scheduler_options={"preemption": "swap"}) as cluster:
            scheduler = cluster.scheduler()
            config = scheduler.config
            assert (config.num_host_blocks, config.kv_bytes_per_block) == (100, 1024)
            assert config.host_link_bytes_per_second == 1e6
            # The worker's calibration prices a prefill before any step has run.
            assert scheduler.step_time.prefill_seconds(500, chunk_tokens=512) == pytest.approx(0.5)
            backend = await cluster.backend()
            requests = [
                make_request(f"r{number}", list(range(1 + 40 * number, 41 + 40 * number)), max_tokens=100)
                for number in range(8)
            ]
            outputs = await asyncio.gather(*(collect(backend, request) for request in requests))
            assert outputs == [{0: expected(request)} for request in requests]
            snapshot = cluster.scheduler().snapshot()
            assert snapshot["preemptions"]["swap"] > 0
            assert snapshot["preemptions"]["recompute"] == 0
            await cluster.idle()
            stats = cluster.core.stats()
            assert (stats["host_blocks_total"], stats["host_blocks_used"], stats["swapped"]) == (100, 0, 0)

    run(test())


def test_tokens_of_one_step_are_one_message_to_each_ingress(monkeypatch):
    """Counted: 16 streams that decode together cost one message a step, not sixteen."""
    messages = collections.Counter()
    dispatch = GrpcBackend._dispatch

    def counting(self, response):
        messages[len(response.outputs.deltas)] += 1
        dispatch(self, response)

    monkeypatch.setattr(GrpcBackend, "_dispatch", counting)

    async def test():
        async with Cluster(step_seconds=0.002) as cluster:
            backend = await cluster.backend()
            cluster.executors["worker-0"].gate.clear()
            tasks = [
                asyncio.create_task(collect(backend, make_request(f"r{number}", max_tokens=50)))
                for number in range(16)
            ]
            await until(lambda: cluster.core.num_unfinished == 16)
            cluster.executors["worker-0"].gate.set()
            await asyncio.gather(*tasks)
            steps = cluster.scheduler().snapshot()["steps"]
            assert sum(messages.values()) <= steps
            assert messages[16] >= 30

    run(test())


class TestRefusals:
    def test_errors_arrive_as_what_they_are(self):
        async def test():
            async with Cluster(info={"num_blocks": 10}) as cluster:
                backend = await cluster.backend()
                with pytest.raises(RequestTooLargeError, match="10"):
                    await collect(backend, make_request("too big", list(range(1, 200))))
                with pytest.raises(InvalidRequestError, match="logit_bias"):
                    await collect(backend, make_request("bias", logit_bias={5000: 1.0}))
                with pytest.raises(InvalidRequestError, match="prompt token ids"):
                    await collect(backend, make_request("ids", [1, MODEL.vocab_size]))
                with pytest.raises(InvalidRequestError, match="prompt token ids"):
                    await collect(backend, make_request("negative", [1, -1]))
                request = make_request("fine")
                assert await collect(backend, request) == {0: expected(request)}
                assert cluster.core.stats()["requests"]["rejected"] == 4

        run(test())

    def test_more_unfinished_requests_than_the_limit(self):
        async def test():
            async with Cluster(unfinished_requests_max=3) as cluster:
                backend = await cluster.backend()
                cluster.executors["worker-0"].gate.clear()
                tasks = [asyncio.create_task(collect(backend, make_request(f"r{n}"))) for n in range(3)]
                await until(lambda: cluster.core.num_unfinished == 3)
                with pytest.raises(OverloadedError) as refusal:
                    await collect(backend, make_request("one more"))
                assert refusal.value.retry_after_seconds > 0
                cluster.executors["worker-0"].gate.set()
                await asyncio.gather(*tasks)
                await collect(backend, make_request("now it fits"))

        run(test())

    def test_no_worker_yet(self):
        async def test():
            async with Cluster() as cluster:
                backend = await cluster.backend()
                await cluster.kill_worker("worker-0")
                await until(lambda: cluster.core.health().status is HealthStatus.DEAD)
                with pytest.raises(UnavailableError, match="no worker is ready"):
                    await collect(backend, make_request("a"))

        run(test())

    def test_an_id_in_use(self):
        async def test():
            async with Cluster() as cluster:
                first, second = await cluster.backend(), await cluster.backend()
                cluster.executors["worker-0"].gate.clear()
                running = asyncio.create_task(collect(first, make_request("same")))
                await until(lambda: cluster.core.num_unfinished == 1)
                for backend in (first, second):
                    with pytest.raises(InvalidRequestError, match="in use"):
                        await collect(backend, make_request("same"))
                cluster.executors["worker-0"].gate.set()
                assert await running == {0: expected(make_request("same"))}

        run(test())

    def test_an_unexpected_worker_and_bad_config(self):
        async def test():
            async with Cluster() as cluster:
                with pytest.raises(ConfigError, match="worker-9"):
                    cluster.core.announce("worker-9", "127.0.0.1:1")

        run(test())
        with pytest.raises(ConfigError):
            CoordinatorConfig(worker_ids=())
        with pytest.raises(ConfigError):
            CoordinatorConfig(worker_ids=("a",), unfinished_requests_max=0)


class TestLeaving:
    @pytest.mark.parametrize("tokens", [0, 2], ids=["before the first token", "in mid-stream"])
    def test_d20_a_caller_that_leaves_frees_its_blocks(self, tokens):
        async def test():
            async with Cluster(step_seconds=0.002) as cluster:
                backend = await cluster.backend()
                other = make_request("stays", max_tokens=60)
                staying = asyncio.create_task(collect(backend, other))
                cluster.executors["worker-0"].gate.set() if tokens else cluster.executors[
                    "worker-0"
                ].gate.clear()
                stream = backend.submit(make_request("leaves", max_tokens=2000))
                waiting = asyncio.create_task(stream.__anext__())
                await until(lambda: cluster.core.num_unfinished == 2)
                if tokens:
                    await waiting
                    await stream.__anext__()
                    await stream.aclose()
                else:
                    waiting.cancel()
                await until(lambda: cluster.core.stats()["requests"]["aborted"] == 1, seconds=2)
                cluster.executors["worker-0"].gate.set()
                assert await staying == {0: expected(other)}
                await cluster.idle()

        run(test())

    def test_a_request_that_ended_sends_no_abort(self):
        async def test():
            async with Cluster() as cluster:
                backend = await cluster.backend()
                stream = backend.submit(make_request("a"))
                async for _ in stream:
                    pass
                await stream.aclose()
                await collect(backend, make_request("b"))
                assert cluster.core.stats()["requests"]["aborted"] == 0

        run(test())

    def test_an_ingress_that_dies_takes_its_requests_along_and_no_other(self):
        async def test():
            async with Cluster(step_seconds=0.002) as cluster:
                dying, living = await cluster.backend(), await cluster.backend()
                ends = [
                    asyncio.create_task(collect(dying, make_request(f"d{n}", max_tokens=2000)))
                    for n in range(5)
                ]
                request = make_request("lives", max_tokens=80)
                lives = asyncio.create_task(collect(living, request))
                await until(lambda: cluster.core.num_unfinished == 6)
                await dying.close()
                for end in ends:
                    with pytest.raises(UnavailableError):
                        await end
                assert await lives == {0: expected(request)}
                assert cluster.core.stats()["requests"]["aborted"] == 5
                await cluster.idle()

        run(test())

    def test_aborts_of_another_ingress_s_requests_do_nothing(self):
        async def test():
            async with Cluster(step_seconds=0.002) as cluster:
                mine, other = await cluster.backend(), await cluster.backend()
                request = make_request("mine", max_tokens=80)
                running = asyncio.create_task(collect(mine, request))
                await until(lambda: cluster.core.num_unfinished == 1)
                other._commands.put_nowait(
                    coordinator_pb2.ServeRequest(abort=coordinator_pb2.Abort(request_id="mine"))
                )
                assert await running == {0: expected(request)}

        run(test())

    def test_an_ingress_that_does_not_read_is_cut_off(self, monkeypatch):
        monkeypatch.setattr(coordinator_servicer, "PENDING_DELTAS_MAX", 4)

        async def test():
            async with Cluster() as cluster:
                backend = await cluster.backend()
                cluster.executors["worker-0"].gate.clear()
                tasks = [asyncio.create_task(collect(backend, make_request(f"r{n}"))) for n in range(6)]
                await until(lambda: cluster.core.num_unfinished == 6)
                cluster.executors["worker-0"].gate.set()
                for task in tasks:
                    with pytest.raises(UnavailableError, match="wait to be read"):
                        await task
                await cluster.idle()

        run(test())


class TestDrain:
    def test_d23_what_runs_ends_well_and_what_comes_is_refused(self):
        async def test():
            async with Cluster(step_seconds=0.002) as cluster:
                backend = await cluster.backend()
                request = make_request("a", max_tokens=100)
                running = asyncio.create_task(collect(backend, request))
                await until(lambda: cluster.core.num_unfinished == 1)
                draining = asyncio.create_task(cluster.core.drain(30))
                await asyncio.sleep(0)
                with pytest.raises(UnavailableError, match="shutting down"):
                    await collect(backend, make_request("b"))
                assert (await backend.health()).status is HealthStatus.DRAINING
                assert await running == {0: expected(request)}
                assert await draining == 0

        run(test())

    def test_d23_at_the_deadline_the_rest_gets_an_error(self):
        async def test():
            async with Cluster(step_seconds=0.01) as cluster:
                backend = await cluster.backend()
                stream = backend.submit(make_request("a", max_tokens=2000))
                await stream.__anext__()
                assert await cluster.core.drain(0.1) == 1
                deltas = [delta async for delta in stream]
                assert deltas[-1].error_name == "UnavailableError"
                await cluster.idle()

        run(test())


def test_health_and_stats_over_the_wire():
    async def test():
        async with Cluster(2) as cluster:
            backend = await cluster.backend()
            await collect(backend, make_request("a"))
            report = await backend.health()
            assert report.status is HealthStatus.READY
            assert [worker["worker_id"] for worker in report.workers] == list(cluster.worker_ids)
            assert all(worker["seconds_since_heard"] < 5 for worker in report.workers)
            stats = await backend.stats()
            assert stats["requests"]["finished"] == 1
            assert set(stats["workers"]) == set(cluster.worker_ids)
            assert stats["ingresses"] == 1

    run(test())


def test_d24_frequent_keepalives_do_not_end_a_quiet_ingress_stream():
    async def test():
        async with Cluster(keepalive_seconds=0.1) as cluster:
            backend = await cluster.backend(keepalive_seconds=0.1)
            stream = backend._commands
            await asyncio.sleep(2.0)
            assert backend._commands is stream, "the stream broke and was opened anew"
            await collect(backend, make_request("a"))

    run(test())


class TestClusterStats:
    """Sums over workers, of which some are lost."""

    def test_counters_keep_what_lost_workers_counted_and_gauges_do_not(self):
        live = {"steps": 5, "running": 2, "finished": {"stop": 1}, "max_step_tokens": 7}
        lost = {"steps": 3, "running": 9, "finished": {"stop": 1, "length": 4}, "max_step_tokens": 90}
        both = total([live, live], [lost])
        assert (both["steps"], both["running"], both["max_step_tokens"]) == (13, 4, 7)
        assert both["finished"] == {"stop": 3, "length": 4}

    def test_a_total_can_be_totalled_again(self):
        once = total([], [{"steps": 3, "preemptions": {"swap": 1}}])
        assert total([{"steps": 1}], [once])["steps"] == 4

    def test_no_worker(self):
        assert total([])["running"] == 0

    def test_every_key_of_a_snapshot_is_summed_in_one_way(self):
        snapshot = Scheduler(SchedulerConfig(num_blocks=4)).snapshot()
        assert sorted((*COUNTERS, *GAUGES, *MAXIMA)) == sorted(snapshot)


class TestBadIngresses:
    async def talk(self, cluster, *requests):
        async with grpc.aio.insecure_channel(cluster.address) as channel:
            call = coordinator_pb2_grpc.CoordinatorServiceStub(channel).Serve(iter(requests))
            return [response async for response in call]

    def hello(self, **changes):
        hello = {"protocol_version": wire.PROTOCOL_VERSION, "ingress_id": "x", **changes}
        return coordinator_pb2.ServeRequest(hello=coordinator_pb2.IngressHello(**hello))

    @pytest.mark.parametrize(
        ("changes", "code"),
        [
            ({"ingress_id": ""}, grpc.StatusCode.INVALID_ARGUMENT),
            ({"protocol_version": 99}, grpc.StatusCode.FAILED_PRECONDITION),
        ],
    )
    def test_a_bad_hello(self, changes, code):
        async def test():
            async with Cluster() as cluster:
                with pytest.raises(grpc.aio.AioRpcError) as failure:
                    await self.talk(cluster, self.hello(**changes))
                assert failure.value.code() is code

        run(test())

    def test_a_damaged_request_is_rejected_and_the_stream_goes_on(self):
        async def test():
            async with Cluster() as cluster:
                submit = coordinator_pb2.ServeRequest()
                submit.submit.request_id = "a"
                submit.submit.prompt_token_ids = b"12345"
                responses = await self.talk(cluster, self.hello(), submit)
                assert responses[0].hello.model.name == MODEL.name
                assert responses[-1].rejection.error.name == "ProtocolError"

        run(test())

    def test_an_ingress_for_another_model_does_not_connect(self):
        async def test():
            async with Cluster() as cluster:
                backend = GrpcBackend(replace(MODEL, name="other"), lambda: asyncio.sleep(0, cluster.address))
                cluster.backends.append(backend)
                backend.start()
                with pytest.raises(UnavailableError):
                    await backend.wait_connected(0.5)

        run(test())

    def test_a_second_stream_of_an_ingress_replaces_the_first(self):
        async def test():
            async with Cluster(step_seconds=0.005) as cluster:
                backend = await cluster.backend()
                lost = asyncio.create_task(collect(backend, make_request("a", max_tokens=2000)))
                await until(lambda: cluster.core.num_unfinished == 1)
                await self.talk(cluster, self.hello(ingress_id=backend._ingress_id))
                with pytest.raises(UnavailableError, match="took over"):
                    await lost
                await cluster.idle()

        run(test())


def test_a_long_prompt_and_its_answer_pass():
    async def test():
        async with Cluster(info={"num_blocks": 600}) as cluster:
            backend = await cluster.backend()
            prompt = (np.arange(4000) % MODEL.vocab_size).astype(np.int32)
            request = Request(
                request_id="long", prompt_token_ids=prompt, params=SamplingParams(max_tokens=20), seed=1
            )
            assert await collect(backend, request) == {0: expected(request)}

    run(test())
