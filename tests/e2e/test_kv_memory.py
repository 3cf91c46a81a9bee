"""Prefix cache, choices and pools over HTTP with the real model: cases D02 to D06, D08 and D09."""

from __future__ import annotations

import asyncio

import pytest

from octavo.cluster.tokenizer import Tokenizer

from .completions import NUM_BLOCKS, Answer, build, http, ids

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def tokenizer(default_model_dir):
    made = Tokenizer(default_model_dir)
    yield made
    made.close()


@pytest.fixture(scope="module")
def executor(default_model_dir):
    return build(num_blocks=NUM_BLOCKS)


def test_d02_twins_of_one_batch_hit_only_what_was_written(executor, tokenizer):
    twin = ids(81, 2)
    prompts = [twin] * 8 + [twin[:64] + ids(17, 100 + number) for number in range(8)]

    async def test():
        async with http(executor, tokenizer) as api:
            together = await api.ask_all(prompts, max_tokens=8)
            uncached = await api.ask_all(prompts[7:], max_tokens=8, use_prefix_cache=False)
        for prompt, answer, reference in zip(prompts, together, uncached[:1] * 7 + uncached, strict=True):
            answer.assert_equals(reference)
            assert answer.cached <= (80 if prompt == twin else 64)
            assert reference.cached == 0
        assert min(answer.cached for answer in together) == 0

    asyncio.run(test())


@pytest.mark.parametrize("block_size", [8, 16, 24])
def test_d03_prompts_that_are_cached_whole(block_size, executor, tokenizer):
    lengths = (15, 16, 17, 31, 32, 33, 48, 64)
    prompts = [ids(length, length) for length in lengths]

    async def test():
        runs = executor if block_size == 16 else build(num_blocks=100, block_size=block_size)
        async with http(runs, tokenizer, runs.info.num_blocks) as api:
            first, *again = [await api.ask_all(prompts, max_tokens=6) for _ in range(3)]
        assert [answer.cached for answer in first] == [0] * len(prompts)
        for answers in again:
            for length, answer, cold in zip(lengths, answers, first, strict=True):
                answer.assert_equals(cold)
                assert answer.usage["prompt_tokens"] == length
                assert (length - 1) // block_size * block_size <= answer.cached <= length - 1
                assert answer.first_logprob == pytest.approx(cold.first_logprob, abs=1e-4)

    asyncio.run(test())


def test_d04_salts_share_nothing(executor, tokenizer):
    prompt = ids(64, 4)

    async def test():
        async with http(executor, tokenizer) as api:
            answers = [
                await api.ask(prompt, max_tokens=4, **fields)
                for fields in (
                    {"use_prefix_cache": False},
                    {"cache_salt": "a"},
                    {"cache_salt": "b"},
                    {},
                    {"cache_salt": "a"},
                    {"cache_salt": "a", "use_prefix_cache": False},
                )
            ]
        cached = [answer.cached for answer in answers]
        assert cached[:4] == [0, 0, 0, 0]
        assert 48 <= cached[4] <= 63
        assert cached[5] == 0
        for answer in answers:
            answer.assert_equals(answers[0])

    asyncio.run(test())


def test_d05_blocks_that_change_hands_keep_no_old_prefix(executor, tokenizer):
    """A quarter of the case's sizes, in the same proportion."""
    prompts = [ids(10 * 16, 50), ids(15 * 16, 51)]

    async def test():
        async with http(executor, tokenizer, num_blocks=16) as api:
            rounds = [[await api.ask(prompt, max_tokens=4) for prompt in prompts] for _ in range(5)]
        for answers in rounds[1:]:
            for answer, first in zip(answers, rounds[0], strict=True):
                answer.assert_equals(first)

    asyncio.run(test())


def test_d06_what_can_never_fit_is_refused_and_holds_up_nobody(executor, tokenizer):
    async def test():
        async with http(executor, tokenizer, num_blocks=10) as api:
            normal = await api.ask(ids(20, 6), max_tokens=10)
            replies = await asyncio.gather(
                api.post(ids(200, 60)),
                api.post(ids(100, 61), max_tokens=200),
                api.post(ids(20, 6), max_tokens=10),
                api.post(ids(40, 62), n=8),
            )
            assert [reply.status_code for reply in replies] == [400, 400, 200, 400]
            for reply, param in ((replies[0], "prompt"), (replies[1], "max_tokens"), (replies[3], "prompt")):
                error = reply.json()["error"]
                assert error["code"] == "context_length_exceeded"
                assert error["param"] in (param, "max_tokens")
                assert "10" in error["message"]  # the pool
            Answer(replies[2].json()).assert_equals(normal)
            (await api.ask(ids(20, 6), max_tokens=10)).assert_equals(normal)

    asyncio.run(test())


def test_d08_a_seed_does_not_know_its_neighbours(executor, tokenizer):
    """Two choices of one seed are in test_openai.py."""
    sampled = {"temperature": 0.9, "max_tokens": 16}
    prompt = "The capital of France is"

    async def test():
        async with http(executor, tokenizer) as api:
            seeded = {"seed": 42, **sampled}
            alone = await api.ask(prompt, **seeded)
            first, _ = await asyncio.gather(api.ask(prompt, **seeded), api.ask(prompt, **sampled))
            _, second = await asyncio.gather(api.ask(prompt, seed=7, **sampled), api.ask(prompt, **seeded))
            assert first.token_ids == second.token_ids == alone.token_ids

    asyncio.run(test())


def test_d09_choices_share_a_partly_full_block(executor, tokenizer):
    prompt = ids(21, 9)
    tails = [prompt + ids(9, 90), prompt + ids(9, 91)]

    async def test():
        async with http(executor, tokenizer) as api:
            sampled = {"n": 4, "seed": 1, "temperature": 0.9, "max_tokens": 16}
            whole = await api.ask(prompt, **sampled)
            assert len(set(whole.texts)) == 4
            assert {choice["finish_reason"] for choice in whole.choices} == {"length"}
            assert await api.stream(prompt, **sampled) == {
                choice["index"]: (choice["text"], choice["token_ids"]) for choice in whole.choices
            }
            one = await api.ask(prompt, max_tokens=13)
            three = await api.ask(prompt, max_tokens=13, n=3)
            assert len(set(three.texts)) == 1
            three.assert_equals(one)
            beside = await api.ask_all(tails, max_tokens=12)
            for tail, answer in zip(tails, beside, strict=True):
                answer.assert_equals(await api.ask(tail, max_tokens=12, use_prefix_cache=False))

    asyncio.run(test())


def test_a_choice_that_met_its_stop_string_computes_no_more(executor, tokenizer):
    async def test():
        async with http(executor, tokenizer) as api:
            sampled = {"n": 2, "seed": 3, "temperature": 0.9, "max_tokens": 30}
            whole = await api.ask("Once upon a time", **sampled)
            before = (await api.system.idle_stats())["sampled_tokens"]
            # A piece of the first choice's beginning that the second never says.
            first, second = whole.texts
            stop = next(first[at : at + 8] for at in range(5, 40) if first[at : at + 8] not in second)
            cut = await api.ask("Once upon a time", stop=stop, **sampled)
            assert cut.texts == [first[: first.index(stop)], second]
            assert [choice["finish_reason"] for choice in cut.choices] == ["stop", "length"]
            sampled_tokens = (await api.system.idle_stats())["sampled_tokens"] - before
            assert sampled_tokens < 30 + len(cut.token_ids) + 10

    asyncio.run(test())
