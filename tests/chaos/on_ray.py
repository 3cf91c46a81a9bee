"""How long clients wait when a part of the served system is killed: the real service on a Ray cluster, over HTTP.

    python -m tests.chaos.on_ray [--repeats 3] [--only FAULT]

40 greedy and 20 sampled streams over three workers, each on a node of its own, that run the real executor and sampler
over a pool that holds tokens in place of KV. In turn kill -9 of a worker actor's process, of the coordinator actor's,
of both, and of everything on a node, whose worker comes back on another one. Prints the longest time between two
events that any client saw, and ends with 1 when a stream is not what it would have been.
"""

from __future__ import annotations

import argparse
import random
import signal
import statistics
import sys
import time
from dataclasses import replace
from typing import Any

from octavo.cluster.service import Service, ServiceConfig
from octavo.worker.config import WorkerConfig
from octavo.worker.default_model import default_model_dir
from octavo.worker.loader import read_model_info, resolve_model

from ..cluster import test_service
from ..cluster.ray_nodes import HttpStreams, RayNodes, wait_for
from ..worker import executor_support, sampling_reference
from ..worker.executor_support import make_executor
from . import node as pool_node
from .node import BUDGET, MAX_MODEL_LEN, pool_executor

NUM_WORKERS, MAX_TOKENS = 3, 160
FAULTS: dict[str, tuple[str, ...]] = {
    "none": (),
    "a worker actor's process": ("worker",),
    "the coordinator actor's process": ("coordinator",),
    "both at once": ("coordinator", "worker"),
    "a node": ("node",),
}


def build_pool(config: WorkerConfig) -> Any:
    """An executor whose model reads its context back out of the pool: a wrong block gives wrong tokens."""
    executor = pool_executor(config.worker_id, make_executor)
    # An ingress serves no other model than its own tokenizer's. Nothing here makes an id that the pool does not know.
    served = read_model_info(resolve_model(config.model))
    executor.info = replace(executor.info, model=replace(served, max_model_len=MAX_MODEL_LEN))
    return executor


def make_bodies(*, greedy: int = 40, sampled: int = 20) -> list[dict[str, Any]]:
    """Prompts of 3 to 60 tokens, half of them with a common beginning; every fourth of the sampled in two branches."""
    rng = random.Random(f"{greedy} {sampled}")
    shared = [rng.randrange(3, 64) for _ in range(24)]
    bodies = []
    for number in range(greedy + sampled):
        prompt = shared[: 24 * (number % 2)] + [rng.randrange(3, 64) for _ in range(rng.randint(3, 36))]
        body = {"prompt": prompt, "max_tokens": MAX_TOKENS - number % 7, "seed": number, "ignore_eos": True}
        body |= (
            {"temperature": 0.0}
            if number < greedy
            else {"temperature": 0.9, "n": 2 if number % 4 == 0 else 1}
        )
        bodies.append(body)
    return bodies


def service_config(ray_address: str, **options: Any) -> ServiceConfig:
    return ServiceConfig(
        model=str(default_model_dir()),
        num_workers=NUM_WORKERS,
        threads_per_worker=1,
        device="cpu",
        ray_address=ray_address,
        max_num_batched_tokens=BUDGET,
        jobs_dir="",
        **options,
    )


def know_the_tests() -> None:
    """Workers are other processes and know nothing of the tests' modules."""
    from ray import cloudpickle

    for module in (sys.modules[__name__], pool_node, executor_support, sampling_reference):
        cloudpickle.register_pickle_by_value(module)


class Run:
    """A service over three nodes."""

    def __init__(self, nodes: RayNodes) -> None:
        config = service_config(nodes.address, port=0)
        self.nodes = nodes
        self.system = test_service.System(Service(config, build=build_pool))

    def node_of(self, worker_id: str) -> Any:
        """The cluster's node on which a worker is."""
        pid = self.system.worker_process(worker_id).ppid()
        return next(one for one in self.nodes.nodes if one.all_processes["raylet"][0].process.pid == pid)

    def strike(self, parts: tuple[str, ...], rng: random.Random) -> None:
        worker_id = f"worker-{rng.randrange(NUM_WORKERS)}"
        if "node" in parts:
            others = [f"worker-{number}" for number in range(NUM_WORKERS)]
            doomed = [one for one in map(self.node_of, others) if one is not self.nodes.head]
            self.nodes.lose(rng.choice(doomed))
            return
        processes = self.system.processes("ray::Coordinator") if "coordinator" in parts else []
        if "worker" in parts:
            processes.append(self.system.worker_process(worker_id))
        for process in processes:
            process.send_signal(signal.SIGKILL)

    def streams(self) -> HttpStreams:
        return HttpStreams(self.system.service.url, make_bodies())

    def fault(self, parts: tuple[str, ...], want: list[dict[int, str]], seed: str) -> float:
        """Longest pause of any client."""
        rng = random.Random(seed)
        streams = self.streams()
        streams.wait_running(rng.randrange(8, 40), 120)
        self.strike(parts, rng)
        assert streams.texts() == want, seed
        if "node" in parts:
            self.nodes.add()
        wait_for(lambda: self.system.client.get("/health").json()["status"] == "ready", 90)
        wait_for(self.system.idle, 20)
        return streams.gap_seconds


def measure(repeats: int, faults: list[str]) -> dict[str, list[float]]:
    know_the_tests()
    gaps: dict[str, list[float]] = {name: [] for name in faults}
    nodes = RayNodes(NUM_WORKERS)
    run = Run(nodes)
    try:
        run.system.start()
        run.streams().texts()  # the first steps of three new processes are no measure of a pause
        want = run.streams().texts()
        for repeat in range(repeats):
            for name in faults:
                gaps[name].append(run.fault(FAULTS[name], want, f"{name} {repeat}"))
                print(f"{name}: {gaps[name][-1]:.2f} s", file=sys.stderr, flush=True)
    finally:
        run.system.service.stop(grace_seconds=0.0)
        nodes.close()
    return gaps


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", choices=list(FAULTS), default=None)
    args = parser.parse_args()
    began = time.monotonic()
    try:
        gaps = measure(args.repeats, [args.only] if args.only else list(FAULTS))
    except AssertionError as error:
        print(f"FAILED: {error}")
        return 1
    print(f"{time.monotonic() - began:.0f} s in all\n")
    print("| kill -9 of | runs | pause, median s | pause, longest s |")
    print("|---|---|---|---|")
    for name, values in gaps.items():
        print(f"| {name} | {len(values)} | {statistics.median(values):.2f} | {max(values):.2f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
