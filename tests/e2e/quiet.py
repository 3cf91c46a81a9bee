"""Case D24 at its full length: a call that says nothing for two minutes, and streams that carry nothing for as long.

    python -m tests.e2e.quiet [--seconds 120]

The default model, HTTP, coordinator and worker with the keepalive of production; heartbeats are off, so that pings are
all there is on the wire. `test_crowd.py` does the same in seconds, with pings as much faster.
"""

from __future__ import annotations

import argparse
import asyncio
import threading
import time
from typing import Any

import httpx

from octavo.cluster import worker_link
from octavo.cluster.tokenizer import Tokenizer
from octavo.protos import wire

from .support import served

NEVER = 3600.0


async def stays_up(executor: Any, tokenizer: Tokenizer, seconds: float, keepalive_seconds: float) -> None:
    """Fails unless a call that is silent for `seconds` is answered, and another after as long a time without any, over
    the very same streams."""
    gate, execute = threading.Event(), executor.execute

    def held(plan: Any) -> Any:
        assert gate.wait(NEVER)
        return execute(plan)

    executor.execute = held
    # A step that takes so long is meant to.
    first_steps, worker_link.FIRST_STEP_SECONDS_MAX = worker_link.FIRST_STEP_SECONDS_MAX, NEVER
    try:
        async with (
            served(
                executor,
                tokenizer,
                keepalive_seconds=keepalive_seconds,
                heartbeat_seconds=NEVER,
                lease_seconds=NEVER,
            ) as system,
            httpx.AsyncClient(base_url=system.url, timeout=None, trust_env=False) as client,
        ):
            streams = system.backend._commands, system.core._slots["worker-0"].link
            body = {"prompt": "Once upon a time", "max_tokens": 4, "temperature": 0}
            call = asyncio.create_task(client.post("/v1/completions", json=body))
            await asyncio.sleep(seconds)
            assert not call.done()
            gate.set()
            replies = [await call]
            await asyncio.sleep(seconds)
            replies.append(await client.post("/v1/completions", json=body))
            assert [reply.status_code for reply in replies] == [200, 200]
            assert replies[0].json()["choices"] == replies[1].json()["choices"]
            assert streams == (system.backend._commands, system.core._slots["worker-0"].link)
            assert system.core.stats()["moved"] == 0
    finally:
        gate.set()
        executor.execute = execute
        worker_link.FIRST_STEP_SECONDS_MAX = first_steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=120.0)
    args = parser.parse_args()
    from octavo.worker.build import build_executor
    from octavo.worker.config import WorkerConfig
    from octavo.worker.default_model import default_model_dir

    executor = build_executor(WorkerConfig(worker_id="worker-0", num_blocks=64))
    began = time.monotonic()
    asyncio.run(stays_up(executor, Tokenizer(default_model_dir()), args.seconds, wire.KEEPALIVE_SECONDS))
    print(
        f"held: {args.seconds:g} s within a call and as long between two, {time.monotonic() - began:.0f} s in all"
    )


if __name__ == "__main__":
    main()
