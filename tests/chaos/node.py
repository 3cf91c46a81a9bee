"""One process of a system under test, for its supervisor (`system.py`) to start, freeze and kill.

    python -m tests.chaos.node coordinator FOLDER --workers 3 [--lease SECONDS]
    python -m tests.chaos.node worker FOLDER --id worker-0
    python -m tests.chaos.node ingress FOLDER --requests 6

What Ray does in the served system (naming, announcing) goes through FOLDER here: a file with the coordinator's
address, and a socket on which workers announce themselves. Workers run the real executor and sampler over a pool
that holds tokens instead of KV, so a wrong block gives wrong tokens. Coordinator and workers check all their
invariants as they run, and end with an error when one is broken (rule R2).
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

CHECK_SECONDS = 0.05
ANNOUNCE_SECONDS = 0.1
NUM_BLOCKS, MAX_NUM_SEQS, MAX_MODEL_LEN, BUDGET = 1600, 64, 400, 256
STEP_SECONDS = 0.008
"""Added to each step, so that streams last."""


def address_file(folder: Path) -> Path:
    return folder / "coordinator"


def announce_socket(folder: Path) -> str:
    return str(folder / "announce.sock")


def write_whole(path: Path, text: str) -> None:
    """A reader sees all of it or the old one."""
    draft = path.with_suffix(".new")
    draft.write_text(text)
    os.replace(draft, path)


async def coordinator(folder: Path, num_workers: int, lease_seconds: float | None) -> None:
    from octavo.cluster.coordinator_config import CoordinatorConfig
    from octavo.cluster.coordinator_core import CoordinatorCore
    from octavo.cluster.coordinator_servicer import CoordinatorServer

    core = CoordinatorCore(
        CoordinatorConfig(
            worker_ids=tuple(f"worker-{number}" for number in range(num_workers)),
            scheduler_options={"max_num_batched_tokens": BUDGET},
            lease_seconds=lease_seconds,
        )
    )

    async def hear(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        core.announce(**json.loads(await reader.readline()))
        writer.close()

    Path(announce_socket(folder)).unlink(missing_ok=True)
    listener = await asyncio.start_unix_server(hear, announce_socket(folder))
    server = CoordinatorServer(core)
    write_whole(address_file(folder), await server.start())
    while listener.is_serving():
        await asyncio.sleep(CHECK_SECONDS)
        for scheduler in core._schedulers().values():
            scheduler.check_integrity()


def pool_executor(worker_id: str, make_executor: Callable[..., Any]) -> Any:
    """The real executor and sampler over a pool of tokens; it checks its invariants after each step. `make_executor`:
    that of `executor_support`, which brings torch."""

    executor, _ = make_executor(
        num_blocks=NUM_BLOCKS,
        max_num_seqs=MAX_NUM_SEQS,
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=BUDGET,
    )
    executor.info = dataclasses.replace(
        executor.info,
        worker_id=worker_id,
        # A real worker measures these at start; without them one that rejoins is compared with what others measured.
        prefill_tokens_per_second=20_000.0,
        decode_step_seconds=STEP_SECONDS,
    )
    execute = executor.execute

    def checked(plan):
        result = execute(plan)
        executor.check_integrity()
        time.sleep(STEP_SECONDS)
        return result

    executor.execute = checked
    return executor


async def worker(folder: Path, worker_id: str) -> None:
    from octavo.worker.servicer import WorkerServer

    from ..worker.executor_support import make_executor

    server = WorkerServer(pool_executor(worker_id, make_executor), on_fatal=end_with)
    announcement = {"worker_id": worker_id, "address": await server.start()}
    while True:
        if not server.servicer.attached:
            try:
                _, writer = await asyncio.open_unix_connection(announce_socket(folder))
            except OSError:
                pass  # it is being restarted
            else:
                writer.write(json.dumps(announcement).encode() + b"\n")
                await writer.drain()
                writer.close()
        await asyncio.sleep(ANNOUNCE_SECONDS)


async def ingress(folder: Path, num_requests: int) -> None:
    """Holds requests open until it is killed."""
    from .system import open_backend
    from .traffic import make_requests

    backend = await open_backend(folder)

    async def follow(request) -> None:
        async for _ in backend.submit(request):
            pass

    await asyncio.gather(*map(follow, make_requests("doomed", greedy=num_requests, sampled=0)))
    await asyncio.sleep(3600)


async def end_with_parent() -> None:
    """Nothing outlives the supervisor, however that ended."""
    parent = os.getppid()
    while os.getppid() == parent:
        await asyncio.sleep(0.5)
    os._exit(0)


async def run(role: Coroutine[Any, Any, None]) -> None:
    await asyncio.gather(role, end_with_parent())


def end_with(error: BaseException) -> None:
    traceback.print_exception(error, file=sys.stderr)
    sys.stderr.flush()
    os._exit(70)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=["coordinator", "worker", "ingress"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--lease", type=float, default=None)
    parser.add_argument("--id", default="worker-0")
    parser.add_argument("--requests", type=int, default=6)
    args = parser.parse_args()
    roles = {
        "coordinator": lambda: coordinator(args.folder, args.workers, args.lease),
        "worker": lambda: worker(args.folder, args.id),
        "ingress": lambda: ingress(args.folder, args.requests),
    }
    try:
        asyncio.run(run(roles[args.role]()))
    except BaseException as error:
        end_with(error)


if __name__ == "__main__":
    main()
