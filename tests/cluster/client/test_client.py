"""The Python client against a real local HTTP server."""

from __future__ import annotations

import asyncio
import gc
import threading
import time

import httpx
import orjson
import pytest
from starlette.responses import Response

from octavo.cluster.client import AsyncClient, Client
from octavo.cluster.client_http import _error_of
from octavo.protos import errors
from octavo.protos.types import SamplingParams


def sse(*objects: object, done: bool = True) -> list[bytes]:
    events = [b"data: " + orjson.dumps(item) + b"\n\n" for item in objects]
    return [*events, b"data: [DONE]\n\n"] if done else events


def text_chunk(text: str) -> dict:
    return {"id": "x", "choices": [{"index": 0, "text": text, "finish_reason": None}], "usage": None}


def test_results_come_in_the_order_of_the_prompts(server):
    server.delay_seconds = 0.002
    prompts = [f"p{i}" for i in range(50)]
    with Client(server.url, max_concurrency=8) as client:
        outputs = client.generate(prompts)
    assert [out.outputs[0].text for out in outputs] == [f"echo:p{i}" for i in range(50)]
    assert [out.prompt for out in outputs] == prompts


def test_concurrency_is_bounded_and_used(server):
    server.delay_seconds = 0.01
    with Client(server.url, max_concurrency=4) as client:
        client.generate([f"p{i}" for i in range(24)])
    assert server.peak_in_flight == 4


def test_concurrency_is_bounded_over_several_callers(server):
    server.delay_seconds = 0.01
    with Client(server.url, max_concurrency=3) as client:
        threads = [
            threading.Thread(target=client.generate, args=([f"p{i}" for i in range(6)],)) for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(server.bodies) == 18
    assert server.peak_in_flight == 3


def test_text_ids_and_chats_go_to_their_endpoints(server):
    chat = [{"role": "user", "content": "hi"}]
    with Client(server.url) as client:
        outputs = client.generate(["text", [1, 2, 3], chat])
    assert [out.outputs[0].text for out in outputs] == ["echo:text", "echo:[1, 2, 3]", "echo:hi"]
    assert {frozenset(body) & {"prompt", "messages"} for body in server.bodies} == {
        frozenset({"prompt"}),
        frozenset({"messages"}),
    }
    assert all(body["model"] == "fake-model" for body in server.bodies)


@pytest.mark.parametrize("bare", ["one", [1, 2], [{"role": "user", "content": "hi"}]])
def test_one_bare_prompt_is_a_list_of_one(server, bare):
    with Client(server.url) as client:
        assert len(client.generate(bare)) == 1


def test_no_prompts_no_calls(server):
    with Client(server.url) as client:
        assert client.generate([]) == []
    assert server.bodies == []


def test_output_has_ids_branches_and_metrics(server):
    with Client(server.url) as client:
        (out,) = client.generate(["p"], SamplingParams(n=3))
    assert out.prompt_token_ids == (1, 2)
    assert [branch.index for branch in out.outputs] == [0, 1, 2]
    assert out.outputs[0].token_ids == (7, 8, 9)
    assert out.outputs[0].finish_reason == "stop"
    assert out.metrics.cached_tokens == 1
    assert out.metrics.total_seconds > 0


def test_params_one_for_all_or_one_each(server):
    with Client(server.url, max_concurrency=1) as client:
        client.generate(["a", "b"], SamplingParams(max_tokens=5))
        client.generate(["a", "b"], [SamplingParams(max_tokens=1), SamplingParams(max_tokens=2)])
        with pytest.raises(errors.InvalidRequestError, match="2 prompts, 1"):
            client.generate(["a", "b"], [SamplingParams()])
    assert [body["max_tokens"] for body in server.bodies] == [5, 5, 1, 2]


@pytest.mark.parametrize(
    "bad", [[5.5], [None], [b"bytes"], [["a", 1]], [{"role": "user"}, "x"], {"a": 1}, b"x"]
)
def test_a_prompt_of_no_known_kind_is_refused_here(server, bad):
    with Client(server.url) as client, pytest.raises(errors.InvalidRequestError, match="prompts"):
        client.generate(bad)
    assert server.bodies == []


def test_text_that_is_not_unicode_is_the_callers_error(server):
    with Client(server.url) as client, pytest.raises(errors.InvalidRequestError, match="valid JSON"):
        client.generate(["\ud800"])


def test_429_is_repeated_no_sooner_than_retry_after(server, no_waiting):
    server.fail(429, "overloaded", retry_after="7")
    server.fail(503, "unavailable")
    with Client(server.url) as client:
        (out,) = client.generate(["p"])
    assert out.outputs[0].text == "echo:p"
    assert len(server.bodies) == 3
    assert 7 <= no_waiting[0] < 8
    assert no_waiting[1] <= 1


def test_retry_after_is_really_waited_for(server):
    server.fail(429, "overloaded", retry_after="0.3")
    started = time.monotonic()
    with Client(server.url) as client:
        client.generate(["p"])
    assert time.monotonic() - started >= 0.3


def test_retries_end_with_the_servers_own_error(server, no_waiting):
    for _ in range(3):
        server.fail(429, "overloaded", "queue full", retry_after="2")
    with Client(server.url, max_retries=2) as client, pytest.raises(errors.OverloadedError) as caught:
        client.generate(["p"])
    assert caught.value.message == "queue full"
    assert caught.value.retry_after_seconds == 2.0
    assert len(server.bodies) == 3


def test_a_wait_of_an_hour_is_the_callers_decision(server):
    server.fail(429, "overloaded", retry_after="3600")
    with Client(server.url) as client, pytest.raises(errors.OverloadedError) as caught:
        client.generate(["p"])
    assert caught.value.retry_after_seconds == 3600
    assert len(server.bodies) == 1


@pytest.mark.parametrize("status", [400, 404, 500])
def test_other_refusals_are_not_repeated(server, status):
    server.fail(status)
    with Client(server.url) as client, pytest.raises(errors.OctavoError):
        client.generate(["p"])
    assert len(server.bodies) == 1


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (400, "x", errors.InvalidRequestError),
        (400, "context_length_exceeded", errors.RequestTooLargeError),
        (401, "invalid_api_key", errors.AuthenticationError),
        (404, "model_not_found", errors.NotFoundError),
        (413, "x", errors.RequestTooLargeError),
        (418, "x", errors.InvalidRequestError),
        (429, "overloaded", errors.OverloadedError),
        (500, "x", errors.RequestFailedError),
        (503, "x", errors.UnavailableError),
        (503, "worker_lost", errors.WorkerLostError),
    ],
)
def test_each_refusal_has_its_type(server, status, code, kind):
    server.fail(status, code, "told so")
    with Client(server.url, max_retries=0) as client, pytest.raises(errors.OctavoError) as caught:
        client.generate(["p"])
    assert type(caught.value) is kind
    assert (caught.value.message, caught.value.param, caught.value.code) == ("told so", "prompt", code)


def test_an_error_names_the_prompt_and_stops_the_others(server):
    server.delay_seconds = 0.005
    with Client(server.url, max_concurrency=2) as client:
        server.fail(400, "x", "bad one")
        with pytest.raises(errors.InvalidRequestError, match=r"prompts\[[01]\]: bad one"):
            client.generate([f"p{i}" for i in range(100)])
    assert len(server.bodies) < 10


def test_answers_that_are_not_openais_are_an_error(server):
    with Client(server.url, max_retries=0) as client:
        for content in (b"<html>proxy</html>", b"{}", b'{"id": 1, "choices": [{}]}', b"[]", b"null"):
            server.failures.append(Response(content))
            with pytest.raises(errors.RequestFailedError, match="not an OpenAI completion"):
                client.generate(["p"])
        server.failures.append(Response(b"<html>bad gateway</html>", status_code=502))
        with pytest.raises(errors.UnavailableError, match="bad gateway"):
            client.generate(["p"])


def test_nobody_there_is_unavailable_after_the_retries(dead_url, no_waiting):
    with (
        Client(dead_url, max_retries=3, model="m") as client,
        pytest.raises(errors.UnavailableError) as caught,
    ):
        client.generate(["p"])
    assert dead_url in caught.value.message
    assert caught.value.code == "unreachable"
    assert len(no_waiting) == 3


def test_a_slow_answer_is_a_timeout_and_is_not_repeated(server):
    server.delay_seconds = 0.5
    with (
        Client(server.url, model="m", timeout=0.05) as client,
        pytest.raises(errors.UnavailableError) as caught,
    ):
        client.generate(["p"])
    assert caught.value.code == "timeout"
    assert len(server.bodies) == 1


def test_every_httpx_error_becomes_one_of_ours():
    def below(kind: type) -> list[type]:
        return [kind, *(deep for child in kind.__subclasses__() for deep in below(child))]

    kinds = below(httpx.HTTPError)
    assert len(kinds) > 15
    for kind in kinds:
        problem = kind.__new__(kind)
        assert isinstance(_error_of(problem, "http://x"), errors.OctavoError)


def test_api_key_is_sent_and_read_from_the_environment(server, monkeypatch):
    with Client(server.url, "secret") as client:
        client.generate(["p"])
    monkeypatch.setenv("OCTAVO_API_KEY", "other")
    with Client(server.url) as client:
        client.generate(["p"])
    assert [sent["authorization"] for sent in server.headers] == ["Bearer secret", "Bearer other"]


def test_models_and_health(server, dead_url):
    with Client(server.url + "/v1/") as client:
        assert client.base_url == server.url
        (card,) = client.models()
        assert (card.id, card.max_model_len) == ("fake-model", 512)
        assert client.health()["status"] == "ready"
    with Client(dead_url) as client, pytest.raises(errors.UnavailableError):
        client.health()


@pytest.mark.parametrize(
    "arguments",
    [
        {"base_url": "127.0.0.1:8000"},
        {"base_url": "ftp://x"},
        {"base_url": ""},
        {"timeout": 0},
        {"timeout": float("nan")},
        {"max_concurrency": 0},
        {"max_retries": -1},
    ],
)
def test_bad_arguments_are_named(arguments):
    with pytest.raises(errors.ConfigError) as caught:
        Client(**arguments)
    assert caught.value.param in arguments


def test_stream_yields_text_as_it_comes(server):
    server.stream_events = sse(
        text_chunk(""), text_chunk("Hel"), text_chunk("lo"), {"id": "x", "choices": [], "usage": {}}
    )
    with Client(server.url) as client:
        assert list(client.stream("p", SamplingParams(max_tokens=3))) == ["Hel", "lo"]
    assert server.bodies[0]["stream"] is True


def test_stream_of_a_chat(server):
    server.stream_events = sse(
        {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]},
        {"choices": [{"index": 1, "delta": {"content": "other branch"}}]},
        {"choices": [{"index": 0, "delta": {"content": "hi"}}]},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
    )
    with Client(server.url) as client:
        assert list(client.stream([{"role": "user", "content": "x"}])) == ["hi"]


def test_d12_stream_survives_unicode_line_ends_and_any_cut(server):
    text = "a\u2028b\u0085c\u2029d\x0be\U0001f9ce"
    whole = b"".join(sse(text_chunk(text)))
    assert "\u2028".encode() in whole  # raw, not escaped
    server.stream_events = [whole[i : i + 1] for i in range(len(whole))]
    with Client(server.url) as client:
        assert list(client.stream("p")) == [text]


def test_stream_reads_crlf_and_comments(server):
    body = orjson.dumps(text_chunk("hi"))
    server.stream_events = [
        b": ping\r\n\r\n",
        b"event: x\r\ndata: " + body + b"\r",
        b"\n\r\ndata: [DONE]\r\n\r\n",
    ]
    with Client(server.url) as client:
        assert list(client.stream("p")) == ["hi"]


def test_d13_a_stream_without_done_is_an_error(server):
    server.stream_events = sse(text_chunk("half"), done=False)
    with Client(server.url) as client:
        pieces = client.stream("p")
        assert next(pieces) == "half"
        with pytest.raises(errors.UnavailableError, match="ended before"):
            next(pieces)


def test_an_error_inside_a_stream_is_raised(server):
    server.stream_events = sse(
        text_chunk("a"), {"error": {"message": "lost", "type": "t", "code": "worker_lost", "param": None}}
    )
    with Client(server.url) as client:
        pieces = client.stream("p")
        assert next(pieces) == "a"
        with pytest.raises(errors.WorkerLostError, match="lost"):
            next(pieces)


def test_stream_is_refused_and_repeated_like_any_call(server, no_waiting):
    server.fail(429, "overloaded")
    server.fail(400, "x", "bad field")
    with Client(server.url) as client, pytest.raises(errors.InvalidRequestError, match="bad field"):
        list(client.stream("p"))
    assert len(server.bodies) == 2


def test_leaving_a_stream_gives_its_slot_back(server):
    server.stream_events = sse(*[text_chunk("x")] * 50)
    with Client(server.url, max_concurrency=1) as client:
        for _ in client.stream("p"):
            break
        gc.collect()
        assert len(client.generate(["after"])) == 1


def test_async_client_in_two_event_loops(server):
    client = AsyncClient(server.url)

    async def ask() -> str:
        (out,) = await client.generate(["p"])
        return out.outputs[0].text

    assert asyncio.run(ask()) == "echo:p"
    assert asyncio.run(ask()) == "echo:p"


def test_client_inside_a_running_event_loop(server):
    async def notebook_cell() -> int:
        with Client(server.url) as client:
            return len(client.generate(["a", "b"]))

    assert asyncio.run(notebook_cell()) == 2


def test_a_closed_client_says_so_and_leaves_no_thread(server):
    client = Client(server.url)
    client.generate(["p"])
    client.close()
    client.close()
    with pytest.raises(errors.UnavailableError, match="closed"):
        client.generate(["p"])
    dropped = Client(server.url)
    dropped.generate(["p"])
    del dropped
    gc.collect()
    deadline = time.monotonic() + 5
    while any(t.name == "octavo-client" for t in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(thread.name == "octavo-client" for thread in threading.enumerate())


def test_progress_goes_to_standard_error_only(server, capsys):
    with Client(server.url) as client:
        client.generate(["a", "b"], progress=True)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "2/2 requests (100 %)" in shown.err
