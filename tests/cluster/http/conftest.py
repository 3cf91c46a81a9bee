"""A scripted backend behind the real HTTP app: what the engine would do is decided by the test."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI

from octavo.cluster.backend import HealthReport, HealthStatus
from octavo.cluster.forking import TokensSoFar, not_running
from octavo.cluster.openai.app import create_app
from octavo.cluster.openai.config import HttpConfig
from octavo.cluster.tokenizer import Tokenizer
from octavo.protos.errors import OctavoError
from octavo.protos.structured_output import StructuredOutput
from octavo.protos.types import (
    FinishReason,
    ModelInfo,
    OutputDelta,
    PromptLogprobs,
    Request,
    RequestMetrics,
    TokenLogprobs,
    finish_reason,
)
from octavo.worker.default_model import default_model_dir

MODEL = "SmolLM2-135M-Instruct"
HELLO = [19556, 905, 17, 2]
"""What the scripted model says unless told otherwise: three tokens and the end of the turn."""


class ScriptedBackend:
    """Implements `Backend`. `answer(request, branch)` gives a branch's tokens; the usual rules end it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.model = ModelInfo(name=MODEL, vocab_size=49152, max_model_len=8192, eos_token_ids=(2,))
        self.tokenizer = tokenizer
        self.answer: Callable[[Request, int], list[int]] = lambda request, branch: HELLO
        self.tokens_per_delta = 1
        self.before_step: Callable[[Request, int], Awaitable[None]] | None = None
        """Called with the step number before each step; may wait, or raise what the engine would."""
        self.report = HealthReport(status=HealthStatus.READY)
        self.counts: dict[str, Any] = {"running": 0, "waiting": 0, "steps": 0}
        self.submitted: list[Request] = []
        self.aborted: list[str] = []
        self.finished: list[str] = []
        self.stopped: list[tuple[str, int]] = []
        """(request id, branch) of the calls of `stop_branch`."""
        self.running: dict[tuple[str, int], TokensSoFar] = {}
        """What `tokens` gives."""
        self.compiled: list[StructuredOutput] = []
        self.compile_error: OctavoError | None = None
        self.logprob: Callable[[int], float] = lambda branch: -0.5
        """Of every token of a branch."""

    @property
    def num_running(self) -> int:
        return len(self.submitted) - len(self.aborted) - len(self.finished)

    async def submit(self, request: Request) -> AsyncIterator[OutputDelta]:
        self.submitted.append(request)
        try:
            async for delta in self._deltas(request):
                yield delta
            self.finished.append(request.request_id)
        finally:
            if request.request_id not in self.finished:
                self.aborted.append(request.request_id)

    async def tokens(self, request_id: str, branch: int) -> TokensSoFar:
        if (request_id, branch) not in self.running:
            raise not_running(request_id)
        return self.running[request_id, branch]

    async def compile_grammar(self, wanted: StructuredOutput) -> None:
        self.compiled.append(wanted)
        if self.compile_error is not None:
            raise self.compile_error

    async def timeline(self, request_id: str) -> dict[str, Any]:
        if request_id not in self.finished:
            raise not_running(request_id)
        return {"id": request_id, "object": "request.timeline", "events": []}

    def stop_branch(self, request_id: str, branch: int) -> None:
        self.stopped.append((request_id, branch))

    async def _deltas(self, request: Request) -> AsyncIterator[OutputDelta]:
        room = self.model.max_model_len - request.num_prompt_tokens
        limit = min(request.params.max_tokens or room, room)
        params = request.params
        texts = [self.answer(request, branch) for branch in range(params.best_of or params.n)]
        sent, live, step = [0] * len(texts), set(range(len(texts))), 0
        for start in range(1, request.num_prompt_tokens if params.prompt_logprobs is not None else 1):
            # Two a step, so that each but the first is told twice, as after a preemption.
            tokens = request.prompt_token_ids[start : start + 2].tolist()
            entries = tuple(self._prompt_logprobs(token, params.prompt_logprobs or 0) for token in tokens)
            yield OutputDelta(
                request_id=request.request_id,
                branch=0,
                offset=0,
                token_ids=(),
                prompt_logprobs=PromptLogprobs(start, entries),
            )
        while live:
            if self.before_step is not None:
                await self.before_step(request, step)
            await asyncio.sleep(0)
            step += 1
            for branch in sorted(live):
                ids: list[int] = []
                reason = None
                while len(ids) < self.tokens_per_delta and reason is None:
                    position = sent[branch] + len(ids)
                    token = texts[branch][position % len(texts[branch])]
                    ids.append(token)
                    reason = finish_reason(request, position + 1, token, limit)
                if reason is not None:
                    live.discard(branch)
                yield OutputDelta(
                    request_id=request.request_id,
                    branch=branch,
                    offset=sent[branch],
                    token_ids=tuple(ids),
                    logprobs=tuple(self._logprobs(request, branch, token) for token in ids)
                    if params.logprobs is not None or params.ranks_by_logprob
                    else (),
                    finish_reason=reason,
                    request_finished=not live,
                    metrics=RequestMetrics(cached_tokens=3) if not live else None,
                    score=-0.25 * (branch + 1) if reason and params.beam_width else None,
                )
                sent[branch] += len(ids)

    def _logprobs(self, request: Request, branch: int, token: int) -> TokenLogprobs:
        tops = request.params.logprobs or 0
        ids = tuple([token, *range(100, 120)][:tops])
        return TokenLogprobs(self.logprob(branch), ids, tuple([-0.5, *([float("-inf")] * 20)][:tops]))

    @staticmethod
    def _prompt_logprobs(token: int, tops: int) -> TokenLogprobs:
        """A thousandth of the token's own id, below 0; the likeliest are 100, 101, ..."""
        ids = tuple(range(100, 100 + tops))
        return TokenLogprobs(-token / 1000, ids, tuple(-0.5 - index for index in range(tops)))

    async def health(self) -> HealthReport:
        return self.report

    async def stats(self) -> dict[str, Any]:
        return self.counts

    async def live(self) -> dict[str, Any]:
        return {**self.counts, "workers": [], "requests": []}


def failing(delta_error: str, name: str) -> Callable[[Request], AsyncIterator[OutputDelta]]:
    """A `submit` whose request gives one token and then the error that a delta carries."""

    async def submit(request: Request) -> AsyncIterator[OutputDelta]:
        yield OutputDelta(request_id=request.request_id, branch=0, offset=0, token_ids=(19556,))
        yield OutputDelta(
            request_id=request.request_id,
            branch=0,
            offset=1,
            token_ids=(),
            finish_reason=FinishReason.ERROR,
            request_finished=True,
            error=delta_error,
            error_name=name,
        )

    return submit


class Api:
    """Calls an app without a socket."""

    def __init__(self, app: FastAPI) -> None:
        self.app = app

    def send(self, method: str, path: str, **kwargs: Any) -> httpx.Response:
        async def go() -> httpx.Response:
            transport = httpx.ASGITransport(app=self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://octavo") as client:
                return await client.request(method, path, **kwargs)

        return asyncio.run(go())

    def get(self, path: str, **kwargs: Any) -> httpx.Response:
        return self.send("GET", path, **kwargs)

    def post(self, path: str, body: Any = None, **kwargs: Any) -> httpx.Response:
        # Unlike httpx's own, this json.dumps writes NaN for who wants to send it.
        content = body if isinstance(body, (bytes, str)) else json.dumps(body)
        headers = {"content-type": "application/json", **kwargs.pop("headers", {})}
        return self.send("POST", path, content=content, headers=headers, **kwargs)

    def complete(self, **fields: Any) -> httpx.Response:
        return self.post("/v1/completions", {"model": MODEL, "prompt": "Hi", **fields})

    def send_complete(self, headers: dict[str, str]) -> httpx.Response:
        return self.post("/v1/completions", {"prompt": "Hi"}, headers=headers)

    def chat(self, **fields: Any) -> httpx.Response:
        messages = [{"role": "user", "content": "Hi"}]
        return self.post("/v1/chat/completions", {"model": MODEL, "messages": messages, **fields})


def events(response: httpx.Response) -> list[Any]:
    """The data of a stream's events: objects, and "[DONE]" as it is."""
    assert response.headers["content-type"].startswith("text/event-stream")
    return parse_events(response.text)


def parse_events(text: str) -> list[Any]:
    blocks = text.split("\n\n")
    assert blocks.pop() == "", "the last event is not complete"
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    return [
        block[6:] if block == "data: [DONE]" else json.loads(block[6:], parse_constant=_refuse)
        for block in blocks
    ]


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


def error_of(response: httpx.Response, status: int, param: str | None = None) -> dict[str, Any]:
    """Assert that `response` is an OpenAI error of `status` about `param`; returns its "error"."""
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert "Traceback" not in error["message"]
    if param is not None:
        assert error["param"] == param, error
    return error


class Server:
    """A real uvicorn on a loopback port, in a thread of its own."""

    def __init__(self, app: FastAPI) -> None:
        config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", lifespan="off")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)

    def __enter__(self) -> Server:
        self._thread.start()
        while not self._server.started:
            assert self._thread.is_alive()
            threading.Event().wait(0.01)
        port = self._server.servers[0].sockets[0].getsockname()[1]
        self.port: int = port
        self.url = f"http://127.0.0.1:{port}"
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(10)


@pytest.fixture(scope="session")
def tokenizer() -> Iterator[Tokenizer]:
    made = Tokenizer(default_model_dir())
    yield made
    made.close()


@pytest.fixture
def backend(tokenizer: Tokenizer) -> ScriptedBackend:
    return ScriptedBackend(tokenizer)


@pytest.fixture
def make_api(backend: ScriptedBackend, tokenizer: Tokenizer) -> Callable[..., Api]:
    return lambda **config: Api(create_app(backend, tokenizer, HttpConfig(**config)))


@pytest.fixture
def api(make_api: Callable[..., Api]) -> Api:
    return make_api()
