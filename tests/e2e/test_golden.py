"""64 real prompts, all at once, equal Hugging Face `generate` under rule R1: in process, over gRPC, over HTTP."""

from __future__ import annotations

import asyncio
import gc
import json
import uuid

import httpx
import pytest

from octavo import Engine, SamplingParams
from octavo.cluster.tokenizer import Tokenizer
from octavo.protos.types import Request, checked_prompt_ids

from .support import served

pytestmark = pytest.mark.model
GREEDY = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("budget", [64, 512])
def test_engine_equals_reference(budget, golden, default_model_dir):
    with Engine(max_num_batched_tokens=budget, num_blocks=3000, max_num_seqs=64) as engine:
        outputs = engine.generate([prompt.prompt for prompt in golden.prompts], GREEDY)
        stats = engine.stats()
        engine.check_integrity()
    for index, output in enumerate(outputs):
        golden.assert_same_prompt(index, output.prompt_token_ids)
        assert len(output.outputs[0].token_ids) == 48
        golden.assert_equals_reference(index, output.outputs[0].token_ids)
    assert stats["max_step_tokens"] <= budget
    assert stats["blocks_used"] == 0
    gc.collect()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("budget", [64, 512])
def test_grpc_and_http_equal_reference(budget, golden, default_model_dir):
    """Half of the prompts come over gRPC and half as HTTP streams, at the same time; with the other budget the other
    way round."""
    from octavo.worker.build import build_executor
    from octavo.worker.config import WorkerConfig

    executor = build_executor(
        WorkerConfig(worker_id="worker-0", num_blocks=4000, max_num_batched_tokens=budget, max_num_seqs=128)
    )
    tokenizer = Tokenizer(default_model_dir)
    vocab_size = executor.info.model.vocab_size

    async def over_grpc(system, index):
        ids = checked_prompt_ids(tokenizer.encode(golden.prompts[index].prompt), vocab_size)
        request = Request(request_id=uuid.uuid4().hex, prompt_token_ids=ids, params=GREEDY, seed=0)
        tokens = []
        async for delta in system.backend.submit(request):
            assert delta.error is None
            assert delta.offset == len(tokens)
            tokens += delta.token_ids
        return tokens

    async def over_http(client, system, index):
        body = {
            "model": executor.info.model.name,
            "prompt": golden.prompts[index].prompt,
            "max_tokens": 48,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        tokens, text, last = [], "", None
        async with client.stream("POST", f"{system.url}/v1/completions", json=body) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if not line.startswith("data: "):
                    continue
                last = line[6:]
                if last != "[DONE]":
                    (choice,) = json.loads(last)["choices"]
                    tokens += choice.get("token_ids") or []
                    text += choice["text"]
        assert last == "[DONE]"
        assert text == tokenizer.continuation(tokens, skip_special_tokens=True)
        return tokens

    async def main():
        async with served(executor, tokenizer, max_num_batched_tokens=budget) as system:
            limits = httpx.Limits(max_connections=100)
            async with httpx.AsyncClient(timeout=600, limits=limits) as client:
                answers = await asyncio.gather(
                    *(
                        over_grpc(system, index)
                        if (index % 2 == 0) == (budget == 64)
                        else over_http(client, system, index)
                        for index in range(64)
                    )
                )
            stats = await system.idle_stats()
        assert stats["max_step_tokens"] <= budget
        return answers

    for index, tokens in enumerate(asyncio.run(main())):
        assert len(tokens) == 48
        golden.assert_equals_reference(index, tokens)
