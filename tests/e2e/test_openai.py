"""The `openai` client against the real model, behind the real coordinator and worker streams."""

from __future__ import annotations

import threading

import openai
import pytest

from octavo.cluster.tokenizer import Tokenizer

from .support import Background

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def background(default_model_dir):
    from octavo.worker.build import build_executor
    from octavo.worker.config import WorkerConfig

    executor = build_executor(
        WorkerConfig(worker_id="worker-0", num_blocks=600, max_num_batched_tokens=256, max_num_seqs=32)
    )
    tokenizer = Tokenizer(default_model_dir)
    with Background(executor, tokenizer) as running:
        yield running


@pytest.fixture
def client(background):
    with openai.OpenAI(base_url=f"{background.system.url}/v1", api_key="any", max_retries=0) as found:
        yield found


@pytest.fixture
def model(client):
    return client.models.list().data[0].id


def test_chat_completion_and_their_streams_agree(client, model, background):
    messages = [{"role": "user", "content": "Name the capital of France."}]
    options = {"model": model, "temperature": 0, "max_tokens": 24}
    whole = client.chat.completions.create(messages=messages, **options)
    assert "Paris" in whole.choices[0].message.content
    chunks = list(
        client.chat.completions.create(
            messages=messages, stream=True, stream_options={"include_usage": True}, **options
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    # The second call found what the first had computed, all but the token that must run.
    cached = chunks[-1].usage.prompt_tokens_details.cached_tokens
    assert 0 < cached < whole.usage.prompt_tokens

    whole = client.completions.create(prompt="Once upon a time", **options)
    parts = client.completions.create(prompt="Once upon a time", stream=True, **options)
    assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text
    assert background.idle_stats()["blocks_used"] == 0


def test_seeds_repeat_and_choices_differ_beside_neighbours_without_seed(client, model):
    """Case D08: a seeded request does not depend on who shares its batch."""

    def sample(**options):
        reply = client.completions.create(
            model=model, prompt="The capital of France is", temperature=0.9, max_tokens=12, **options
        )
        return [choice.text for choice in reply.choices]

    neighbours = [threading.Thread(target=sample) for _ in range(3)]
    alone = sample(seed=42, n=2)
    for neighbour in neighbours:
        neighbour.start()
    beside = sample(seed=42, n=2)
    for neighbour in neighbours:
        neighbour.join()
    assert alone == beside
    assert alone[0] != alone[1]
    assert sample(seed=42) == alone[:1]


def test_d11_stop_across_tokens(client, model):
    options = {"model": model, "prompt": "x", "logit_bias": {"64": 100}, "max_tokens": 10, "temperature": 0}
    reply = client.completions.create(stop=["PPP"], **options)
    assert (reply.choices[0].text, reply.choices[0].finish_reason) == ("", "stop")
    parts = list(client.completions.create(stop=["PPP"], stream=True, **options))
    assert "".join(part.choices[0].text for part in parts if part.choices) == ""
    assert client.completions.create(**options).choices[0].text == "P" * 10


def test_d12_emoji_streams_equal_the_whole(client, model):
    for max_tokens in (1, 5, 9, 30):
        options = {"model": model, "prompt": "\U0001f9ce" * 10, "max_tokens": max_tokens, "temperature": 0}
        whole = client.completions.create(**options).choices[0].text
        parts = client.completions.create(stream=True, **options)
        assert "".join(part.choices[0].text for part in parts) == whole


def test_d18_bytes_of_log_probabilities_are_the_text(client, model):
    messages = [{"role": "user", "content": "Repeat: " + "\U0001f9ce" * 10}]
    for options in ({}, {"extra_body": {"top_k": 1}}):
        choice = client.chat.completions.create(
            model=model,
            messages=messages,
            logprobs=True,
            top_logprobs=5,
            max_tokens=20,
            temperature=1,
            seed=3,
            **options,
        ).choices[0]
        entries = choice.logprobs.content
        assert all(len(entry.top_logprobs) == 5 for entry in entries)
        assert (
            b"".join(bytes(entry.bytes) for entry in entries).decode(errors="replace")
            == choice.message.content
        )
        if options:
            assert all(entry.logprob == entry.top_logprobs[0].logprob for entry in entries)


def test_prompts_are_scored_as_they_were_made(client, model):
    """What lm-eval does: a whole text is sent with `echo`, and its tokens' log-probabilities come back."""
    options = {"model": model, "logprobs": 1, "temperature": 0}
    made = client.completions.create(
        prompt="The capital of France is", max_tokens=8, extra_body={"return_token_ids": True}, **options
    ).model_dump()
    ids = made["prompt_token_ids"] + made["choices"][0]["token_ids"]
    count = len(made["prompt_token_ids"])
    for limit in (0, 1):
        block = (
            client.completions.create(prompt=[ids], echo=True, max_tokens=limit, **options)
            .choices[0]
            .logprobs
        )
        assert len(block.tokens) == len(ids) + limit
        assert block.token_logprobs[0] is None
        scored = block.token_logprobs[count : len(ids)]
        assert scored == pytest.approx(made["choices"][0]["logprobs"]["token_logprobs"], abs=1e-2)
        for token, tops in zip(
            block.tokens[count : len(ids)], block.top_logprobs[count : len(ids)], strict=True
        ):
            assert max(tops, key=tops.get) == token


def test_a_prompts_log_probabilities_are_no_part_of_its_timeline(client, model):
    reply = client.completions.create(
        model=model, prompt="Once upon a time", max_tokens=1, extra_body={"prompt_logprobs": 1}
    )
    assert len(reply.choices[0].prompt_logprobs) == reply.usage.prompt_tokens
    timeline = client.get(f"/requests/{reply.id}", cast_to=object)
    assert [event["event"] for event in timeline["events"]][-1] == "finished"


@pytest.mark.parametrize(
    ("wrong", "kind", "param"),
    [
        ({"prompt": ""}, openai.BadRequestError, "prompt"),
        ({"prompt": [49152]}, openai.BadRequestError, "prompt"),
        ({"temperature": 3}, openai.BadRequestError, "temperature"),
        ({"max_tokens": 100_000}, openai.BadRequestError, "max_tokens"),
        ({"logit_bias": {"49152": 5}}, openai.BadRequestError, "logit_bias"),
        ({"model": "no-such-model"}, openai.NotFoundError, "model"),
        # 600 blocks hold 9,600 tokens, so the model's length is the limit that speaks.
        ({"prompt": [5] * 9000}, openai.BadRequestError, "prompt"),
    ],
)
def test_mistakes_raise_typed_errors_and_a_neighbour_does_not_notice(client, model, wrong, kind, param):
    neighbour = client.completions.create(
        model=model, prompt="Once upon a time", temperature=0, max_tokens=20, stream=True
    )
    first = next(neighbour)
    with pytest.raises(kind) as caught:
        client.completions.create(**{"model": model, "prompt": "Hi", "max_tokens": 4, **wrong})
    assert caught.value.param == param
    text = first.choices[0].text + "".join(part.choices[0].text for part in neighbour)
    alone = client.completions.create(model=model, prompt="Once upon a time", temperature=0, max_tokens=20)
    assert text == alone.choices[0].text
