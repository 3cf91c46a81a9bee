"""A small real HTTP server that speaks OpenAI's shape, for tests of what stands on the other side."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route


class FakeServer:
    """Answers "echo:" + the prompt. `failures` are given out first, one a call; `bodies` is what was asked."""

    def __init__(self) -> None:
        self.url = ""
        self.in_flight = 0
        self.reset()
        app = Starlette(
            routes=[
                Route("/v1/completions", self._answer, methods=["POST"]),
                Route("/v1/chat/completions", self._answer, methods=["POST"]),
                Route("/v1/fork", self._answer, methods=["POST"]),
                Route("/v1/models", self._models),
                Route("/health", self._health),
                Route("/ready", self._ready),
            ]
        )
        self._server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error"))
        self._thread = threading.Thread(target=self._server.run, daemon=True)

    def reset(self) -> None:
        """As new, for the next test."""
        while self.in_flight:
            threading.Event().wait(0.005)
        self.failures: deque[Response] = deque()
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.delay_seconds = 0.0
        self.peak_in_flight = 0
        self.stream_events: list[bytes] | None = None
        self.ready_status = 200

    def start(self) -> None:
        self._thread.start()
        while not self._server.started:
            assert self._thread.is_alive(), "the fake server did not start"
            threading.Event().wait(0.005)
        port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"

    def stop(self) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join()

    def fail(self, status: int, code: str = "some_code", message: str = "no", **headers: str) -> None:
        """The next call is refused so, in OpenAI's shape."""
        body = {"error": {"message": message, "type": "t", "param": "prompt", "code": code}}
        dashed = {name.replace("_", "-"): value for name, value in headers.items()}
        self.failures.append(JSONResponse(body, status_code=status, headers=dashed))

    def prompts(self) -> list[Any]:
        """What was asked for, in order of arrival."""
        return [body.get("prompt", body.get("messages")) for body in self.bodies]

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "fake-model", "max_model_len": 512}]})

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"status": "ready", "workers": []})

    async def _ready(self, request: Request) -> Response:
        return JSONResponse({"status": "draining"}, status_code=self.ready_status)

    async def _answer(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        self.in_flight += 1
        self.peak_in_flight = max(self.peak_in_flight, self.in_flight)
        try:
            await asyncio.sleep(self.delay_seconds)
            if self.failures:
                return self.failures.popleft()
            if body.get("stream"):
                headers = {"x-octavo-request-id": f"cmpl-{len(self.bodies)}"}
                return StreamingResponse(self._stream(), media_type="text/event-stream", headers=headers)
            return JSONResponse(completion(body), headers={"x-request-id": f"req-{len(self.bodies)}"})
        finally:
            self.in_flight -= 1

    async def _stream(self) -> Any:
        for event in self.stream_events or []:
            yield event
            await asyncio.sleep(0)


def completion(body: dict[str, Any]) -> dict[str, Any]:
    """A complete answer to `body`."""
    chat = "messages" in body
    asked = body["messages"][-1]["content"] if chat else body.get("prompt", body.get("request_id"))
    text = f"echo:{asked}"
    choices = []
    for index in reversed(range(body.get("n", 1))):
        choice: dict[str, Any] = {"index": index, "finish_reason": "stop", "token_ids": [7, 8, 9]}
        choice |= {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        choices.append(choice)
    fork = {"fork": {"of": asked, "branch": body["branch"], "at": 5}} if "branch" in body else {}
    return {
        **fork,
        "id": "cmpl-1",
        "model": body["model"],
        "choices": choices,
        "prompt_token_ids": [1, 2],
        "usage": {
            "prompt_tokens": 2,
            "completion_tokens": 3,
            "prompt_tokens_details": {"cached_tokens": 1},
        },
    }


@pytest.fixture(scope="session")
def running_server() -> Iterator[FakeServer]:
    fake = FakeServer()
    fake.start()
    yield fake
    fake.stop()


@pytest.fixture
def server(running_server: FakeServer) -> FakeServer:
    running_server.reset()
    return running_server


@pytest.fixture
def dead_url() -> str:
    """An address where nobody listens."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Backoff takes no time; what would have been waited for is recorded."""
    from octavo.cluster import client_protocol

    waits: list[float] = []
    original = client_protocol.backoff_seconds

    def instant(attempt: int, retry_after: float | None, uniform: float) -> float | None:
        wait = original(attempt, retry_after, uniform)
        if wait is None:
            return None
        waits.append(wait)
        return 0.0

    monkeypatch.setattr(client_protocol, "backoff_seconds", instant)
    return waits
