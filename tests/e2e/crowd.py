"""Case D25 with everything that serves: Ray and the default model.

python -m tests.e2e.crowd [--chats 1200] [--rounds 2]

So many short chats at once, while /health is asked every half second from a process of its own. Prints how calls ended
and how long /health took, and exits 1 where a call got neither an answer nor a refusal, or a worker was lost.
`test_crowd.py` does the same with a small model, without Ray.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import httpx
import numpy as np

from octavo.cluster.service import Service
from octavo.cluster.service_config import ServiceConfig

NUM_CHATS = 1200
CALL_SECONDS_MAX = 300.0


class Doctor:
    """`doctor.py` while the context lasts."""

    def __init__(self, url: str) -> None:
        self._command = [sys.executable, str(Path(__file__).with_name("doctor.py")), url]
        self.statuses: list[int] = []
        self.seconds: list[float] = []

    def __enter__(self) -> Doctor:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(self._command, stdin=pipe, stdout=pipe, text=True)
        return self

    def __exit__(self, *_: object) -> None:
        told, _ = self._process.communicate()
        for line in told.splitlines():
            status, seconds = line.split()
            self.statuses.append(int(status))
            self.seconds.append(float(seconds))
        assert self._process.returncode == 0


async def crowd(url: str, num_chats: int = NUM_CHATS) -> list[httpx.Response | httpx.HTTPError]:
    """What each of so many chats at once got, each over a connection of its own."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(
        base_url=url, timeout=CALL_SECONDS_MAX, limits=limits, trust_env=False
    ) as client:

        async def chat(number: int) -> httpx.Response | httpx.HTTPError:
            message = {"role": "user", "content": f"Count to {number}."}
            try:
                return await client.post(
                    "/v1/chat/completions", json={"messages": [message], "max_tokens": 4}
                )
            except httpx.HTTPError as error:
                return error

        return await asyncio.gather(*map(chat, range(num_chats)))


def measure(url: str, num_chats: int) -> set[int | str]:
    """How calls ended: a status, or the name of what broke one."""
    with Doctor(url) as doctor:
        began = time.monotonic()
        replies = asyncio.run(crowd(url, num_chats))
        seconds = time.monotonic() - began
    ends: Counter[int | str] = Counter(
        reply.status_code if isinstance(reply, httpx.Response) else type(reply).__name__ for reply in replies
    )
    assert set(doctor.statuses) == {200}
    p50, p99 = np.quantile(doctor.seconds, (0.5, 0.99))
    print(f"{num_chats} chats in {seconds:.1f} s: {dict(ends)}")
    print(
        f"/health, {len(doctor.seconds)} times: p50 {p50:.3f} s, p99 {p99:.3f} s, longest {max(doctor.seconds):.3f} s"
    )
    return set(ends)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--chats", type=int, default=NUM_CHATS)
    parser.add_argument(
        "--rounds", type=int, default=2, help="the first finds a system that has not served yet"
    )
    options = parser.parse_args()
    service = Service(ServiceConfig(port=0, jobs_dir=""))
    ends: set[int | str] = set()
    try:
        service.start()
        for _ in range(options.rounds):
            ends |= measure(service.url, options.chats)
        workers = httpx.get(f"{service.url}/stats", trust_env=False).json()["workers"]
    finally:
        service.stop()
    losses = sum(worker["losses"] for worker in workers.values())
    print(f"workers lost: {losses}")
    sys.exit(bool(losses or ends - {200, 429, 503}))


if __name__ == "__main__":
    main()
