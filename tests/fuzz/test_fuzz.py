"""Nearly right bodies against the served system with a model: no 5xx, no hang, and a neighbour that does not notice."""

from __future__ import annotations

import asyncio

import pytest

from octavo.cluster.tokenizer import Tokenizer

from ..e2e.support import Background
from ..tiny_model import tiny_model
from .attack import attack
from .bodies import mutated

COUNT = 500


@pytest.fixture(scope="module")
def background(default_model_dir, tmp_path_factory):
    from octavo.worker.build import build_executor
    from octavo.worker.config import WorkerConfig

    folder = tiny_model(tmp_path_factory.mktemp("tiny"))
    options = {"num_blocks": 400, "max_num_batched_tokens": 256, "max_num_seqs": 64, "max_model_len": 192}
    executor = build_executor(WorkerConfig(worker_id="worker-0", model=str(folder), device="cpu", **options))
    jobs_dir = str(tmp_path_factory.mktemp("jobs"))
    with Background(executor, Tokenizer(folder), jobs_dir=jobs_dir) as running:
        yield running


def test_mutated_bodies_beside_a_neighbour(background):
    """`python -m tests.fuzz.run` sends 10,000."""
    verdict = asyncio.run(attack(background.system.url, mutated(6, COUNT)))
    assert not verdict.faults, "\n".join(verdict.faults[:10])
    assert sum(verdict.statuses.values()) == COUNT
    assert verdict.statuses[200] > COUNT // 10, "bodies that are no longer nearly right show nothing"
    assert verdict.neighbours
    assert background.idle_stats()["blocks_used"] == 0


def test_the_document_of_the_api_is_one(background):
    import httpx

    document = httpx.get(f"{background.system.url}/openapi.json").json()
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize", "/v1/batches"):
        operation = document["paths"][path]["post"]
        (content,) = operation["requestBody"]["content"].values()
        assert content["schema"]["properties"], path
        assert {"200", "4XX", "5XX"} <= operation["responses"].keys()
