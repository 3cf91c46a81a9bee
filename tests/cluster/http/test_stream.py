"""Server-sent events: one contract, however a call ends (cases D09 and D11 to D13)."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.protos.errors import OverloadedError, RequestFailedError

from .conftest import Api, ScriptedBackend, error_of, events, failing

EMOJI = [10813, 117, 232]


def texts(stream: list[Any]) -> dict[int, str]:
    """Index of choice to its text, of all chunks."""
    found: dict[int, str] = {}
    for chunk in stream:
        for choice in chunk["choices"] if chunk != "[DONE]" else ():
            part = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            found[choice["index"]] = found.get(choice["index"], "") + part
    return found


@pytest.mark.parametrize("route", ["chat", "complete"])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("end", ["stop", "length"])
@pytest.mark.parametrize(
    "options", [None, {}, {"include_usage": False}, {"include_usage": True}, {"include_usage": None}], ids=str
)
def test_d13_the_contract(api: Api, route: str, n: int, end: str, options: dict[str, Any] | None) -> None:
    fields: dict[str, Any] = {"n": n, "stream": True, "stream_options": options}
    if end == "length":
        fields["max_tokens"] = 2
    stream = events(getattr(api, route)(**fields))
    assert stream.count("[DONE]") == 1
    assert stream.pop() == "[DONE]"
    wants_usage = options is not None and options.get("include_usage") is True
    if wants_usage:
        last = stream.pop()
        assert last["choices"] == []
        tokens = n * (2 if end == "length" else 4)
        assert last["usage"]["completion_tokens"] == tokens
        assert last["usage"]["total_tokens"] == tokens + last["usage"]["prompt_tokens"]
        assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
        assert all(chunk["usage"] is None for chunk in stream)
        stream_ids = {(last["id"], last["created"], last["model"])}
    else:
        assert all(chunk.get("usage") is None for chunk in stream)
        stream_ids = set()
    stream_ids |= {(chunk["id"], chunk["created"], chunk["model"]) for chunk in stream}
    assert len(stream_ids) == 1
    choices = [choice for chunk in stream for choice in chunk["choices"]]
    for index in range(n):
        reasons = [choice["finish_reason"] for choice in choices if choice["index"] == index]
        assert [reason for reason in reasons if reason is not None] == [end]
        assert reasons[-1] == end
    assert texts(stream) == dict.fromkeys(range(n), "Hello world" if end == "length" else "Hello world!")


def test_d13_stream_options_need_a_stream(api: Api) -> None:
    for options in ({}, {"include_usage": True}):
        error_of(api.chat(stream_options=options), 400, "stream_options")
        error_of(api.complete(stream_options=options, stream=False), 400, "stream_options")
    assert api.complete(stream_options=None).status_code == 200
    error_of(api.complete(stream=True, stream_options={"include_usage": 1}), 400, "include_usage")


@pytest.mark.parametrize("route", ["chat", "complete"])
def test_usage_so_far_in_every_chunk(api: Api, route: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = events(getattr(api, route)(stream=True, stream_options=options, max_tokens=3))
    counts = [chunk["usage"]["completion_tokens"] for chunk in stream[:-1]]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (1, 3)
    assert stream[-2]["choices"] == []
    error_of(
        getattr(api, route)(stream=True, stream_options={"continuous_usage_stats": True}),
        400,
        "continuous_usage_stats",
    )


def test_chat_chunks_open_with_the_role(api: Api) -> None:
    stream = events(api.chat(stream=True, n=2))
    for index in (0, 1):
        deltas = [
            choice["delta"]
            for chunk in stream[:-1]
            for choice in chunk["choices"]
            if choice["index"] == index
        ]
        assert deltas[0] == {"role": "assistant", "content": ""}
        assert all("role" not in delta for delta in deltas[1:])
    assert stream[0]["object"] == "chat.completion.chunk"


@pytest.mark.parametrize("size", [1, 2, 5])
def test_d11_a_forced_stop(api: Api, backend: ScriptedBackend, size: int) -> None:
    backend.answer = lambda request, branch: [64]
    backend.tokens_per_delta = size
    fields: dict[str, Any] = {"prompt": "x", "logit_bias": {"64": 100}, "stop": ["PPP"], "max_tokens": 10}
    whole = api.complete(**fields).json()
    assert whole["choices"][0]["text"] == ""
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert whole["usage"]["completion_tokens"] == 3
    stream = events(api.complete(**fields, stream=True, stream_options={"include_usage": True}))
    assert texts(stream) == {0: ""}
    assert stream[-2]["usage"]["completion_tokens"] == 3
    reasons = [choice["finish_reason"] for chunk in stream[:-1] for choice in chunk["choices"]]
    assert [reason for reason in reasons if reason] == ["stop"]
    # The backend could not know: the rest was aborted, once for each call.
    assert len(backend.aborted) == 2


def test_d11_a_stop_across_a_token_edge(api: Api, backend: ScriptedBackend) -> None:
    answer = "The capital of France is Paris, a city of light."
    backend.answer = lambda request, branch: [*backend.tokenizer.encode(answer), 2]
    for include in (False, True):
        fields: dict[str, Any] = {"stop": ["s, a "], "max_tokens": 50, "include_stop_str_in_output": include}
        expected = "The capital of France is Pari" + ("s, a " if include else "")
        assert api.complete(**fields).json()["choices"][0]["text"] == expected
        assert texts(events(api.complete(**fields, stream=True))) == {0: expected}
    assert texts(events(api.complete(stream=True, stop=["light.!"], max_tokens=50))) == {0: answer}


def test_d11_one_branch_stops_and_the_other_goes_on(api: Api, backend: ScriptedBackend) -> None:
    """The stopped branch's further tokens are dropped; the request is not aborted while another needs it."""
    backend.answer = lambda request, branch: [64, 64, 64, 64, 2] if branch == 0 else [65, 65, 65, 65, 2]
    fields: dict[str, Any] = {"n": 2, "stop": "PP", "max_tokens": 10}
    whole = api.complete(**fields).json()
    assert [choice["text"] for choice in whole["choices"]] == ["", "QQQQ"]
    assert whole["usage"]["completion_tokens"] == 2 + 5
    stream = events(api.complete(**fields, stream=True))
    assert texts(stream) == {0: "", 1: "QQQQ"}
    assert backend.aborted == []


def test_d12_ten_characters_in_parts(api: Api, backend: ScriptedBackend) -> None:
    backend.answer = lambda request, branch: EMOJI
    for size in (1, 2, 4):
        backend.tokens_per_delta = size
        for limit in (*range(1, 10), 30):
            fields: dict[str, Any] = {"max_tokens": limit, "ignore_eos": True, "temperature": 0}
            whole = api.complete(**fields).json()["choices"][0]["text"]
            assert whole == "\U0001f9ce" * (limit // 3) + ("\ufffd" if limit % 3 else "")
            stream = events(api.complete(**fields, stream=True))
            assert texts(stream) == {0: whole}
            chunks = [chunk["choices"][0]["text"] for chunk in stream[:-1]]
            assert all("\ufffd" not in chunk for chunk in chunks[:-1])


def test_d12_chunks_that_would_be_empty_are_not_sent(api: Api, backend: ScriptedBackend) -> None:
    backend.answer = lambda request, branch: [64, *EMOJI, 2]
    stream = events(api.complete(stream=True))
    assert [chunk["choices"][0]["text"] for chunk in stream[:-1]] == ["P", "\U0001f9ce", ""]


def test_tokens_that_are_there_at_once_share_an_event(api: Api, backend: ScriptedBackend) -> None:
    backend.answer = lambda request, branch: [64] * 64 + [2]
    backend.tokens_per_delta = 16
    stream = events(api.complete(stream=True, max_tokens=100))
    assert len(stream) <= 6
    assert texts(stream) == {0: "P" * 64}


def test_d09_streamed_choices_equal_whole_ones(api: Api, backend: ScriptedBackend) -> None:
    backend.answer = lambda request, branch: [*range(300 + 7 * branch, 310 + 9 * branch), 2]
    fields: dict[str, Any] = {"prompt": ["a", "b c"], "n": 4, "max_tokens": 40, "echo": True}
    whole = api.complete(**fields).json()["choices"]
    stream = events(api.complete(**fields, stream=True))
    assert texts(stream) == {choice["index"]: choice["text"] for choice in whole}
    assert [choice["index"] for choice in whole] == list(range(8))


def test_streamed_ids(api: Api, backend: ScriptedBackend) -> None:
    backend.answer = lambda request, branch: [64, *EMOJI, 2]
    stream = events(api.complete(prompt="Hi", stream=True, return_token_ids=True))[:-1]
    ids = [token for chunk in stream for token in chunk["choices"][0]["token_ids"]]
    assert ids == [64, *EMOJI, 2]
    assert stream[0]["choices"][0]["prompt_token_ids"] == backend.tokenizer.encode("Hi")
    assert all("prompt_token_ids" not in chunk["choices"][0] for chunk in stream[1:])


def test_a_refusal_before_the_first_token_has_a_status(api: Api, backend: ScriptedBackend) -> None:
    async def refuse(request: Any, step: int) -> None:
        raise OverloadedError("the queue is full", retry_after_seconds=2.2)

    backend.before_step = refuse
    for stream in (True, False):
        response = api.chat(stream=stream)
        assert error_of(response, 429)["code"] == "overloaded"
        assert response.headers["retry-after"] == "3"


def test_an_error_in_mid_stream_is_an_event_and_the_end(api: Api, backend: ScriptedBackend) -> None:
    async def fail(request: Any, step: int) -> None:
        if step == 2:
            raise RequestFailedError("the model gave no number")

    backend.before_step = fail
    stream = events(api.chat(stream=True))
    assert "[DONE]" not in stream
    assert stream[-1]["error"] == {
        "message": "the model gave no number",
        "type": "server_error",
        "param": None,
        "code": "request_failed",
        "status": 500,
    }
    assert texts(stream[:-1]) == {0: "Hello world"}
    assert error_of(api.chat(), 500)["code"] == "request_failed"


def test_an_error_that_a_delta_carries(api: Api, backend: ScriptedBackend) -> None:
    backend.submit = failing("worker w1 is gone", "WorkerLostError")  # type: ignore[method-assign, assignment]
    error = error_of(api.complete(), 503)
    assert error["code"] == "worker_lost"
    stream = events(api.complete(stream=True))
    assert stream[-1]["error"]["message"] == "worker w1 is gone"
    assert "retry-after" in api.complete().headers


def test_our_own_bugs_say_nothing_of_the_inside(api: Api, backend: ScriptedBackend) -> None:
    async def bug(request: Any, step: int) -> None:
        raise ZeroDivisionError("secret detail")

    backend.before_step = bug
    error = error_of(api.complete(), 500)
    assert "secret" not in error["message"]
    assert "secret" not in api.chat(stream=True).text


def test_one_failed_prompt_ends_the_whole_call(api: Api, backend: ScriptedBackend) -> None:
    async def fail(request: Any, step: int) -> None:
        if request.prompt_token_ids.tolist() == [65] and step == 1:
            raise RequestFailedError("no")

    backend.before_step = fail
    backend.answer = lambda request, branch: [64] * 50
    error_of(api.complete(prompt=[[64], [65], [66]], max_tokens=50), 500)
    assert backend.num_running == 0
    assert len(backend.aborted) == 3
