"""The whole system over a Ray cluster of three nodes: where its parts stand, and what follows when nodes go or are
told to, and when the load does. Workers have no model; one cluster for the module."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from typing import Any

import httpx
import psutil
import pytest

from octavo.cluster import service as service_module
from octavo.cluster.node_watch import MARGIN_SECONDS, NO_DEADLINE_SECONDS, seconds_left
from octavo.cluster.service import Service, ServiceConfig

from ..scheduler import fake_worker
from . import ray_nodes, support, test_service
from .ray_nodes import HttpStreams, RayNodes, wait_for

TOKENS = 150
"""At 20 ms each: three seconds."""


def bodies(count: int = 12, **changes):
    """Every fourth in two branches."""
    return [
        {
            "prompt": [*test_service.PROMPT, number],
            "max_tokens": TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "seed": number,
            "n": 2 if number % 4 == 0 else 1,
            **changes,
        }
        for number in range(count)
    ]


class System(test_service.System):
    """A service on a cluster of several nodes."""

    def __init__(self, nodes: RayNodes, model, **options) -> None:
        options = {"num_workers": 3, "device": "cpu", "threads_per_worker": 1, "num_blocks": 800, **options}
        config = ServiceConfig(model=str(model), ray_address=nodes.address, **options)
        super().__init__(Service(config, build=test_service.build_fake))
        self.nodes = nodes

    def health(self):
        return self.client.get("/health").json()

    def workers(self) -> list[str]:
        """ "worker-0 ready" and so on; looks after the system as `octavo serve` does."""
        assert self.service.alive()
        return [f"{worker['worker_id']} {worker['status']}" for worker in self.health()["workers"]]

    def is_ready(self) -> bool:
        self.service.alive()
        return self.health()["status"] == "ready"

    def node_of(self, actor_name: str) -> str:
        """Id of the node on which a named actor of ours is."""
        import ray

        from octavo.cluster.coordinator import NAMESPACE

        actor = ray.get_actor(actor_name, namespace=NAMESPACE)
        return ray.get(actor.__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id()))

    def worker_away(self) -> tuple[str, Any]:
        """Id of a worker that is not on the head node, and its node."""
        placed = self.nodes_of_workers()
        worker_id = next(one for one, node_id in placed.items() if node_id != self.nodes.head.node_id)
        return worker_id, self.nodes.node(placed[worker_id])

    def nodes_of_workers(self) -> dict[str, str]:
        from octavo.cluster.coordinator import worker_actor_name

        return {
            worker_id: self.node_of(worker_actor_name(worker_id))
            for worker_id in self.service._system._fleet.worker_ids
        }


@pytest.fixture(scope="module")
def nodes(default_model_dir):
    from ray import cloudpickle

    # Workers are other processes and know nothing of the tests' modules.
    for module in (sys.modules[__name__], test_service, support, fake_worker, ray_nodes):
        cloudpickle.register_pickle_by_value(module)
    nodes = RayNodes(3)
    try:
        yield nodes
    finally:
        nodes.close()


@pytest.fixture(scope="module")
def port() -> int:
    return service_module._choose_port("127.0.0.1")


@pytest.mark.cluster
class TestThreeWorkers:
    @pytest.fixture(scope="class")
    def system(self, nodes, port, default_model_dir):
        system = System(nodes, default_model_dir, port=port)
        try:
            system.start()
            yield system
        finally:
            system.service.stop(grace_seconds=0.0)

    @pytest.fixture(scope="class")
    def want(self, system):
        """What undisturbed streams say."""
        return HttpStreams(system.service.url, bodies()).texts()

    def test_workers_are_spread_and_the_rest_stands_where_its_loss_is_everybodys(self, system, want):
        from octavo.cluster.coordinator import COORDINATOR_NAME

        placed = system.nodes_of_workers()
        assert Counter(placed.values()) == {node.node_id: 1 for node in system.nodes.nodes}
        assert system.node_of(COORDINATOR_NAME) == system.nodes.head.node_id
        [raylet] = system.nodes.head.all_processes["raylet"]
        [replica] = system.processes("ray::ServeReplica")
        assert replica.ppid() == raylet.process.pid
        assert len({texts[0] for texts in want}) == len(want)
        steps = [worker["steps"] for worker in system.stats()["workers"].values()]
        assert all(steps), "all three have had requests"

    def test_d23_workers_of_a_node_that_will_be_taken_away_finish_or_hand_on_what_they_run(
        self, system, want
    ):
        worker_id, doomed = system.worker_away()
        spare = system.nodes.add()
        streams = HttpStreams(system.service.url, bodies())
        streams.wait_running(10)
        # Half of the streams would take longer than that.
        system.nodes.drain(doomed, MARGIN_SECONDS + 1.0)
        wait_for(lambda: f"{worker_id} draining" in system.workers(), 10)
        assert system.client.get("/ready").status_code == 200
        assert system.complete().status_code == 200
        assert streams.texts() == want
        assert system.stats()["requests"]["failed"] == 0
        wait_for(system.is_ready, 30)
        assert system.nodes_of_workers()[worker_id] == spare.node_id
        system.nodes.lose(doomed)
        assert system.complete().status_code == 200
        assert system.is_ready(), "nobody misses that node"

    def test_a_lost_node_costs_a_pause_and_its_worker_comes_back_with_another(self, system, want):
        worker_id, lost = system.worker_away()
        streams = HttpStreams(system.service.url, bodies())
        streams.wait_running(10)
        system.nodes.lose(lost)
        wait_for(lambda: f"{worker_id} dead" in system.workers(), 20)
        assert system.health()["status"] == "degraded"
        assert streams.texts() == want
        assert system.stats()["requests"]["failed"] == 0
        another = system.nodes.add()
        wait_for(system.is_ready, 30)
        assert system.nodes_of_workers()[worker_id] == another.node_id
        wait_for(system.idle, 10)

    def test_d23_sigterm_to_a_worker_or_the_coordinator_costs_a_pause(self, system, want):
        streams = HttpStreams(system.service.url, bodies())
        streams.wait_running(10)
        worker = system.worker_process("worker-0")
        worker.terminate()
        wait_for(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE, 10)
        [coordinator] = system.processes("ray::Coordinator")
        coordinator.terminate()
        assert streams.texts() == want
        wait_for(system.is_ready, 30)
        [again] = system.processes("ray::Coordinator")
        assert again.pid != coordinator.pid
        assert system.stats()["requests"]["failed"] == 0

    def test_d23_at_the_deadline_streams_end_with_an_error_event_and_new_calls_have_got_503(self, system):
        streams = HttpStreams(system.service.url, bodies(max_tokens=1500, n=1))
        streams.wait_running(3)
        refused: list[int] = []

        def ask_late() -> None:
            wait_for(lambda: system.client.get("/ready").status_code == 503, 10)
            refused.append(system.complete().status_code)

        late = threading.Thread(target=ask_late)
        late.start()
        system.service.stop(grace_seconds=1.5)
        late.join(10)
        assert refused == [503]
        for stream in streams.streams:
            stream.join()
            assert "the server shut down" in stream.events[-1] + stream.events[-2]


@pytest.mark.cluster
def test_workers_come_with_the_load_and_go_without_it(nodes, port, default_model_dir):
    """On the same cluster and port, which the service before has left as it found them."""
    system = System(
        nodes,
        default_model_dir,
        port=port,
        num_workers=1,
        scale_max=2,
        scale_up_after=1.0,
        scale_down_after=2.0,
        max_num_seqs=8,
    )
    try:
        system.start()
        assert system.workers() == ["worker-0 ready"]
        few = bodies(4, n=1, max_tokens=200)
        want = HttpStreams(system.service.url, few).texts()
        crowd = HttpStreams(system.service.url, bodies(40, n=1, max_tokens=60))
        wait_for(lambda: system.workers() == ["worker-0 ready", "worker-1 ready"], 60)
        assert len(set(system.nodes_of_workers().values())) == 2
        crowd.texts()
        late = HttpStreams(system.service.url, few)
        wait_for(lambda: "worker-1 draining" in system.workers(), 30)
        assert late.texts() == want, "who was on the worker that goes finished"
        wait_for(lambda: system.workers() == ["worker-0 ready"], 30)
        assert system.stats()["requests"]["failed"] == 0
        with pytest.raises(Exception, match="follows the load, between 1 and 2"):
            system.service.scale(2)
    finally:
        system.service.stop(grace_seconds=0.0)
    with pytest.raises(httpx.ConnectError):
        system.client.get("/health")


@pytest.mark.parametrize(
    ("deadline_ms", "now", "left"),
    [(0, 1000.0, NO_DEADLINE_SECONDS), (1_030_000, 1000.0, 30.0 - MARGIN_SECONDS), (1_001_000, 1000.0, 0.0)],
)
def test_a_node_is_empty_before_its_deadline(deadline_ms, now, left):
    assert seconds_left(deadline_ms, now) == pytest.approx(left)
