"""The client against the real HTTP app and the real model: what comes over HTTP is what the Engine gives."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import httpx
import orjson
import pytest

from octavo.cluster.batch import run_batch
from octavo.cluster.client import AsyncClient, Client
from octavo.cluster.engine import Engine
from octavo.cluster.engine_backend import EngineBackend
from octavo.cluster.in_process import BASE_URL
from octavo.cluster.openai.app import create_app
from octavo.protos import errors
from octavo.protos.types import SamplingParams

pytestmark = pytest.mark.model

PROMPTS = ["The capital of France is", [504, 3575, 282, 4649, 314], "def add(a, b):"]
GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(num_blocks=64, max_model_len=512, device="cpu") as engine:
        yield engine


@pytest.fixture
def transport(engine: Engine) -> httpx.ASGITransport:
    return httpx.ASGITransport(create_app(EngineBackend(engine.loop, engine.model), engine.tokenizer))


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        SamplingParams(temperature=0, max_tokens=6, logprobs=3),
        SamplingParams(temperature=0, max_tokens=6, logprobs=0),
        SamplingParams(seed=7, n=2, max_tokens=8, top_k=50, presence_penalty=0.5),
        SamplingParams(temperature=0, max_tokens=30, stop=("\n",)),
        SamplingParams(seed=7, n=2, best_of=3, max_tokens=6),
        SamplingParams(beam_width=3, n=2, max_tokens=6, length_penalty=0.5),
    ],
)
def test_client_gives_what_the_engine_gives(engine, transport, params):
    expected = engine.generate(PROMPTS, params)
    with Client(BASE_URL, transport=transport) as client:
        got = client.generate(PROMPTS, params)
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.prompt_token_ids == theirs.prompt_token_ids
        for branch, wanted in zip(ours.outputs, theirs.outputs, strict=True):
            assert (branch.index, branch.text, branch.token_ids) == (
                wanted.index,
                wanted.text,
                wanted.token_ids,
            )
            assert branch.finish_reason == wanted.finish_reason
            assert branch.score == (None if wanted.score is None else pytest.approx(wanted.score, abs=1e-3))
            assert (branch.logprobs is None) == (wanted.logprobs is None)
            for mine, his in zip(branch.logprobs or (), wanted.logprobs or (), strict=True):
                assert mine.logprob == pytest.approx(his.logprob, abs=1e-3)
                assert mine.top_ids == his.top_ids
                assert mine.top_logprobs == pytest.approx(his.top_logprobs, abs=1e-3)
    if not params.stop:
        assert got[0].metrics.ttft_seconds > 0


def test_stream_says_what_generate_says(engine, transport):
    (expected,) = engine.generate([PROMPTS[0]], GREEDY)
    with Client(BASE_URL, transport=transport) as client:
        assert "".join(client.stream(PROMPTS[0], GREEDY)) == expected.outputs[0].text


def test_no_limit_of_tokens_means_the_models(transport, engine):
    stop_soon = SamplingParams(temperature=0, max_tokens=None, stop=(".", ","))
    with Client(BASE_URL, transport=transport) as client:
        (out,) = client.generate(["The capital of France is Paris and the capital of Germany is"], stop_soon)
    assert out.outputs[0].finish_reason == "stop"


def test_refusals_of_the_real_app_are_typed(transport):
    with Client(BASE_URL, transport=transport) as client:
        with pytest.raises(errors.RequestTooLargeError):
            client.generate([[5] * 100_000], GREEDY)
        with pytest.raises(errors.InvalidRequestError) as caught:
            client.generate([[10**9]], GREEDY)
        assert caught.value.param == "prompt"
    with Client(BASE_URL, model="nobody", transport=transport) as client, pytest.raises(errors.NotFoundError):
        client.generate(["x"], GREEDY)


def test_a_batch_in_this_process(transport, tmp_path):
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    chat = {"messages": [{"role": "user", "content": "Say hi"}], "max_tokens": 4}
    bodies = [("/v1/chat/completions", chat), ("/v1/completions", {"prompt": "x", "temperature": 99})]
    records = [
        {"custom_id": str(i), "method": "POST", "url": url, "body": body}
        for i, (url, body) in enumerate(bodies)
    ]
    source.write_bytes(b"".join(orjson.dumps(record) + b"\n" for record in records))

    async def go():
        async with AsyncClient(BASE_URL, transport=transport) as client:
            return await run_batch(source, out, client)

    summary = asyncio.run(go())
    assert (summary.succeeded, summary.failed) == (1, 1)
    by_id = {entry["custom_id"]: entry for entry in map(orjson.loads, out.read_bytes().split(b"\n")[:-1])}
    assert by_id["0"]["response"]["body"]["usage"]["completion_tokens"] >= 1
    assert by_id["1"]["response"]["body"]["error"]["param"] == "temperature"
