"""How many workers, steps and decodes one coordinator carries, over real gRPC on loopback, and where its time goes.

    python benchmarks/coordinator_capacity.py [--profile] [--seconds 6] [--cells 8x32 64x8 ...]

A coordinator, the workers and an ingress, each kind in processes of its own. Workers compute nothing: every step takes
20 ms and gives a token to each of its rows. A cell "8x32" is 8 workers with 32 decodes each. Told of each cell: the
steps that the workers would make alone and those that they made; the coordinator's processor time a step and a token;
and what follows for one core that does nothing else. All processes share the machine, so what is "made" is a lower
bound where workers and ingress are short of cores themselves; the processor time is not.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import io
import multiprocessing
import pstats
import sys
import time
from collections.abc import Coroutine
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import psutil

from octavo.cluster.coordinator_client import GrpcBackend
from octavo.cluster.coordinator_config import CoordinatorConfig
from octavo.cluster.coordinator_core import CoordinatorCore
from octavo.cluster.coordinator_servicer import CoordinatorServer
from octavo.protos.types import (
    CachedPrefix,
    ModelInfo,
    Request,
    SamplingParams,
    StepPlan,
    StepResult,
    WorkerInfo,
)
from octavo.worker.servicer import WorkerServer

MODEL = ModelInfo(name="none", vocab_size=50_000, max_model_len=200_000, eos_token_ids=())
CELLS = ("8x8", "8x32", "8x128", "32x8", "32x32", "64x8", "64x32", "128x8")
STEP_SECONDS = 0.02
WORKERS_PER_PROCESS = 32
PROMPT_TOKENS = 64
START_SECONDS_MAX = 60.0
PROFILE_LINES = 30


class Idle:
    """An executor whose steps take a while and give 1s."""

    runs_ahead = False

    def __init__(self, worker_id: str) -> None:
        self.info = WorkerInfo(
            worker_id=worker_id,
            model=MODEL,
            device="cpu",
            dtype="none",
            block_size=16,
            num_blocks=400_000,
            num_host_blocks=0,
            max_num_seqs=512,
            kv_bytes_per_block=1024,
            decode_step_seconds=STEP_SECONDS,
            prefill_tokens_per_second=1e5,
        )

    def execute(self, plan: StepPlan) -> StepResult:
        time.sleep(STEP_SECONDS)
        tokens = np.ones(len(plan.sample_rows), np.int32)
        return StepResult(step_id=plan.step_id, epoch=plan.epoch, token_ids=tokens, step_seconds=STEP_SECONDS)

    def cached_prefixes(self) -> list[CachedPrefix]:
        return []

    def reset(self) -> None:
        pass


def run_loop(main: Coroutine[Any, Any, None]) -> None:
    """On the loop that Ray's actors would use."""
    try:
        import uvloop

        uvloop.run(main)
    except ImportError:
        asyncio.run(main)


def coordinator(pipe: Connection, num_workers: int, profile: bool) -> None:
    async def main() -> None:
        core = CoordinatorCore(
            CoordinatorConfig(
                worker_ids=tuple(f"w{number}" for number in range(num_workers)),
                scheduler_options={"max_num_batched_tokens": 8192},
                lease_seconds=60.0,
                unfinished_requests_max=100_000,
            )
        )
        server = CoordinatorServer(core)
        pipe.send(await server.start())
        profiler = cProfile.Profile()
        while True:
            command = await asyncio.to_thread(pipe.recv)
            if command == "stop":
                break
            if command == "begin" and profile:
                profiler.enable()
            elif command == "end" and profile:
                profiler.disable()
                text = io.StringIO()
                pstats.Stats(profiler, stream=text).sort_stats("tottime").print_stats(PROFILE_LINES)
                print(text.getvalue(), file=sys.stderr)
            elif command not in ("begin", "end"):
                core.announce(*command)
        await core.close()
        await server.stop(0)

    run_loop(main())


def workers(pipe: Connection, first: int, count: int) -> None:
    async def main() -> None:
        servers = []
        for number in range(first, first + count):
            server = WorkerServer(Idle(f"w{number}"), on_fatal=lambda error: None)
            servers.append(server)
            pipe.send((f"w{number}", await server.start()))
        await asyncio.to_thread(pipe.recv)
        for server in servers:
            await server.stop()

    run_loop(main())


async def measure(
    address: str, coordinator_pipe: Connection, process: psutil.Process, decodes: int, seconds: float
) -> tuple[float, float, float]:
    """(steps a second, tokens a second that arrived, seconds of the coordinator's processor a second)."""

    async def find() -> str:
        return address

    backend = GrpcBackend(MODEL, find)
    backend.start()
    await backend.wait_connected(START_SECONDS_MAX)
    while not (await backend.health()).status.accepts_requests or (
        any(worker["status"] != "ready" for worker in (await backend.health()).workers)
    ):
        await asyncio.sleep(0.1)
    arrived = 0

    async def follow(number: int) -> None:
        nonlocal arrived
        prompt = np.full(PROMPT_TOKENS, number % MODEL.vocab_size, np.int32)
        params = SamplingParams(max_tokens=100_000)
        async for delta in backend.submit(
            Request(request_id=str(number), prompt_token_ids=prompt, params=params, seed=0)
        ):
            arrived += len(delta.token_ids)

    calls = [asyncio.create_task(follow(number)) for number in range(decodes)]
    while (await backend.stats())["running"] < decodes:
        await asyncio.sleep(0.2)
    await asyncio.sleep(1.0)
    coordinator_pipe.send("begin")
    begin, steps, before = time.monotonic(), (await backend.stats())["steps"], arrived
    cpu = sum(process.cpu_times()[:2])
    await asyncio.sleep(seconds)
    cpu = sum(process.cpu_times()[:2]) - cpu
    steps, arrived_then = (await backend.stats())["steps"] - steps, arrived - before
    spent = time.monotonic() - begin
    coordinator_pipe.send("end")
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    await backend.close()
    return steps / spent, arrived_then / spent, cpu / spent


def run_cell(num_workers: int, decodes: int, seconds: float, profile: bool) -> str:
    """A line of the table."""
    context = multiprocessing.get_context("spawn")
    near, far = context.Pipe()
    processes = [context.Process(target=coordinator, args=(far, num_workers, profile), daemon=True)]
    processes[0].start()
    address = near.recv()
    pipes = []
    for first in range(0, num_workers, WORKERS_PER_PROCESS):
        pipe, end = context.Pipe()
        count = min(WORKERS_PER_PROCESS, num_workers - first)
        process = context.Process(target=workers, args=(end, first, count), daemon=True)
        process.start()
        processes.append(process)
        pipes.append(pipe)
        for _ in range(count):
            near.send(pipe.recv())
    steps, tokens, cpu = asyncio.run(
        measure(address, near, psutil.Process(processes[0].pid), num_workers * decodes, seconds)
    )
    near.send("stop")
    for pipe in pipes:
        pipe.send("stop")
    for process in processes:
        process.join(10)
        if process.is_alive():
            process.kill()
    return (
        f"| {num_workers} | {decodes} | {num_workers / STEP_SECONDS:.0f} | {steps:.0f} | {tokens:.0f} | {cpu:.0%} "
        f"| {1e6 * cpu / steps:.0f} | {1e6 * cpu / (steps * decodes):.1f} | {steps / cpu:.0f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cells", nargs="+", default=CELLS)
    parser.add_argument("--seconds", type=float, default=6.0, help="of each measurement")
    parser.add_argument("--profile", action="store_true", help="of the coordinator, to standard error")
    args = parser.parse_args()
    print(
        "| workers | decodes each | steps/s alone | made | tokens/s arrived | coordinator | us a step | us a token "
        "| steps/s a core |"
    )
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    for cell in args.cells:
        num_workers, decodes = map(int, cell.split("x"))
        print(run_cell(num_workers, decodes, args.seconds, args.profile), flush=True)


if __name__ == "__main__":
    main()
