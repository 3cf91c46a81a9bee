"""Cases D24 and D25 against the whole system: HTTP, coordinator and worker over real sockets, a small random model."""

from __future__ import annotations

import asyncio
from collections import Counter

import httpx
import pytest

from octavo.cluster.tokenizer import Tokenizer

from .crowd import Doctor, crowd
from .quiet import stays_up
from .support import Background


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
    # Room for most of them, and a queue that the rest does not fit in.
    limits = {"max_waiting": 700, "max_num_batched_tokens": 1024}
    with Background(executor, tokenizer, scheduler=limits) as running:
        system = running.system
        with Doctor(system.url) as doctor:
            replies = asyncio.run(crowd(system.url))
        for reply in replies:
            if isinstance(reply, httpx.HTTPError):
                raise reply
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
        assert set(doctor.statuses) == {200}
        assert system.core.health().workers[0]["status"] == "ready"
        assert system.core._slots["worker-0"].num_losses == 0
        assert system.core.num_unfinished == 0
