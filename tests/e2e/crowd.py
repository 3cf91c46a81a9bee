"""Case D25 with everything that serves: Ray, its HTTP proxy, the default model.

python -m tests.e2e.crowd [--chats 1200]

So many short chats at once, while /health is asked every half second. Prints how calls ended and how long /health
took, and exits 1 where a call got neither an answer nor a refusal, or a worker was lost.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import threading
import time
from collections import Counter

import httpx
import numpy as np

from octavo.cluster.service import Service
from octavo.cluster.service_config import ServiceConfig


class Doctor(threading.Thread):
    """Asks for /health, in a thread of its own: the loop of 1,200 clients is late by itself."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.seconds: list[float] = []
        self.ended = threading.Event()
        self._client = httpx.Client(base_url=url, timeout=60, trust_env=False)
        self.start()

    def run(self) -> None:
        while not self.ended.wait(0.5):
            begin = time.perf_counter()
            self._client.get("/health").raise_for_status()
            self.seconds.append(time.perf_counter() - begin)


async def crowd(url: str, model: str, num_chats: int) -> Counter[int | str]:
    """Calls by status, or by the name of what broke them."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits, trust_env=False) as client:

        async def chat(number: int) -> int | str:
            message = {"role": "user", "content": f"Count to {number}."}
            body = {"model": model, "messages": [message], "max_tokens": 4}
            try:
                return (await client.post("/v1/chat/completions", json=body)).status_code
            except httpx.HTTPError as error:
                return type(error).__name__

        return Counter(await asyncio.gather(*map(chat, range(num_chats))))


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
        doctor = Doctor(service.url)
        ends = asyncio.run(crowd(service.url, service.model_name, options.chats))
        seconds = time.monotonic() - begin
        doctor.ended.set()
        doctor.join()
        workers = httpx.get(f"{service.url}/stats", trust_env=False).json()["workers"]
    finally:
        service.stop()
    health = doctor.seconds
    p50, p99 = np.quantile(health, (0.5, 0.99))
    print(f"{options.chats} chats in {seconds:.1f} s: {dict(ends)}")
    print(f"/health, {len(health)} times: p50 {p50:.3f} s, p99 {p99:.3f} s, longest {max(health):.3f} s")
    losses = sum(worker["losses"] for worker in workers.values())
    print(f"workers lost: {losses}")
    sys.exit(bool(losses or ends.keys() - {200, 429, 503}))


if __name__ == "__main__":
    main()
