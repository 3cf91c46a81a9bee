"""Forks, best_of and beams through the front doors, with the real model."""

from __future__ import annotations

import asyncio
import gc
import itertools

import openai
import pytest

from octavo import Engine, SamplingParams
from octavo.cluster.async_client import AsyncClient
from octavo.cluster.tokenizer import Tokenizer
from octavo.protos.errors import InvalidRequestError, NotFoundError

from .completions import NUM_BLOCKS, build, http

pytestmark = pytest.mark.model

PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def tokenizer(default_model_dir):
    made = Tokenizer(default_model_dir)
    yield made
    made.close()


@pytest.fixture(scope="module")
def executor(default_model_dir):
    return build(num_blocks=NUM_BLOCKS)


def test_best_of_is_the_best_of_what_n_gives(executor, tokenizer):
    sampled = {"seed": 1, "temperature": 0.9, "max_tokens": 10, "logprobs": 0}

    async def test():
        async with http(executor, tokenizer) as api:
            four = await api.ask(PROMPT, n=4, **sampled)
            best = await api.ask(PROMPT, n=2, best_of=4, **sampled)
            unasked = await api.ask(PROMPT, n=2, best_of=4, **{**sampled, "logprobs": None})

        def mean(choice):
            values = choice["logprobs"]["token_logprobs"]
            return sum(values) / len(values)

        ranked = sorted(four.choices, key=mean, reverse=True)
        assert [choice["token_ids"] for choice in best.choices] == [
            choice["token_ids"] for choice in ranked[:2]
        ]
        assert best.texts == unasked.texts
        assert best.usage["completion_tokens"] == 40

    asyncio.run(test())


def test_beams_over_http(executor, tokenizer):
    async def test():
        async with http(executor, tokenizer) as api:
            fields = {"beam_width": 3, "n": 2, "max_tokens": 8, "logprobs": None}
            beams = await api.ask(PROMPT, **fields)
            assert [choice["finish_reason"] for choice in beams.choices] == ["length", "length"]
            scores = [choice["score"] for choice in beams.choices]
            assert scores == sorted(scores, reverse=True)
            assert await api.stream(PROMPT, **fields) == {
                choice["index"]: (choice["text"], choice["token_ids"]) for choice in beams.choices
            }
            greedy = await api.ask(PROMPT, max_tokens=8)
            one = await api.ask(PROMPT, beam_width=1, max_tokens=8)
            one.assert_equals(greedy)
            chosen = greedy.choices[0]["logprobs"]["token_logprobs"]
            assert one.choices[0]["score"] == pytest.approx(sum(chosen) / 8, abs=1e-3)

    asyncio.run(test())


def test_forks_over_http_by_either_client(executor, tokenizer):
    greedy = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)

    async def test():
        async with http(executor, tokenizer) as api:
            alone = await api.ask(PROMPT, max_tokens=48)
            async with (
                AsyncClient(api.system.url) as client,
                openai.AsyncOpenAI(base_url=f"{api.system.url}/v1", api_key="any", max_retries=0) as theirs,
            ):
                stream = client.stream(PROMPT, greedy, cache_salt="tenant")
                pieces = [await anext(stream) for _ in range(5)]
                fork = await client.fork(stream, greedy)
                at = fork.forked_at
                assert at >= 5
                (output,) = fork.outputs
                fork_ids = list(output.token_ids)
                assert alone.token_ids == [*alone.token_ids[:at], *fork_ids][:48]
                assert fork.prompt_token_ids[-at:] == tuple(alone.token_ids[:at])
                # Its parent's prompt was there, under the parent's salt.
                assert fork.metrics.cached_tokens > 0
                pieces += [piece async for piece in stream]
                assert "".join(pieces) == alone.texts[0]
                assert (
                    tokenizer.continuation(alone.token_ids[:at] + fork_ids)[: len(alone.texts[0])]
                    == (alone.texts[0])
                )
                with pytest.raises(NotFoundError) as caught:
                    await client.fork(stream)
                assert caught.value.param == "request_id"

                raw = await theirs.completions.with_raw_response.create(
                    model="SmolLM2-135M-Instruct", prompt=PROMPT, stream=True, max_tokens=60, temperature=0,
                    n=2, extra_body={"ignore_eos": True},
                )  # fmt: skip
                chunks = raw.parse()
                async for _ in chunks:
                    request_id = raw.headers["x-octavo-request-id"]
                    forked = client.fork_stream(request_id, greedy, branch=1)
                    await anext(forked)
                    assert forked.forked_at is not None
                    await forked.aclose()
                    break
                await chunks.close()

    asyncio.run(test())


def test_forks_of_the_engine():
    greedy = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    with Engine(num_blocks=64, max_num_seqs=8) as engine:
        (alone,) = engine.generate([PROMPT], greedy)
        parent = engine.stream(PROMPT, greedy)
        started = [next(parent) for _ in range(4)]
        fork = engine.fork(parent)
        assert fork.forked_at >= 4
        assert fork.num_prompt_tokens == parent.num_prompt_tokens + fork.forked_at
        sampled = engine.fork(parent.request_id, SamplingParams(seed=1, max_tokens=5, n=2), branch=0)
        rest = [token for delta in fork for token in delta.token_ids]
        wanted = list(alone.outputs[0].token_ids)
        assert wanted[fork.forked_at :] == rest
        assert {delta.index for delta in sampled} == {0, 1}
        told = [token for delta in itertools.chain(started, parent) for token in delta.token_ids]
        assert told == wanted
        with pytest.raises(NotFoundError):
            engine.fork(parent)
        # Without a seed of its own it says something else than its parent.
        bold = SamplingParams(temperature=1.0, seed=5, max_tokens=32, ignore_eos=True)
        parent = engine.stream(PROMPT, bold)
        first = next(parent)
        fork = engine.fork(parent)
        other = [token for delta in fork for token in delta.token_ids]
        own = [token for delta in itertools.chain([first], parent) for token in delta.token_ids]
        assert len(other) == 32 - fork.forked_at
        assert other != own[fork.forked_at :]
        beams = engine.stream(PROMPT, SamplingParams(beam_width=2, max_tokens=40, ignore_eos=True))
        with pytest.raises(InvalidRequestError) as caught:
            engine.fork(beams)
        assert caught.value.param == "request_id"
        with pytest.raises(InvalidRequestError) as caught:
            engine.stream(PROMPT, SamplingParams(best_of=2))
        assert caught.value.param == "best_of"
        beams.close()
        assert engine.stats()["running"] == 0
        engine.check_integrity()
    gc.collect()
