"""Case D25 with everything that serves: Ray, its HTTP proxy, the default model.

python -m tests.e2e.crowd [--chats 1200]

So many short chats at once, while /health is asked every half second. Prints how calls ended and how long /health
took, and exits 1 where a call got neither an answer nor a refusal, or a worker was lost.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections import Counter

import httpx
import numpy as np

from octavo.cluster.service import Service
from octavo.cluster.service_config import ServiceConfig


async def crowd(url: str, model: str, num_chats: int) -> tuple[Counter[int | str], list[float]]:
    """(calls by status, or by the name of what broke them; seconds of each /health)."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with (
        httpx.AsyncClient(base_url=url, timeout=300, limits=limits, trust_env=False) as client,
        httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as doctor,
    ):
        health: list[float] = []

        async def watch() -> None:
            while True:
                begin = time.perf_counter()
                (await doctor.get("/health")).raise_for_status()
                health.append(time.perf_counter() - begin)
                await asyncio.sleep(0.5)

        async def chat(number: int) -> int | str:
            message = {"role": "user", "content": f"Count to {number}."}
            body = {"model": model, "messages": [message], "max_tokens": 4}
            try:
                return (await client.post("/v1/chat/completions", json=body)).status_code
            except httpx.HTTPError as error:
                return type(error).__name__

        watching = asyncio.create_task(watch())
        ends = Counter(await asyncio.gather(*map(chat, range(num_chats))))
        watching.cancel()
        return ends, health


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--chats", type=int, default=1200)
    options = parser.parse_args()
    service = Service(ServiceConfig(port=0, jobs_dir=""))
    try:
        service.start()
        begin = time.monotonic()
        ends, health = asyncio.run(crowd(service.url, service.model_name, options.chats))
        seconds = time.monotonic() - begin
        workers = httpx.get(f"{service.url}/stats", trust_env=False).json()["workers"]
    finally:
        service.stop()
    p50, p99 = np.quantile(health, (0.5, 0.99))
    print(f"{options.chats} chats in {seconds:.1f} s: {dict(ends)}")
    print(f"/health, {len(health)} times: p50 {p50:.3f} s, p99 {p99:.3f} s, longest {max(health):.3f} s")
    losses = sum(worker["losses"] for worker in workers.values())
    print(f"workers lost: {losses}")
    sys.exit(bool(losses or ends.keys() - {200, 429, 503}))


if __name__ == "__main__":
    main()
