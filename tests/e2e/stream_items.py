"""How many streamed events one HTTP process carries, and how evenly they come, at several limits of its own.

    python -m tests.e2e.stream_items [--streams 16 64 128] [--limits 0 1500 8000]

The real app and its own port in a process by itself, over a scripted backend that gives every stream a token each
20 ms; the clients are bare sockets. A limit is `HttpConfig.stream_items_per_second`, 0 none. Told of each: events a
second, the server's processor time an event and a token, and the time between two reads that a client sees.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import psutil

from octavo.cluster.listener import Listener
from octavo.cluster.openai.app import create_app
from octavo.cluster.openai.config import HttpConfig
from octavo.cluster.tokenizer import Tokenizer
from octavo.worker.default_model import default_model_dir

from ..cluster.http.conftest import HELLO, ScriptedBackend

HOST = "127.0.0.1"
STEP_SECONDS = 0.02
NUM_TOKENS = 200


def server(pipe: Connection, limit: float) -> None:
    """A process of its own, on the loop that a replica has. Tells its port."""
    import uvloop

    async def pause(request: Any, step: int) -> None:
        await asyncio.sleep(STEP_SECONDS)

    async def main() -> None:
        tokenizer = Tokenizer(default_model_dir())
        backend = ScriptedBackend(tokenizer)
        backend.answer = lambda request, branch: (HELLO[:-1] * NUM_TOKENS)[:NUM_TOKENS]
        backend.before_step = pause
        app = create_app(backend, tokenizer, HttpConfig(stream_items_per_second=limit))
        pipe.send(await Listener(app, HOST, 0, drain_seconds=1).start())
        await asyncio.Event().wait()

    uvloop.run(main())


async def follow(port: int, num_streams: int) -> tuple[int, list[float]]:
    """(events of all streams, seconds between two reads of each)"""
    body = json.dumps({"prompt": "Hi", "max_tokens": NUM_TOKENS, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    events, gaps = 0, []

    async def one() -> None:
        nonlocal events
        reader, writer = await asyncio.open_connection(HOST, port)
        writer.write(head.encode() + body)
        last = None
        while data := await reader.read(65536):
            now = time.monotonic()
            events += data.count(b"data: ")
            if last is not None:
                gaps.append(now - last)
            last = now
        writer.close()

    await asyncio.gather(*(one() for _ in range(num_streams)))
    return events, gaps


def measure(num_streams: int, limit: float) -> str:
    """A line of the table."""
    context = multiprocessing.get_context("spawn")
    near, far = context.Pipe()
    serving = context.Process(target=server, args=(far, limit), daemon=True)
    serving.start()
    port, process = near.recv(), psutil.Process(serving.pid)
    asyncio.run(follow(port, 4))
    cpu, began = sum(process.cpu_times()[:2]), time.monotonic()
    events, gaps = asyncio.run(follow(port, num_streams))
    seconds, cpu = time.monotonic() - began, sum(process.cpu_times()[:2]) - cpu
    serving.kill()
    serving.join()
    p50, p99 = 1e3 * np.quantile(gaps, (0.5, 0.99))
    tokens = num_streams * NUM_TOKENS
    return (
        f"| {num_streams} | {limit:g} | {events / seconds:.0f} | {cpu / seconds:.0%} | {1e6 * cpu / events:.0f} "
        f"| {1e6 * cpu / tokens:.0f} | {p50:.0f} | {p99:.0f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", nargs="+", type=int, default=[16, 64, 128])
    parser.add_argument("--limits", nargs="+", type=float, default=[0.0, 1500.0, 8000.0])
    args = parser.parse_args()
    print("| streams | limit | events/s | server | us an event | us a token | gap p50, ms | p99 |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for num_streams in args.streams:
        for limit in args.limits:
            print(measure(num_streams, limit), flush=True)


if __name__ == "__main__":
    main()
