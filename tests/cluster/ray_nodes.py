"""A Ray cluster of several nodes on this machine, and HTTP streams that are compared token by token."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import psutil


class RayNodes:
    """Each node has an address, a raylet and workers of its own. Nothing is left of them after `close`."""

    def __init__(self, num_nodes: int, *, num_cpus: int = 1) -> None:
        from ray.cluster_utils import Cluster

        self._num_cpus = num_cpus
        self._numbers = itertools.count(2)
        self._folder = tempfile.mkdtemp(prefix="octavo-ray-")
        # Ray notes there which cluster is "auto", and must not note it for the whole machine.
        self._before = os.environ.get("RAY_TMPDIR")
        os.environ["RAY_TMPDIR"] = self._folder
        self._cluster = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": num_cpus,
                "include_dashboard": False,
                "_system_config": {"worker_niceness": 0},
            },
        )
        self.nodes = [self._cluster.head_node]
        for _ in range(num_nodes - 1):
            self.add(wait=False)
        self._cluster.wait_for_nodes()

    @property
    def address(self) -> str:
        return self._cluster.address

    @property
    def head(self) -> Any:
        return self.nodes[0]

    def add(self, *, wait: bool = True) -> Any:
        # An address of its own, so that a driver finds the head's raylet and no other at the machine's.
        address = f"127.0.0.{next(self._numbers)}"
        node = self._cluster.add_node(num_cpus=self._num_cpus, node_ip_address=address, wait=wait)
        self.nodes.append(node)
        return node

    def node(self, node_id: str) -> Any:
        return next(node for node in self.nodes if node.node_id == node_id)

    def lose(self, node: Any) -> None:
        """kill -9 of everything on the node at once, as when its machine loses power."""
        [raylet] = node.all_processes["raylet"]
        doomed = psutil.Process(raylet.process.pid)
        for process in [doomed, *doomed.children(recursive=True)]:
            process.kill()
        self.nodes.remove(node)
        self._cluster.remove_node(node, allow_graceful=False)

    def drain(self, node: Any, seconds: float) -> None:
        """What an autoscaler or a notice of preemption does: the node will be gone after so long."""
        from ray._raylet import GcsClient
        from ray.core.generated import autoscaler_pb2

        accepted, reason = GcsClient(address=self.address).drain_node(
            node.node_id,
            autoscaler_pb2.DRAIN_NODE_REASON_PREEMPTION,
            "the machine is taken away",
            int((time.time() + seconds) * 1000),
        )
        assert accepted, reason

    def close(self) -> None:
        self._cluster.shutdown()
        if self._before is None:
            del os.environ["RAY_TMPDIR"]
        else:
            os.environ["RAY_TMPDIR"] = self._before
        shutil.rmtree(self._folder, ignore_errors=True)


class HttpStream(threading.Thread):
    """One streamed completion as its client sees it."""

    def __init__(self, client: httpx.Client, body: dict[str, Any]) -> None:
        super().__init__(daemon=True)
        self._client, self._body = client, {**body, "stream": True}
        self.events: list[str] = []
        self.arrivals: list[float] = []
        """When each came, by `time.monotonic`."""
        self.start()

    def run(self) -> None:
        with self._client.stream("POST", "/v1/completions", json=self._body) as reply:
            for line in reply.iter_lines():
                if line:
                    self.arrivals.append(time.monotonic())
                    self.events.append(line.removeprefix("data: "))

    @property
    def gap_seconds(self) -> float:
        """The longest time between two events."""
        return max((b - a for a, b in itertools.pairwise(self.arrivals)), default=0.0)

    def texts(self) -> dict[int, str]:
        """Of each branch, once all has come; what was said twice or left out shows."""
        self.join()
        assert self.events, "no answer"
        assert self.events[-1] == "[DONE]", self.events[-1]
        texts: dict[int, str] = {}
        ended: set[int] = set()
        for event in self.events[:-1]:
            reply = json.loads(event)
            assert "error" not in reply, event
            for choice in reply["choices"]:
                assert choice["index"] not in ended, "a branch ended twice"
                texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
                if choice["finish_reason"] is not None:
                    ended.add(choice["index"])
        assert ended == set(texts)
        return texts


class HttpStreams:
    """Several at once."""

    def __init__(self, url: str, bodies: list[dict[str, Any]]) -> None:
        limits = httpx.Limits(max_connections=None)
        client = httpx.Client(base_url=url, timeout=180, trust_env=False, limits=limits)
        self.streams = [HttpStream(client, body) for body in bodies]

    def wait_running(self, num_events: int, seconds: float = 30.0) -> None:
        """Until each has had so many events."""
        wait_for(lambda: all(len(stream.events) >= num_events for stream in self.streams), seconds)

    def texts(self) -> list[dict[int, str]]:
        return [stream.texts() for stream in self.streams]

    @property
    def gap_seconds(self) -> float:
        return max(stream.gap_seconds for stream in self.streams)


def wait_for(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)
