"""/v1/responses through the `openai` package: whole, streamed, and what a server that keeps nothing refuses."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import openai
import pytest

from octavo.protos.errors import RequestFailedError

from .conftest import MODEL, Api, ScriptedBackend, error_of


def with_client(api: Api, use: Callable[[openai.AsyncOpenAI], Awaitable[Any]]) -> Any:
    async def go() -> Any:
        transport = httpx.ASGITransport(app=api.app)
        async with httpx.AsyncClient(transport=transport) as client:
            return await use(
                openai.AsyncOpenAI(
                    base_url="http://octavo/v1", api_key="x", max_retries=0, http_client=client
                )
            )

    return asyncio.run(go())


def test_whole(api: Api, backend: ScriptedBackend) -> None:
    reply = with_client(
        api, lambda c: c.responses.create(model=MODEL, input="Hi", instructions="Be brief.", temperature=0.5)
    )
    assert reply.output_text == "Hello world!"
    assert reply.status == "completed"
    assert reply.usage.output_tokens == 4
    assert reply.usage.input_tokens_details.cached_tokens == 3
    assert reply.instructions == "Be brief."
    prompt = backend.tokenizer.decode(backend.submitted[0].prompt_token_ids.tolist(), False)
    assert prompt.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>")
    assert backend.submitted[0].params.temperature == 0.5

    cut = with_client(api, lambda c: c.responses.create(model=MODEL, input="Hi", max_output_tokens=2))
    assert cut.status == "incomplete"
    assert cut.incomplete_details.reason == "max_output_tokens"

    # What came back may be sent again as it is.
    history: Any = [{"role": "user", "content": "Hi"}, *[item.model_dump() for item in reply.output]]
    history.append({"role": "user", "content": [{"type": "input_text", "text": "More"}]})
    with_client(api, lambda c: c.responses.create(model=MODEL, input=history))
    prompt = backend.tokenizer.decode(backend.submitted[-1].prompt_token_ids.tolist(), False)
    assert "assistant\nHello world!<|im_end|>\n<|im_start|>user\nMore" in prompt


def test_stream(api: Api) -> None:
    async def read(client: openai.AsyncOpenAI) -> list[Any]:
        return [event async for event in await client.responses.create(model=MODEL, input="Hi", stream=True)]

    events = with_client(api, read)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    deltas = kinds.count("response.output_text.delta")
    assert kinds == [
        *("response.created", "response.in_progress"),
        *("response.output_item.added", "response.content_part.added"),
        *(["response.output_text.delta"] * deltas),
        *("response.output_text.done", "response.content_part.done"),
        *("response.output_item.done", "response.completed"),
    ]
    assert "".join(event.delta for event in events if event.type.endswith("text.delta")) == "Hello world!"
    assert events[-1].response.output_text == "Hello world!"
    assert events[-1].response.usage.total_tokens > 4


def test_an_error_in_mid_stream_is_the_last_event(api: Api, backend: ScriptedBackend) -> None:
    async def fail(request: Any, step: int) -> None:
        if step == 2:
            raise RequestFailedError("lost it")

    async def read(client: openai.AsyncOpenAI) -> list[Any]:
        return [event async for event in await client.responses.create(model=MODEL, input="Hi", stream=True)]

    backend.before_step = fail
    events = with_client(api, read)
    assert events[-1].type == "response.failed"
    assert events[-1].response.error.message == "lost it"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"store": True}, "store"),
        ({"previous_response_id": "resp-1"}, "previous_response_id"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"background": True}, "background"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format.type"),
        ({"n": 2}, "n"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"type": "function_call_output", "call_id": "1", "output": "x"}]}, "input[0]"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"instructions": ["x"]}, "instructions"),
    ],
)
def test_refusals(api: Api, backend: ScriptedBackend, fields: dict[str, Any], param: str) -> None:
    told = error_of(api.post("/v1/responses", {"input": "Hi", **fields}), 400, param)
    if param in ("store", "previous_response_id"):
        assert "send the whole conversation" in told["message"]
    assert backend.submitted == []


def test_store_false_and_harmless_fields_pass(api: Api) -> None:
    reply = api.post(
        "/v1/responses",
        {
            "input": "Hi",
            "store": False,
            "tools": [],
            "metadata": {"a": "b"},
            "text": {"format": {"type": "text"}},
        },
    )
    assert reply.status_code == 200
    assert "x-octavo-warning" not in reply.headers
