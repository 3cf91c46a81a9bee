"""Calls of /v1/completions on a served system, and answers that can be compared under rule R1."""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import replace

import httpx
import numpy as np

from ..golden import assert_equals_entry
from .support import served

NUM_BLOCKS, BUDGET = 400, 256


def build(**options):
    from octavo.worker.build import build_executor
    from octavo.worker.config import WorkerConfig

    return build_executor(
        WorkerConfig(worker_id="worker-0", max_num_batched_tokens=BUDGET, max_num_seqs=32, **options)
    )


class Http:
    """Calls one served system. Everything is greedy and ignores EOS unless told otherwise."""

    def __init__(self, system, client):
        self.system, self._client = system, client

    async def post(self, prompt, **fields):
        body = {
            "prompt": prompt,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            **fields,
        }
        return await self._client.post(f"{self.system.url}/v1/completions", json=body)

    async def ask(self, prompt, **fields):
        """A reply as an `Answer`."""
        response = await self.post(prompt, **{"logprobs": 2, **fields})
        assert response.status_code == 200, response.text
        return Answer(response.json())

    async def ask_all(self, prompts, **fields):
        """All at once."""
        return await asyncio.gather(*(self.ask(prompt, **fields) for prompt in prompts))

    async def stream(self, prompt, **fields):
        """Text and token ids of each choice, as a stream tells them."""
        response = await self.post(prompt, stream=True, **fields)
        blocks = response.text.split("\n\n")
        assert blocks[-2:] == ["data: [DONE]", ""]
        found = {}
        for block in blocks[:-2]:
            for choice in json.loads(block.removeprefix("data: "))["choices"]:
                text, ids = found.get(choice["index"], ("", []))
                found[choice["index"]] = (text + choice["text"], ids + choice.get("token_ids", []))
        return found


class Answer:
    def __init__(self, reply):
        self.choices = reply["choices"]
        assert [choice["index"] for choice in self.choices] == list(range(len(self.choices)))
        self.usage = reply["usage"]
        self.cached = self.usage["prompt_tokens_details"]["cached_tokens"]

    @property
    def texts(self):
        return [choice["text"] for choice in self.choices]

    @property
    def token_ids(self):
        return self.choices[0]["token_ids"]

    @property
    def first_logprob(self):
        return self.choices[0]["logprobs"]["token_logprobs"][0]

    def assert_equals(self, solo):
        """Rule R1 against the first choice of another run."""
        block = solo.choices[0]["logprobs"]
        tops = [sorted(entries.values(), reverse=True) for entries in block["top_logprobs"]]
        margins = [values[0] - values[1] for values in tops]
        entry = {"id": "solo", "token_ids": solo.token_ids, "margins": margins}
        assert len(self.token_ids) == len(solo.token_ids)
        assert_equals_entry(entry, self.token_ids)


@contextlib.asynccontextmanager
async def http(executor, tokenizer, num_blocks=NUM_BLOCKS):
    """A new coordinator before `executor`, of whose pool it may use `num_blocks`: no prefix is cached yet."""
    whole = executor.info
    executor.info = replace(whole, num_blocks=num_blocks)
    try:
        async with (
            served(executor, tokenizer, max_num_batched_tokens=BUDGET) as system,
            httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=32)) as client,
        ):
            yield Http(system, client)
            stats = await system.idle_stats()
            assert stats["blocks_free"] + stats["blocks_cached"] == num_blocks
    finally:
        executor.info = whole


def ids(count, seed):
    return np.random.default_rng(seed).integers(100, 40_000, count).tolist()
