"""The HTTP app: OpenAI's routes, health and metrics over any `Backend`.

Owns the routes and puts the parts together. Knows nothing of where the backend runs: Ray Serve's ingress, one
process with the in-process engine, and the tests all call `create_app`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from fastapi import FastAPI, Request
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from octavo._version import __version__
from octavo.cluster.backend import Backend, HealthReport, HealthStatus
from octavo.cluster.forking import fork_context
from octavo.cluster.metrics import CONTENT_TYPE_LATEST, HttpMetrics
from octavo.cluster.openai import errors, utility
from octavo.cluster.openai.body import read_json
from octavo.cluster.openai.chat import ChatShape
from octavo.cluster.openai.completions import CompletionShape, echoes_of
from octavo.cluster.openai.config import HttpConfig
from octavo.cluster.openai.errors import JSON
from octavo.cluster.openai.front_door import FrontDoor
from octavo.cluster.openai.generation import Generation
from octavo.cluster.openai.prompts import (
    Prompt,
    build_requests,
    chat_prompt,
    completion_prompts,
    fork_request,
)
from octavo.cluster.openai.rendering import JsonRenderer, Shape
from octavo.cluster.openai.responses import ResponseRenderer
from octavo.cluster.openai.schemas import Call, parse_chat, parse_completion, parse_fork, parse_response
from octavo.cluster.openai.sse import GenerationResponse, Renderer
from octavo.cluster.tokenizer import Tokenizer
from octavo.protos.errors import NotFoundError
from octavo.protos.types import Request as GenerationRequest

logger = logging.getLogger(__name__)

REQUEST_IDS_HEADER = "x-octavo-request-id"
"""One id a prompt, comma separated: what a running request is forked by, and its timeline asked for."""
REQUEST_IDS_MAX = 64
"""More would not fit what clients and proxies allow headers; the others are numbered on."""
WARNING_HEADER = "x-octavo-warning"


def create_app(backend: Backend, tokenizer: Tokenizer, config: HttpConfig | None = None) -> FastAPI:
    """The ASGI app. `tokenizer` stays the caller's to close."""
    config = config or HttpConfig()
    metrics = HttpMetrics(config.replica)
    app = FastAPI(
        title="Octavo",
        version=__version__,
        docs_url=None,  # these pages load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
    )
    errors.install(app, config.retry_after_seconds)
    app.add_middleware(FrontDoor, config=config, metrics=metrics)
    if config.cors_origins:
        # Outside of the front door: a browser asks beforehand, without a key, and must be able to read refusals.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.cors_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["x-request-id", REQUEST_IDS_HEADER, WARNING_HEADER, "retry-after"],
        )
    _Routes(backend, tokenizer, config, metrics).add_to(app)
    return app


def _json(value: Any, status: int = 200, ignored: Sequence[str] = ()) -> Response:
    return Response(orjson.dumps(value), status, _warning(ignored), media_type=JSON)


def _warning(ignored: Sequence[str]) -> dict[str, str]:
    """The header that names fields which nobody knows, if there are any."""
    return {WARNING_HEADER: f"unknown fields ignored: {', '.join(ignored)}"} if ignored else {}


class _Routes:
    """The handlers, with what they share."""

    def __init__(
        self, backend: Backend, tokenizer: Tokenizer, config: HttpConfig, metrics: HttpMetrics
    ) -> None:
        self._backend = backend
        self._tokenizer = tokenizer
        self._config = config
        self._metrics = metrics
        self._names = config.served_model_names or (backend.model.name,)
        self._started = int(time.time())

    def add_to(self, app: FastAPI) -> None:
        for path, handler, *methods in (
            ("/v1/chat/completions", self.chat_completions, "POST"),
            ("/v1/completions", self.completions, "POST"),
            ("/v1/responses", self.responses, "POST"),
            ("/v1/fork", self.fork, "POST"),
            ("/v1/requests/{request_id}", self.timeline, "GET"),
            ("/v1/models", self.models, "GET"),
            ("/v1/models/{model_id:path}", self.model, "GET"),
            ("/tokenize", self.tokenize, "POST"),
            ("/detokenize", self.detokenize, "POST"),
            ("/health", self.health, "GET", "HEAD"),
            ("/ready", self.ready, "GET", "HEAD"),
            ("/metrics", self.metrics, "GET"),
        ):
            for method in methods:
                # One route a method: the schema needs an operation id for each.
                app.add_api_route(path, handler, methods=[method], response_model=None)

    # ---- generation

    async def chat_completions(self, request: Request) -> Response:
        """OpenAI's chat completions."""
        arrived = time.perf_counter()
        call = parse_chat(await read_json(request, self._config), self._config)
        name = self._served(call.model)
        prompts = [await chat_prompt(call, self._tokenizer, self._backend.model, self._config)]
        requests = build_requests(
            call, prompts, self._backend.model, self._config, prefix="chatcmpl", param="messages"
        )
        return self._reply(call, prompts, requests, ChatShape(call), name, arrived)

    async def completions(self, request: Request) -> Response:
        """OpenAI's text completions."""
        arrived = time.perf_counter()
        call = parse_completion(await read_json(request, self._config), self._config)
        name = self._served(call.model)
        prompts = await completion_prompts(call, self._tokenizer, self._backend.model, self._config)
        requests = build_requests(
            call, prompts, self._backend.model, self._config, prefix="cmpl", param="prompt"
        )
        shape = CompletionShape(call, echoes_of(call, prompts, self._tokenizer))
        return self._reply(call, prompts, requests, shape, name, arrived)

    async def responses(self, request: Request) -> Response:
        """OpenAI's responses: text, and nothing kept."""
        arrived = time.perf_counter()
        call = parse_response(await read_json(request, self._config), self._config)
        name = self._served(call.model)
        prompts = [await chat_prompt(call, self._tokenizer, self._backend.model, self._config)]
        requests = build_requests(
            call, prompts, self._backend.model, self._config, prefix="resp", param="input"
        )
        renderer = ResponseRenderer(call, requests[0], model_name=name)
        return self._answer(call, requests, renderer, arrived)

    async def fork(self, request: Request) -> Response:
        """A completion that goes on from where a running request stands: an extension."""
        arrived = time.perf_counter()
        call = parse_fork(await read_json(request, self._config), self._config)
        name = self._served(call.model)
        parent = await self._backend.tokens(call.request_id, call.branch)
        fork = fork_request(call, parent, self._backend.model, self._config)
        forked_at = parent.num_output_tokens
        return self._reply(
            call,
            [Prompt(parent.token_ids)],
            [fork],
            CompletionShape(call),
            name,
            arrived,
            context=fork_context(fork, forked_at),
            extensions={"fork": {"of": call.request_id, "branch": call.branch, "at": forked_at}},
        )

    def _reply(
        self,
        call: Call,
        prompts: Sequence[Prompt],
        requests: Sequence[GenerationRequest],
        shape: Shape,
        name: str,
        arrived: float,
        *,
        context: Sequence[int] = (),
        extensions: Mapping[str, Any] | None = None,
    ) -> Response:
        renderer = JsonRenderer(
            shape,
            call,
            prompts,
            self._tokenizer,
            call_id=requests[0].request_id.removesuffix("-0"),
            model_name=name,
            extensions=extensions,
        )
        return self._answer(call, requests, renderer, arrived, context)

    def _answer(
        self,
        call: Call,
        requests: Sequence[GenerationRequest],
        renderer: Renderer,
        arrived: float,
        context: Sequence[int] = (),
    ) -> Response:
        ids = ", ".join(request.request_id for request in requests[:REQUEST_IDS_MAX])
        headers = {REQUEST_IDS_HEADER: ids, **_warning(call.ignored)}
        return GenerationResponse(
            Generation(self._backend, self._tokenizer, requests, self._metrics, context),
            renderer,
            stream=call.stream,
            metrics=self._metrics,
            config=self._config,
            arrived=arrived,
            headers=headers,
        )

    def _served(self, name: str | None) -> str:
        """The model that is meant; with one model there is no need to say. Raises `NotFoundError`."""
        if name is None:
            return self._names[0]
        if name not in self._names:
            raise NotFoundError(
                f"the model {name!r:.200} does not exist; this server has {', '.join(self._names)}",
                param="model",
                code="model_not_found",
            )
        return name

    # ---- models and tokens

    async def models(self) -> Response:
        """The models of this server."""
        return _json({"object": "list", "data": [self._describe(name) for name in self._names]})

    async def model(self, model_id: str) -> Response:
        """One model."""
        return _json(self._describe(self._served(model_id)))

    def _describe(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._started,
            "owned_by": "octavo",
            "root": self._backend.model.name,
            "parent": None,
            "max_model_len": self._backend.model.max_model_len,
        }

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a prompt or of a conversation."""
        body = await read_json(request, self._config)
        self._served(body.text("model"))
        reply = await utility.tokenize(body, self._tokenizer, self._backend.model, self._config)
        return _json(reply, ignored=body.unknown())

    async def detokenize(self, request: Request) -> Response:
        """Text of token ids."""
        body = await read_json(request, self._config)
        self._served(body.text("model"))
        reply = await utility.detokenize(body, self._tokenizer, self._backend.model)
        return _json(reply, ignored=body.unknown())

    # ---- operation

    async def timeline(self, request_id: str) -> Response:
        """Why a request took as long as it did: an extension."""
        return _json(await self._backend.timeline(request_id))

    async def health(self) -> Response:
        """200 while the process makes progress or drains; 503 while it loads and once it is dead."""
        report = await self._health()
        return _json(report.as_dict(), 200 if report.status.alive else 503)

    async def ready(self) -> Response:
        """200 while new requests may be sent here, else 503."""
        report = await self._health()
        return _json(report.as_dict(), 200 if report.status.accepts_requests else 503)

    async def _health(self) -> HealthReport:
        try:
            return await asyncio.wait_for(self._backend.health(), self._config.health_seconds_max)
        except asyncio.TimeoutError:
            detail = f"the backend did not answer within {self._config.health_seconds_max:g} s"
        except Exception as error:
            logger.warning("the backend's health is unknown", exc_info=error)
            detail = f"the backend did not answer: {type(error).__name__}"
        return HealthReport(status=HealthStatus.DEAD, detail=detail)

    async def metrics(self) -> Response:
        """Prometheus text. A backend that does not answer leaves only this process's own numbers."""
        stats: dict[str, Any] | None = None
        try:
            stats = await asyncio.wait_for(self._backend.stats(), self._config.health_seconds_max)
        except Exception as error:
            logger.warning("the backend gave no stats: %s", type(error).__name__)
        return Response(self._metrics.render(stats), media_type=CONTENT_TYPE_LATEST)
