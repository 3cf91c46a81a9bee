"""The `openai` package against the real server: results, streams, and every error as its own type (case D17)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from octavo.cluster.openai.app import create_app
from octavo.cluster.openai.config import HttpConfig
from octavo.cluster.tokenizer import Tokenizer
from octavo.protos.errors import OverloadedError, RequestFailedError, UnavailableError

from .conftest import MODEL, ScriptedBackend, Server

MESSAGES: list[Any] = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def client(backend: ScriptedBackend, tokenizer: Tokenizer) -> Iterator[openai.OpenAI]:
    with Server(create_app(backend, tokenizer, HttpConfig(api_keys=("key",)))) as server:
        made = openai.OpenAI(base_url=f"{server.url}/v1", api_key="key", max_retries=0, timeout=10)
        yield made
        made.close()


def test_chat(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, n=2, logprobs=True, top_logprobs=1, seed=5, stop=["zzz"]
    )
    assert [choice.message.content for choice in reply.choices] == ["Hello world!"] * 2
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage is not None
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + 8
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert logprobs.content[0].top_logprobs[0].token == "Hello"
    assert reply._request_id is not None


def test_chat_stream(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello world!"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 4


def test_chat_stream_helper(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model=MODEL, messages=MESSAGES) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == "Hello world!"


def test_completions(client: openai.OpenAI) -> None:
    reply = client.completions.create(model=MODEL, prompt=["a", "b"], logprobs=1, max_tokens=2, echo=False)
    assert [choice.text for choice in reply.choices] == ["Hello world"] * 2
    assert [choice.finish_reason for choice in reply.choices] == ["length"] * 2
    parts = client.completions.create(model=MODEL, prompt=[64, 65], stream=True)
    assert "".join(part.choices[0].text for part in parts) == "Hello world!"


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "octavo"


def test_errors_of_the_call(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=3)
    assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="nope", messages=MESSAGES)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model=MODEL, input="x")
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=MODEL, prompt=[5] * 9000)
    assert long.value.code == "context_length_exceeded"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OverloadedError("full"), openai.RateLimitError),
        (UnavailableError("draining"), openai.InternalServerError),
        (RequestFailedError("broken"), openai.InternalServerError),
    ],
)
def test_errors_of_the_backend(
    client: openai.OpenAI, backend: ScriptedBackend, error: Exception, kind: type[Exception]
) -> None:
    async def fail(request: Any, step: int) -> None:
        raise error

    backend.before_step = fail
    for stream in (False, True):
        with pytest.raises(kind):
            client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=stream)


def test_an_error_in_mid_stream_raises(client: openai.OpenAI, backend: ScriptedBackend) -> None:
    async def fail(request: Any, step: int) -> None:
        if step == 2:
            raise RequestFailedError("lost it")

    backend.before_step = fail
    stream = client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
    seen = [next(stream).choices[0].delta.content for _ in range(3)]
    assert "".join(text or "" for text in seen) == "Hello world"
    with pytest.raises(openai.APIError, match="lost it"):
        next(stream)
