"""A node is about to be taken away: its workers finish or hand on what they run, and start elsewhere."""

import asyncio

import pytest

from octavo.cluster.backend import HealthStatus
from octavo.protos.errors import UnavailableError

from .fake_cluster import Cluster
from .support import collect, expected, make_request, run, until
from .test_failures import mixed_requests, outputs_of, undisturbed


class Nodes(Cluster):
    """Each worker is on a node of its own: worker-0 on node-0 and so on."""

    async def __aenter__(self):
        await super().__aenter__()
        for worker_id in self.worker_ids:
            self.core._slots[worker_id].node_id = worker_id.replace("worker", "node")
        return self


@pytest.mark.parametrize("seconds", [0.0, 20.0], ids=["at once", "when it is done"])
def test_d23_what_runs_on_a_node_that_goes_ends_there_or_goes_on_elsewhere(seconds):
    async def test():
        async with Nodes(2, step_seconds=0.004) as cluster:
            backend = await cluster.backend()
            requests = mixed_requests(10, 60)
            tasks = [asyncio.create_task(outputs_of(backend, request)) for request in requests]
            await until(lambda: cluster.core.stats()["sampled_tokens"] > 60)
            assert cluster.scheduler("worker-1").has_work
            for _ in range(3):
                cluster.core.leave_nodes({"node-1": seconds})
            health = cluster.core.health()
            assert [worker["status"] for worker in health.workers] == ["ready", "draining"]
            assert (health.status, health.detail) == (
                HealthStatus.DEGRADED,
                "1 of 2 workers serve: worker-1 draining",
            )
            late = make_request("late")
            assert await collect(backend, late) == {0: expected(late)}
            assert await asyncio.gather(*tasks) == [undisturbed(request) for request in requests]
            await until(lambda: cluster.stuck == ["worker-1"])
            assert (cluster.core.stats()["moved"] > 0) == (seconds == 0.0)
            assert cluster.core.stats()["requests"]["failed"] == 0
            # The process has yet to end, and asks to be attached: not there.
            cluster.core.announce("worker-1", cluster.addresses["worker-1"], "node-1")
            await asyncio.sleep(0.1)
            assert cluster.core.health().status is HealthStatus.DEGRADED
            cluster.core.announce("worker-1", cluster.addresses["worker-1"], "node-2")
            await until(lambda: cluster.core.health().status is HealthStatus.READY)
            cluster.core.leave_nodes({})
            assert cluster.stuck == ["worker-1"]
            await cluster.idle()

    run(test())


def test_a_worker_that_loaded_on_a_node_that_goes_is_sent_elsewhere_before_it_serves():
    async def test():
        async with Nodes(2) as cluster:
            cluster.core.leave_nodes({"node-3": 30.0})
            await cluster.kill_worker("worker-1")
            await until(lambda: cluster.core.health().status is HealthStatus.DEGRADED)
            for _ in range(3):
                cluster.core.announce("worker-1", "127.0.0.1:1", "node-3")
            await until(lambda: cluster.stuck == ["worker-1"])
            await cluster.start_worker("worker-1")
            await until(lambda: cluster.core.health().status is HealthStatus.READY)

    run(test())


def test_when_every_node_goes_running_requests_finish_and_new_ones_get_503():
    async def test():
        async with Nodes(2, step_seconds=0.004) as cluster:
            backend = await cluster.backend()
            requests = mixed_requests(6, 40)
            tasks = [asyncio.create_task(outputs_of(backend, request)) for request in requests]
            await until(lambda: cluster.core.stats()["sampled_tokens"] > 20)
            cluster.core.leave_nodes({"node-0": 20.0, "node-1": 20.0})
            assert cluster.core.health().status is HealthStatus.DRAINING
            with pytest.raises(UnavailableError, match="no worker is ready"):
                await collect(backend, make_request("late"))
            assert await asyncio.gather(*tasks) == [undisturbed(request) for request in requests]
            await until(lambda: sorted(cluster.stuck) == ["worker-0", "worker-1"])

    run(test())


def test_a_worker_that_retires_from_a_node_that_goes_is_not_started_again():
    async def test():
        async with Nodes(2, step_seconds=0.004) as cluster:
            backend = await cluster.backend()
            task = asyncio.create_task(outputs_of(backend, make_request("long", max_tokens=100, n=2)))
            await until(lambda: cluster.core.stats()["sampled_tokens"] > 5)
            [busy] = [name for name in cluster.worker_ids if cluster.scheduler(name).has_work]
            [other] = set(cluster.worker_ids) - {busy}
            cluster.core.leave_nodes({busy.replace("worker", "node"): 20.0})
            await cluster.core.expect([other], 20.0)
            assert await task == undisturbed(make_request("long", max_tokens=100, n=2))
            assert [worker["worker_id"] for worker in cluster.core.health().workers] == [other]
            assert cluster.stuck == []

    run(test())
