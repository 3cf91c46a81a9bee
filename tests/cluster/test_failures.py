"""A part is lost and requests go on: over real sockets, in one process. Real deaths of processes: tests/chaos."""

import asyncio

import pytest

from octavo.cluster import coordinator_core, worker_link
from octavo.cluster.backend import HealthStatus
from octavo.protos.errors import InvalidRequestError, PlanRejectedError, UnavailableError
from octavo.protos.types import Resume

from ..scheduler.fake_worker import expected_beams
from .fake_cluster import Cluster
from .support import MODEL, FakeExecutor, collect, expected, make_request, run, until


def mixed_requests(count, max_tokens):
    """Single ones, with branches, best_of, beams, and each fifth ends by a stop token."""
    kinds = ({}, {"n": 3}, {"n": 2, "best_of": 3}, {"beam_width": 3, "n": 2, "temperature": 0.0}, {})
    return [
        make_request(
            f"r{number}",
            list(range(1 + number, 30 + 2 * number)),
            max_tokens=max_tokens + number,
            **({"stop_token_ids": tuple(range(0, 1000, 97))} if number % 5 == 4 else {}),
            **kinds[number % 5],
        )
        for number in range(count)
    ]


async def outputs_of(backend, request):
    """Tokens of each branch; offsets must have no gap, and each branch and the request one end."""
    tokens, ended = {}, set()
    async for delta in backend.submit(request):
        assert delta.error is None, delta.error
        assert delta.branch not in ended
        so_far = tokens.setdefault(delta.branch, [])
        assert delta.offset == len(so_far)
        so_far += delta.token_ids
        if delta.finish_reason is not None:
            ended.add(delta.branch)
    assert ended == set(tokens)
    return tokens


def undisturbed(request):
    if request.params.beam_width:
        found = expected_beams(request, request.params.max_tokens)
        return {branch: tokens for branch, (tokens, _, _) in enumerate(found)}
    return {branch: expected(request, branch) for branch in range(request.params.num_branches)}


async def lose_coordinator(cluster):
    await cluster.server.stop(0)
    await cluster.core.close()


async def restart_coordinator(cluster):
    await cluster.start_coordinator()
    for worker_id, address in cluster.addresses.items():
        cluster.core.announce(worker_id, address)


class TestWorkerLoss:
    @pytest.mark.parametrize("kind", ["one of three", "the only one"])
    def test_d22_its_requests_go_on_elsewhere_and_none_of_their_tokens_differs(self, kind):
        async def test():
            async with Cluster(1 if kind == "the only one" else 3, step_seconds=0.004) as cluster:
                backend = await cluster.backend()
                requests = mixed_requests(15, 80)
                tasks = [asyncio.create_task(outputs_of(backend, request)) for request in requests]
                await until(lambda: cluster.core.num_unfinished == 15)
                await until(lambda: cluster.scheduler("worker-0").snapshot()["sampled_tokens"] > 40)
                victims = cluster.scheduler("worker-0").unfinished()
                assert victims
                await cluster.kill_worker("worker-0")
                if kind == "the only one":
                    await until(lambda: cluster.core.health().status is HealthStatus.DEAD)
                    await until(lambda: cluster.core.stats()["without_worker"] == len(victims))
                    with pytest.raises(UnavailableError, match="no worker is ready"):
                        await collect(backend, make_request("new"))
                else:
                    await until(lambda: cluster.core.health().status is HealthStatus.DEGRADED)
                    assert "worker-0 dead" in cluster.core.health().detail
                await cluster.start_worker("worker-0")
                outputs = await asyncio.wait_for(asyncio.gather(*tasks), 30)
                assert outputs == [undisturbed(request) for request in requests]
                assert cluster.core.stats()["moved"] == len(victims)
                assert cluster.core.stats()["requests"]["finished"] == 15
                await cluster.idle()

        run(test())

    def test_all_workers_are_lost_again_and_again(self):
        async def test():
            async with Cluster(2, step_seconds=0.004) as cluster:
                backend = await cluster.backend()
                requests = mixed_requests(10, 60)
                tasks = [asyncio.create_task(outputs_of(backend, request)) for request in requests]
                await until(lambda: cluster.core.num_unfinished == 10)
                for worker_id in ("worker-0", "worker-1", "worker-0", "worker-1"):
                    steps = cluster.core.stats()["steps"]
                    await until(lambda steps=steps: cluster.core.stats()["steps"] > steps + 5)
                    await cluster.kill_worker(worker_id)
                    await cluster.start_worker(worker_id)
                outputs = await asyncio.wait_for(asyncio.gather(*tasks), 30)
                assert outputs == [undisturbed(request) for request in requests]
                await cluster.idle()

        run(test())

    def test_those_that_wait_go_to_all_that_join_and_end_when_nobody_does(self):
        async def test():
            async with Cluster(2, step_seconds=0.004, worker_wait_seconds=1.5) as cluster:
                backend = await cluster.backend()
                requests = [make_request(f"r{number}", max_tokens=150) for number in range(8)]
                tasks = [asyncio.create_task(collect(backend, request)) for request in requests]
                await until(lambda: cluster.core.num_unfinished == 8)
                for worker_id in cluster.worker_ids:
                    await cluster.kill_worker(worker_id)
                await until(lambda: cluster.core.stats()["without_worker"] == 8)
                with pytest.raises(UnavailableError, match="waits for a worker"):
                    await backend.tokens("r0", 0)
                await cluster.start_worker("worker-0")
                await until(lambda: cluster.core.health().status is HealthStatus.DEGRADED)
                assert cluster.core.stats()["without_worker"] == 8, "the other may join in a moment"
                await cluster.start_worker("worker-1")
                await until(lambda: cluster.core.stats()["without_worker"] == 0)
                assert all(cluster.scheduler(worker_id).has_work for worker_id in cluster.worker_ids)
                assert await asyncio.gather(*tasks) == [{0: expected(request)} for request in requests]
                await cluster.idle()
                late = asyncio.create_task(collect(backend, make_request("late", max_tokens=2000)))
                await until(lambda: cluster.core.num_unfinished == 1)
                for worker_id in cluster.worker_ids:
                    await cluster.kill_worker(worker_id)
                with pytest.raises(AssertionError, match="no worker came back within"):
                    await late
                assert cluster.core.num_unfinished == 0
                for worker_id in cluster.worker_ids:
                    await cluster.start_worker(worker_id)
                await until(lambda: cluster.core.health().status is HealthStatus.READY)
                await cluster.idle()

        run(test())

    def test_d20_who_leaves_while_it_waits_for_a_worker_is_not_computed(self):
        async def test():
            async with Cluster(step_seconds=0.004) as cluster:
                backend = await cluster.backend()
                streams = [backend.submit(make_request(f"r{n}", max_tokens=200, n=2)) for n in range(2)]
                for stream in streams:
                    await stream.__anext__()
                await cluster.kill_worker("worker-0")
                await until(lambda: cluster.core.stats()["without_worker"] == 2)
                await streams[0].aclose()
                backend.stop_branch("r1", 0)
                await until(lambda: cluster.core.num_unfinished == 1)
                reasons = {}
                await cluster.start_worker("worker-0")
                async for delta in streams[1]:
                    if delta.finish_reason is not None:
                        reasons[delta.branch] = delta.finish_reason.value
                assert reasons == {0: "stop", 1: "length"}
                assert cluster.core.stats()["requests"]["aborted"] == 1
                await cluster.idle()

        run(test())

    def test_a_failed_row_fails_its_request_and_no_other(self):
        class OneRowFails(FakeExecutor):
            def execute(self, plan):
                failing = {
                    number
                    for number, row in enumerate(plan.sample_rows.tolist())
                    if row in self.rows and self.rows[row].request.request_id == "fails"
                }
                self.executed.append((plan.epoch, plan.step_id))
                return super(FakeExecutor, self).execute(plan, fail=frozenset(failing))

        async def test():
            async with Cluster() as cluster:
                executor = cluster.executors["worker-0"]
                executor.__class__ = OneRowFails
                backend = await cluster.backend()
                sound = make_request("sound", max_tokens=30)
                stream = asyncio.create_task(collect(backend, sound))
                deltas = [delta async for delta in backend.submit(make_request("fails", max_tokens=30))]
                assert deltas[-1].error_name == "RequestFailedError"
                assert "made to fail" in deltas[-1].error
                assert await stream == {0: expected(sound)}
                await cluster.idle()

        run(test())

    def test_a_plan_the_worker_refuses_costs_its_requests_a_pause(self):
        async def test():
            async with Cluster() as cluster:
                backend = await cluster.backend()
                cluster.executors["worker-0"].error = PlanRejectedError("block 3 has two owners")
                request = make_request("a")
                running = asyncio.create_task(collect(backend, request))
                await until(lambda: cluster.core.stats()["without_worker"] == 1)
                assert "two owners" in cluster.core.health().workers[0]["detail"]
                assert cluster.stuck == []
                cluster.core.announce("worker-0", cluster.addresses["worker-0"])
                assert await running == {0: expected(request)}
                await cluster.idle()

        run(test())

    def test_an_overdue_step_is_a_lost_worker_that_should_be_ended(self, monkeypatch):
        monkeypatch.setattr(worker_link, "OVERDUE_SECONDS_MIN", 0.2)
        monkeypatch.setattr(worker_link, "FIRST_STEP_SECONDS_MAX", 0.2)
        monkeypatch.setattr(worker_link, "_CHECK_SECONDS", 0.05)

        async def test():
            async with Cluster() as cluster:
                backend = await cluster.backend()
                cluster.executors["worker-0"].gate.clear()
                request = make_request("a")
                running = asyncio.create_task(collect(backend, request))
                await until(lambda: cluster.stuck == ["worker-0"])
                assert "overdue" in cluster.core.health().workers[0]["detail"]
                await cluster.kill_worker("worker-0")
                await cluster.start_worker("worker-0")
                assert await running == {0: expected(request)}

        run(test())

    def test_a_bug_in_scheduling_costs_a_pause_and_not_the_coordinator(self, monkeypatch):
        async def test():
            async with Cluster() as cluster:
                backend = await cluster.backend()
                monkeypatch.setattr(cluster.scheduler(), "plan", lambda now: 1 / 0)
                request = make_request("a")
                running = asyncio.create_task(collect(backend, request))
                await until(lambda: cluster.core.stats()["without_worker"] == 1)
                assert "ZeroDivisionError" in cluster.core.health().workers[0]["detail"]
                cluster.core.announce("worker-0", cluster.addresses["worker-0"])
                assert await running == {0: expected(request)}

        run(test())

    def test_a_request_that_takes_worker_after_worker_along_ends_with_an_error(self):
        class Refuses(FakeExecutor):
            def execute(self, plan):
                raise PlanRejectedError("again")

        async def test():
            async with Cluster() as cluster:
                backend = await cluster.backend()
                executor = cluster.executors["worker-0"]
                executor.__class__ = Refuses
                running = asyncio.create_task(collect(backend, make_request("poison")))
                slot = cluster.core._slots["worker-0"]
                for number in range(coordinator_core.LOSSES_MAX + 1):
                    assert not running.done()
                    await until(lambda number=number: slot.num_losses == number + 1)
                    cluster.core.announce("worker-0", cluster.addresses["worker-0"])
                with pytest.raises(AssertionError, match="again"):
                    await running
                executor.__class__ = FakeExecutor
                await until(lambda: cluster.core.health().status is HealthStatus.READY)
                await cluster.idle()

        run(test())

    def test_a_worker_of_another_model_is_not_taken(self):
        async def test():
            async with Cluster(2) as cluster:
                await cluster.kill_worker("worker-1")
                await until(lambda: cluster.core.health().status is HealthStatus.DEGRADED)
                cluster.info = {"model": MODEL.__class__(name="other", vocab_size=7, max_model_len=8)}
                await cluster.start_worker("worker-1")
                await until(lambda: "serves other" in cluster.core.health().workers[1]["detail"])
                assert cluster.core.health().status is HealthStatus.DEGRADED

        run(test())


class TestCoordinatorLoss:
    def test_every_stream_goes_on_with_the_tokens_that_it_would_have_had(self):
        async def test():
            async with Cluster(2, step_seconds=0.004) as cluster:
                backends = [await cluster.backend(), await cluster.backend()]
                requests = mixed_requests(15, 80)
                tasks = [
                    asyncio.create_task(outputs_of(backends[number % 2], request))
                    for number, request in enumerate(requests)
                ]
                for _ in range(2):
                    await until(lambda: cluster.core.stats()["sampled_tokens"] > 60)
                    await lose_coordinator(cluster)
                    assert (await backends[0].health()).status is HealthStatus.DEAD
                    with pytest.raises(UnavailableError):
                        await backends[0].stats()
                    await restart_coordinator(cluster)
                outputs = await asyncio.wait_for(asyncio.gather(*tasks), 30)
                assert outputs == [undisturbed(request) for request in requests]
                await until(lambda: cluster.core.health().status is HealthStatus.READY)
                await cluster.idle()

        run(test())

    def test_what_was_still_queued_is_submitted_again(self):
        async def test():
            async with Cluster() as cluster:
                backend = await cluster.backend()
                cluster.executors["worker-0"].gate.clear()
                requests = [make_request(f"r{number}") for number in range(5)]
                tasks = [asyncio.create_task(collect(backend, request)) for request in requests]
                await until(lambda: cluster.core.num_unfinished == 5)
                await lose_coordinator(cluster)
                cluster.executors["worker-0"].gate.set()
                await restart_coordinator(cluster)
                assert await asyncio.gather(*tasks) == [{0: expected(request)} for request in requests]
                await cluster.idle()

        run(test())

    def test_d20_who_left_meanwhile_is_not_resumed_and_a_branch_that_was_stopped_stays_so(self):
        async def test():
            async with Cluster(step_seconds=0.004) as cluster:
                backend = await cluster.backend()
                leaves = backend.submit(make_request("leaves", max_tokens=200))
                stays = backend.submit(make_request("stays", max_tokens=200, n=2))
                await leaves.__anext__()
                await stays.__anext__()
                await lose_coordinator(cluster)
                await leaves.aclose()
                backend.stop_branch("stays", 0)
                await restart_coordinator(cluster)
                ends = {}
                async for delta in stays:
                    if delta.finish_reason is not None:
                        ends[delta.branch] = (delta.finish_reason.value, delta.offset + len(delta.token_ids))
                assert ends[0][0] == "stop"
                assert ends[0][1] < 100
                assert ends[1] == ("length", 200)
                assert cluster.core.stats()["requests"]["submitted"] == 1
                await cluster.idle()

        run(test())

    def test_one_that_does_not_come_back_ends_what_waits_for_it(self):
        async def test():
            async with Cluster(step_seconds=0.004) as cluster:
                backend = await cluster.backend(resume_wait_seconds=0.4)
                stream = backend.submit(make_request("a", max_tokens=2000))
                await stream.__anext__()
                await lose_coordinator(cluster)
                with pytest.raises(UnavailableError, match="did not come back in"):
                    async for _ in stream:
                        pass
                await restart_coordinator(cluster)
                request = make_request("b")
                assert await collect(backend, request) == {0: expected(request)}
                await cluster.idle()

        run(test())

    def test_an_id_that_another_ingress_has_open_is_not_taken_over(self):
        class Sink:
            def push(self, deltas):
                raise AssertionError("not its request")

        async def test():
            async with Cluster(step_seconds=0.004) as cluster:
                backend = await cluster.backend()
                request = make_request("a", max_tokens=60)
                running = asyncio.create_task(collect(backend, request))
                await until(lambda: cluster.core.num_unfinished == 1)
                with pytest.raises(InvalidRequestError, match="in use"):
                    cluster.core.resume(request, Resume(), Sink())
                assert await running == {0: expected(request)}

        run(test())
