"""The step stream between `WorkerClient` and `WorkerServicer`, over real sockets, without a model."""

import asyncio
import contextlib
import threading
from concurrent.futures import Future

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from octavo.cluster.worker_client import WorkerClient
from octavo.protos import codec, wire, worker_pb2, worker_pb2_grpc
from octavo.protos.errors import InvalidRequestError, PlanRejectedError, ProtocolError, WorkerLostError
from octavo.protos.structured_output import StructuredOutput
from octavo.protos.types import StepPlan, StepResult, TokenLogprobs
from octavo.worker import servicer as servicer_module
from octavo.worker.servicer import SERVICE_NAME, WorkerServer

from ..scheduler.fake_worker import Row
from .support import FakeExecutor, make_request, run, until, worker_info


class Rig:
    """One worker server on a free port."""

    def __init__(self, executor=None, **options):
        self.executor = executor or FakeExecutor()
        self.fatal = []
        self.server = WorkerServer(
            self.executor,
            on_fatal=self.fatal.append,
            **{"heartbeat_seconds": 0.05, **options},
        )
        self.clients = []

    async def __aenter__(self):
        self.address = await self.server.start()
        return self

    async def __aexit__(self, *_):
        self.executor.gate.set()
        for client in self.clients:
            await client.close()
        await self.server.stop()

    async def connect(self, epoch, **options):
        event = asyncio.Event()
        client = await WorkerClient.connect(self.address, epoch=epoch, on_event=event.set, **options)
        self.clients.append(client)
        return client

    async def health(self, name=""):
        async with grpc.aio.insecure_channel(self.address) as channel:
            request = health_pb2.HealthCheckRequest(service=name)
            response = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=5)
        return health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)


def empty_plan(step_id, epoch):
    return StepPlan(step_id=step_id, epoch=epoch)


async def results(client, count):
    taken = []
    while len(taken) < count:
        await until(lambda: client._results or client.error)
        if client.error and not client._results:
            raise client.error
        taken += client.take_results()
    return taken


def test_a_grammar_is_made_ready_beside_the_steps_or_refused():
    wanted = StructuredOutput.regex("a+")

    class Compiling(FakeExecutor):
        def compile_grammar(self, asked):
            assert asked == wanted
            future = Future()
            if self.refusal is None:
                future.set_result(None)
            else:
                future.set_exception(self.refusal)
            return future

    async def test():
        executor = Compiling()
        executor.refusal = None
        executor.gate.clear()  # steps wait, grammars do not
        async with Rig(executor) as rig:
            client = await rig.connect(1)
            client.send(empty_plan(1, 1))
            await client.compile_grammar(wanted)
            executor.refusal = InvalidRequestError("no such thing", param="structured_output")
            with pytest.raises(InvalidRequestError, match="no such thing") as caught:
                await client.compile_grammar(wanted)
            assert caught.value.param == "structured_output"
            executor.gate.set()
            await results(client, 1)

    run(test())


def test_hello_says_what_the_worker_is():
    async def test():
        async with Rig() as rig:
            client = await rig.connect(1)
            assert client.info == rig.executor.info

    run(test())


def test_plans_go_ahead_of_results_and_come_back_in_order():
    async def test():
        async with Rig() as rig:
            client = await rig.connect(5)
            rig.executor.gate.clear()
            for step in (1, 2, 3):
                client.send(empty_plan(step, 5))
            assert client.num_in_flight == 3
            await until(lambda: rig.executor.executed == [(5, 1)])
            rig.executor.gate.set()
            assert [result.step_id for result in await results(client, 3)] == [1, 2, 3]
            assert client.num_in_flight == 0
            assert rig.executor.threads == {"octavo-compute_0"}

    run(test())


def test_heartbeats_go_on_while_the_device_computes():
    async def test():
        async with Rig() as rig:
            client = await rig.connect(1, lease_seconds=0.5)
            rig.executor.gate.clear()
            client.send(empty_plan(1, 1))
            await until(
                lambda: client.progress.running_step_id == 1 and client.progress.running_seconds > 0.8
            )
            assert client.error is None
            rig.executor.gate.set()
            await results(client, 1)
            assert client.progress.finished_step_id == 1

    run(test())


class TestFencing:
    def test_a_newer_epoch_takes_over_and_the_older_learns_of_it(self):
        async def test():
            async with Rig() as rig:
                old = await rig.connect(1)
                left = Row(make_request("left", list(range(40))), 0, 8, list(range(40)), 35, [9, 4, 7])
                rig.executor.rows[3] = left
                new = await rig.connect(2)
                assert rig.executor.rows == {}
                (cached,) = new.cached_prefixes
                assert cached.token_ids.tolist() == list(range(32))
                assert cached.blocks.tolist() == [9, 4]
                await until(lambda: old.error is not None)
                assert isinstance(old.error, PlanRejectedError)
                assert "epoch 2" in old.error.message
                new.send(empty_plan(1, 2))
                assert (await results(new, 1))[0].epoch == 2

        run(test())

    def test_plans_of_the_old_epoch_that_wait_never_run(self):
        async def test():
            async with Rig() as rig:
                old = await rig.connect(1)
                rig.executor.gate.clear()
                old.send(empty_plan(1, 1))
                old.send(empty_plan(2, 1))
                await until(lambda: rig.executor.executed == [(1, 1)])
                taking = asyncio.create_task(rig.connect(2))
                await until(lambda: old.error is not None)
                assert not taking.done(), "the running step must end before rows are reset"
                rig.executor.gate.set()
                new = await taking
                new.send(empty_plan(1, 2))
                await results(new, 1)
                assert rig.executor.executed == [(1, 1), (2, 1)]
                assert old.take_results() == []

        run(test())

    @pytest.mark.parametrize("epoch", [3, 4])
    def test_an_epoch_that_is_not_newer_is_refused(self, epoch):
        async def test():
            async with Rig() as rig:
                client = await rig.connect(4)
                with pytest.raises(PlanRejectedError, match="not above 4"):
                    await rig.connect(epoch)
                client.send(empty_plan(1, 4))
                await results(client, 1)

        run(test())

    def test_after_the_stream_broke_the_same_epoch_stays_refused(self):
        async def test():
            async with Rig() as rig:
                client = await rig.connect(4)
                await client.close()
                await until(lambda: not rig.server.servicer.attached)
                with pytest.raises(PlanRejectedError):
                    await rig.connect(4)
                await rig.connect(5)

        run(test())

    @pytest.mark.parametrize(
        ("plan", "reason"),
        [
            (empty_plan(1, 3), "epoch 3"),
            (empty_plan(2, 7), "step 2 where step 1"),
            (empty_plan(0, 7), "step 0"),
        ],
    )
    def test_a_plan_out_of_place_ends_the_stream(self, plan, reason):
        async def test():
            async with Rig() as rig:
                client = await rig.connect(7)
                client.send(plan)
                with pytest.raises(PlanRejectedError, match=reason):
                    await results(client, 1)
                assert rig.executor.executed == []
                assert not rig.fatal

        run(test())


class TestFailures:
    def test_a_refused_plan_ends_the_stream_but_not_the_worker(self):
        async def test():
            async with Rig() as rig:
                client = await rig.connect(1)
                rig.executor.gate.clear()
                rig.executor.error = PlanRejectedError("block 9 has two owners")
                client.send(empty_plan(1, 1))
                client.send(empty_plan(2, 1))
                rig.executor.gate.set()
                with pytest.raises(PlanRejectedError, match="two owners"):
                    await results(client, 1)
                assert rig.executor.executed == [(1, 1)], "what was sent behind a refused plan must not run"
                assert not rig.fatal
                again = await rig.connect(2)
                again.send(empty_plan(1, 2))
                await results(again, 1)

        run(test())

    def test_a_failed_step_is_fatal_and_shows_in_health(self):
        async def test():
            async with Rig() as rig:
                client = await rig.connect(1)
                assert await rig.health(SERVICE_NAME) == "SERVING"
                rig.executor.error = RuntimeError("device-side assert")
                client.send(empty_plan(1, 1))
                with pytest.raises(WorkerLostError, match="device-side assert"):
                    await results(client, 1)
                assert [type(error) for error in rig.fatal] == [RuntimeError]
                await asyncio.sleep(0.1)
                assert await rig.health() == await rig.health(SERVICE_NAME) == "NOT_SERVING"

        run(test())

    def test_health_is_not_serving_while_a_step_is_overdue(self, monkeypatch):
        monkeypatch.setattr(servicer_module, "OVERDUE_SECONDS_MIN", 0.2)

        async def test():
            async with Rig() as rig:
                client = await rig.connect(1)
                client.send(empty_plan(1, 1))
                await results(client, 1)
                rig.executor.gate.clear()
                client.send(empty_plan(2, 1))
                await asyncio.sleep(0.5)
                assert await rig.health() == "NOT_SERVING"
                rig.executor.gate.set()
                await results(client, 1)
                await asyncio.sleep(0.2)
                assert await rig.health() == "SERVING"

        run(test())

    def test_a_worker_that_goes_away_is_lost(self):
        async def test():
            async with Rig() as rig:
                client = await rig.connect(1)
                await rig.server.stop()
                await until(lambda: client.error is not None)
                assert isinstance(client.error, WorkerLostError)
                assert not client.stuck

        run(test())

    def test_a_silent_worker_is_lost_when_its_lease_ends(self):
        async def test():
            async with Rig(heartbeat_seconds=30.0) as rig:
                client = await rig.connect(1, lease_seconds=0.3)
                await until(lambda: client.error is not None)
                assert "silent" in client.error.message
                assert client.stuck

        run(test())

    def test_nobody_listens(self):
        async def test():
            with pytest.raises(WorkerLostError):
                await WorkerClient.connect("127.0.0.1:1", epoch=1, on_event=lambda: None)

        run(test())

    def test_a_worker_that_never_says_hello(self):
        async def test():
            server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
            port = server.sockets[0].getsockname()[1]
            with pytest.raises(WorkerLostError, match="did not answer"):
                await WorkerClient.connect(
                    f"127.0.0.1:{port}", epoch=1, on_event=lambda: None, deadline_seconds=0.3
                )
            server.close()

        run(test())


class TestBadPeers:
    """A raw stub, to send what `WorkerClient` never would."""

    async def talk(self, rig, *requests):
        async with grpc.aio.insecure_channel(rig.address) as channel:
            call = worker_pb2_grpc.WorkerServiceStub(channel).Step(iter(requests))
            return [response async for response in call]

    def attach(self, **changes):
        attach = worker_pb2.Attach(**{"protocol_version": wire.PROTOCOL_VERSION, "epoch": 1, **changes})
        return worker_pb2.StepRequest(attach=attach)

    @pytest.mark.parametrize(
        ("first", "code"),
        [
            (worker_pb2.StepRequest(), grpc.StatusCode.INVALID_ARGUMENT),
            (worker_pb2.StepRequest(plan=worker_pb2.StepPlan()), grpc.StatusCode.INVALID_ARGUMENT),
            (
                worker_pb2.StepRequest(attach=worker_pb2.Attach(protocol_version=99, epoch=1)),
                grpc.StatusCode.FAILED_PRECONDITION,
            ),
        ],
    )
    def test_a_stream_that_does_not_begin_with_attach(self, first, code):
        async def test():
            async with Rig() as rig:
                with pytest.raises(grpc.aio.AioRpcError) as failure:
                    await self.talk(rig, first)
                assert failure.value.code() is code
                await rig.connect(1)

        run(test())

    def test_a_damaged_plan(self):
        async def test():
            async with Rig() as rig:
                plan = worker_pb2.StepPlan(step_id=1, epoch=1, rows=b"12345")
                responses = await self.talk(rig, self.attach(), worker_pb2.StepRequest(plan=plan))
                assert isinstance(codec.decode_error(responses[-1].error), ProtocolError)
                await rig.connect(2)

        run(test())

    def test_more_plans_than_may_be_in_flight(self):
        async def test():
            async with Rig() as rig:
                rig.executor.gate.clear()
                plans = [
                    worker_pb2.StepRequest(plan=codec.encode_plan(empty_plan(step, 1)))
                    for step in range(1, wire.PLANS_IN_FLIGHT_MAX + 2)
                ]
                responses = await self.talk(rig, self.attach(), *plans)
                error = codec.decode_error(responses[-1].error)
                assert isinstance(error, PlanRejectedError)
                assert "in flight" in error.message
                rig.executor.gate.set()

        run(test())


class BigReplies(FakeExecutor):
    """Answers a plan with more than gRPC's own limit of 4 MiB: log-probabilities of a long prompt's size."""

    ROWS = 8_192

    def execute(self, plan):
        entry = TokenLogprobs(-1.0, tuple(range(60)), tuple(map(float, range(60))))
        return StepResult(
            step_id=plan.step_id,
            epoch=plan.epoch,
            token_ids=np.zeros(self.ROWS, np.int32),
            logprobs=(entry,) * self.ROWS,
        )


class TestD24:
    """Case D24, by behaviour: gRPC ignores options it does not know."""

    def test_d24_a_reply_above_4_mib_passes(self):
        async def test():
            async with Rig(BigReplies()) as rig:
                client = await rig.connect(1)
                client.send(empty_plan(1, 1))
                (result,) = await results(client, 1)
                assert codec.encode_result(result).ByteSize() > 4 * 2**20
                assert len(result.logprobs) == BigReplies.ROWS

        run(test())

    def test_d24_a_plan_above_4_mib_passes(self):
        async def test():
            async with Rig() as rig:
                client = await rig.connect(1)
                rows = np.zeros((600_000, 2), np.int32)
                rows[:, 1] = 1
                plan = StepPlan(step_id=1, epoch=1, block_copies=rows)
                assert codec.encode_plan(plan).ByteSize() > 4 * 2**20
                client.send(plan)
                await results(client, 1)

        run(test())

    @pytest.mark.parametrize("busy", [False, True], ids=["idle", "in a long step"])
    def test_d24_frequent_keepalives_do_not_end_a_quiet_stream(self, busy):
        """Pings ten times a second, for which gRPC's defaults allow one in 300 s."""

        async def test():
            async with Rig(keepalive_seconds=0.1, heartbeat_seconds=60.0) as rig:
                client = await rig.connect(1, lease_seconds=60.0, keepalive_seconds=0.1)
                if busy:
                    rig.executor.gate.clear()
                    client.send(empty_plan(1, 1))
                await asyncio.sleep(2.0)
                assert client.error is None
                rig.executor.gate.set()
                if not busy:
                    client.send(empty_plan(1, 1))
                await results(client, 1)

        run(test())

    def test_d24_the_same_pings_end_the_stream_of_a_server_with_default_options(self, monkeypatch):
        """The control: without our options the test above would fail."""
        monkeypatch.setattr(wire, "server_options", lambda *_: [])

        async def test():
            async with Rig(heartbeat_seconds=60.0) as rig:
                client = await rig.connect(1, lease_seconds=60.0, keepalive_seconds=0.1)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(until(lambda: client.error is not None), 5.0)
                assert client.error is not None
                assert "ping" in client.error.message.lower()

        run(test())


def test_no_thread_is_left_behind():
    async def test():
        async with Rig(FakeExecutor(worker_info(num_blocks=4))) as rig:
            client = await rig.connect(1)
            client.send(empty_plan(1, 1))
            await results(client, 1)

    before = set(threading.enumerate())
    run(test())
    assert not [thread.name for thread in set(threading.enumerate()) - before if "octavo" in thread.name]
