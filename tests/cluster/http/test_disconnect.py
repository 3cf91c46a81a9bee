"""A client that leaves takes its work with it, at every stage (case D20), over real sockets."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from octavo.cluster.openai.app import create_app
from octavo.cluster.openai.config import HttpConfig
from octavo.cluster.tokenizer import Tokenizer

from .conftest import Api, ScriptedBackend, Server, error_of, parse_events

GONE_SECONDS_MAX = 2.0
LONG = {"prompt": "x", "max_tokens": 2000, "ignore_eos": True}


@pytest.fixture
def server(backend: ScriptedBackend, tokenizer: Tokenizer) -> Iterator[Server]:
    async def a_step(request: Any, step: int) -> None:
        await asyncio.sleep(0.005)

    backend.before_step = a_step
    with Server(create_app(backend, tokenizer, HttpConfig())) as running:
        yield running


def wait_for(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + GONE_SECONDS_MAX
    while not what():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def test_d20_leaving_a_stream_aborts_it(server: Server, backend: ScriptedBackend) -> None:
    with httpx.stream("POST", f"{server.url}/v1/completions", json={**LONG, "stream": True}) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: {")
        next(lines)
        assert next(lines).startswith("data: {")
    wait_for(lambda: backend.num_running == 0)
    assert len(backend.aborted) == 1


def test_d20_leaving_without_a_stream_aborts_too(server: Server, backend: ScriptedBackend) -> None:
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/chat/completions", json=_chat(), timeout=0.2)
    assert len(backend.submitted) == 1
    wait_for(lambda: backend.num_running == 0)
    assert len(backend.aborted) == 1


@pytest.mark.parametrize("stream", [True, False])
def test_d20_leaving_while_queued(server: Server, backend: ScriptedBackend, stream: bool) -> None:
    async def never(request: Any, step: int) -> None:
        await asyncio.Event().wait()

    backend.before_step = never
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/completions", json={**LONG, "stream": stream}, timeout=0.2)
    wait_for(lambda: len(backend.aborted) == 1)


def test_d20_many_prompts_and_branches_go_together(server: Server, backend: ScriptedBackend) -> None:
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/completions", json={**LONG, "prompt": ["a", "b"], "n": 3}, timeout=0.2)
    assert len(backend.submitted) == 2
    wait_for(lambda: len(backend.aborted) == 2)


def test_d20_a_half_sent_body_runs_nothing(server: Server, backend: ScriptedBackend) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as raw:
        raw.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: 1000\r\n\r\n{"
        )
    assert httpx.get(f"{server.url}/health").status_code == 200
    wait_for(lambda: 'status="499"' in httpx.get(f"{server.url}/metrics").text)
    assert backend.submitted == []


def test_d20_a_finished_answer_sends_no_abort(server: Server, backend: ScriptedBackend) -> None:
    for stream in (True, False):
        reply = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x", "stream": stream})
        assert reply.status_code == 200
    wait_for(lambda: len(backend.finished) == 2)
    assert backend.aborted == []


def test_d20_one_who_leaves_does_not_harm_another(server: Server, backend: ScriptedBackend) -> None:
    async def scenario() -> str:
        async with httpx.AsyncClient(base_url=server.url, timeout=20) as client:
            body = {"prompt": "x", "max_tokens": 60, "ignore_eos": True, "stream": True}
            kept = asyncio.ensure_future(client.post("/v1/completions", json=body))
            for _ in range(5):
                with pytest.raises(httpx.ReadTimeout):
                    await client.post("/v1/completions", json=LONG, timeout=0.05)
            return (await kept).text

    stream = parse_events(asyncio.run(scenario()))
    assert stream[-1] == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in stream[:-1]) == "Hello world!" * 15
    wait_for(lambda: backend.num_running == 0)


def test_d20_three_hundred_leave_at_once(server: Server, backend: ScriptedBackend) -> None:
    async def scenario() -> None:
        writers = []
        for i in range(300):
            _, writer = await asyncio.open_connection("127.0.0.1", server.port)
            body = json.dumps({**LONG, "stream": i % 2 == 0})
            head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
            writer.write((head + body).encode())
            writers.append(writer)
        while len(backend.submitted) < 300:
            await asyncio.sleep(0.02)
        for writer in writers:
            writer.transport.abort()

    asyncio.run(scenario())
    wait_for(lambda: backend.num_running == 0)
    assert len(backend.aborted) == 300
    assert httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"}).status_code == 200
    metrics = httpx.get(f"{server.url}/metrics").text
    assert "octavo_http_streams 0.0" in metrics
    assert "octavo_http_requests_in_flight 1.0" in metrics  # the scrape itself


def test_a_cancelled_server_task_aborts(api: Api, backend: ScriptedBackend) -> None:
    """How an ASGI server that cancels handlers, as Ray Serve's does, ends a call."""

    async def never(request: Any, step: int) -> None:
        await asyncio.Event().wait()

    async def scenario(stream: bool) -> None:
        transport = httpx.ASGITransport(app=api.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://octavo") as client:
            count = len(backend.submitted)
            call = asyncio.ensure_future(client.post("/v1/completions", json={**LONG, "stream": stream}))
            while len(backend.submitted) == count:
                await asyncio.sleep(0.001)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call

    backend.before_step = never
    for stream in (True, False):
        asyncio.run(scenario(stream))
    assert len(backend.aborted) == 2


def test_d21_an_oversized_header_over_a_socket(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as raw:
        head = b"GET /v1/models HTTP/1.1\r\nhost: x\r\nx-request-id: "
        try:
            raw.sendall(head + b"x" * 2**20 + b"\r\n\r\n")
        except OSError:
            pass  # the server may close before all of it is sent
        try:
            answer = raw.recv(1000)
        except OSError:
            answer = b""
    # The HTTP parser refuses it before the app sees it, or the app does.
    assert answer == b"" or answer.split()[1] in (b"400", b"431")
    long = httpx.get(f"{server.url}/v1/models", headers={"x-request-id": "x" * 1000})
    error_of(long, 431)


def _chat() -> dict[str, Any]:
    return {
        **{k: v for k, v in LONG.items() if k != "prompt"},
        "messages": [json.loads('{"role":"user","content":"x"}')],
    }
