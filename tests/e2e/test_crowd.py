"""Cases D24 and D25 against the whole system: HTTP, coordinator and worker over real sockets, a small random model."""

from __future__ import annotations

import asyncio
from collections import Counter

import httpx
import pytest

from octavo.cluster.tokenizer import Tokenizer

from .quiet import stays_up
from .support import Background

NUM_CHATS = 1200


@pytest.fixture(scope="module")
def executor(tiny_model_dir):
    from octavo.worker.build import build_executor
    from octavo.worker.config import WorkerConfig

    folder = tiny_model_dir("llama", vocab_size=49_152, num_hidden_layers=1)
    return build_executor(
        WorkerConfig(
            worker_id="worker-0",
            model=str(folder),
            device="cpu",
            num_blocks=4000,
            max_num_batched_tokens=1024,
            max_num_seqs=256,
        )
    )


@pytest.fixture(scope="module")
def tokenizer(default_model_dir):
    return Tokenizer(default_model_dir)


def test_d24_calls_and_streams_that_are_silent_stay_up(executor, tokenizer):
    """Thirty pings pass where gRPC's own limits allow two."""
    asyncio.run(stays_up(executor, tokenizer, seconds=1.5, keepalive_seconds=0.05))


def test_d25_a_crowd_gets_answers_or_refusals_and_health_answers_meanwhile(executor, tokenizer):
    async def crowd(url: str) -> tuple[list[httpx.Response], list[int]]:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with (
            httpx.AsyncClient(base_url=url, timeout=120, limits=limits, trust_env=False) as client,
            httpx.AsyncClient(base_url=url, timeout=30, trust_env=False) as doctor,
        ):
            health: list[int] = []

            async def watch() -> None:
                while True:
                    health.append((await doctor.get("/health")).status_code)
                    await asyncio.sleep(0.5)

            async def chat(number: int) -> httpx.Response:
                message = {"role": "user", "content": f"Count to {number}."}
                return await client.post(
                    "/v1/chat/completions", json={"messages": [message], "max_tokens": 4}
                )

            watching = asyncio.create_task(watch())
            replies = await asyncio.gather(*map(chat, range(NUM_CHATS)))
            watching.cancel()
            return list(replies), health

    # Room for most of them, and a queue that the rest does not fit in.
    limits = {"max_waiting": 700, "max_num_batched_tokens": 1024}
    with Background(executor, tokenizer, scheduler=limits) as running:
        system = running.system
        replies, health = asyncio.run(crowd(system.url))
        counts = Counter(reply.status_code for reply in replies)
        assert counts.keys() <= {200, 429, 503}
        assert counts[200] >= 700
        for reply in replies:
            body = reply.json()
            if reply.status_code == 200:
                assert body["usage"]["completion_tokens"] >= 1
            else:
                assert body["error"]["message"]
                assert int(reply.headers["retry-after"]) >= 1
        assert set(health) == {200}
        assert system.core.health().workers[0]["status"] == "ready"
        assert system.core._slots["worker-0"].num_losses == 0
        assert system.core.num_unfinished == 0
