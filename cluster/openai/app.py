"""The HTTP app: OpenAI's routes, health and metrics over any `Backend`.

Owns the routes and puts the parts together. Knows nothing of where the backend runs: Ray Serve's ingress, one
process with the in-process engine, and the tests all call `create_app`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any

import orjson
from fastapi import FastAPI, Request
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from octavo._version import __version__
from octavo.cluster.backend import Backend, HealthReport, HealthStatus
from octavo.cluster.client_protocol import CHAT_COMPLETIONS, COMPLETIONS
from octavo.cluster.metrics.http import CONTENT_TYPE_LATEST, HttpMetrics
from octavo.cluster.openai import errors, live_page, utility
from octavo.cluster.openai.body import read_json
from octavo.cluster.openai.calls import FORK, RESPONSES, Calls
from octavo.cluster.openai.config import HttpConfig
from octavo.cluster.openai.errors import JSON
from octavo.cluster.openai.front_door import FrontDoor, tenant_of
from octavo.cluster.openai.job_routes import JobRoutes, make_runner
from octavo.cluster.openai.openapi import Described
from octavo.cluster.openai.sse import GenerationResponse
from octavo.cluster.tokenizer import Tokenizer
from octavo.cluster.trace_context import trace_parent_of

logger = logging.getLogger(__name__)

REQUEST_IDS_HEADER = "x-octavo-request-id"
"""One id a prompt, comma separated: what a running request is forked by, and its timeline asked for."""
REQUEST_IDS_MAX = 64
"""More would not fit what clients and proxies allow headers; the others are numbered on."""
WARNING_HEADER = "x-octavo-warning"


def create_app(backend: Backend, tokenizer: Tokenizer, config: HttpConfig | None = None) -> FastAPI:
    """The ASGI app. `tokenizer` stays the caller's to close. `app.state.metrics` are its `HttpMetrics`.

    `app.state.jobs` is its `JobRunner`, None without `jobs_dir`: started by the first batch, or by the caller, who
    closes it.
    """
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
    described = Described(backend.model)
    calls = Calls(backend, tokenizer, config, metrics)
    _Routes(backend, tokenizer, calls, config, metrics).add_to(app, described)
    if config.live_page:
        live_page.add_to(app, backend)
    app.state.metrics = metrics
    app.state.jobs = None
    if config.jobs_dir is not None:
        app.state.jobs = make_runner(calls, config, on_line=metrics.on_batch_line)
        metrics.batches_running.set_function(lambda: app.state.jobs.num_running)
    JobRoutes(app.state.jobs, config).add_to(app, described)
    return app


def _json(value: Any, status: int = 200, ignored: Sequence[str] = ()) -> Response:
    return Response(orjson.dumps(value), status, _warning(ignored), media_type=JSON)


def _warning(ignored: Sequence[str]) -> dict[str, str]:
    """The header that names fields which nobody knows, if there are any."""
    return {WARNING_HEADER: f"unknown fields ignored: {', '.join(ignored)}"} if ignored else {}


class _Routes:
    """The handlers, with what they share."""

    def __init__(
        self,
        backend: Backend,
        tokenizer: Tokenizer,
        calls: Calls,
        config: HttpConfig,
        metrics: HttpMetrics,
    ) -> None:
        self._backend = backend
        self._tokenizer = tokenizer
        self._calls = calls
        self._config = config
        self._metrics = metrics
        self._started = int(time.time())

    def add_to(self, app: FastAPI, described: Described) -> None:
        for path, handler, *methods in (
            (CHAT_COMPLETIONS, self.chat_completions, "POST"),
            (COMPLETIONS, self.completions, "POST"),
            (RESPONSES, self.responses, "POST"),
            (FORK, self.fork, "POST"),
            ("/v1/requests/{request_id}", self.timeline, "GET"),
            ("/v1/models", self.models, "GET"),
            ("/v1/models/{model_id:path}", self.model, "GET"),
            ("/tokenize", self.tokenize, "POST"),
            ("/detokenize", self.detokenize, "POST"),
            ("/tokenizer_info", self.tokenizer_info, "GET"),
            ("/health", self.health, "GET", "HEAD"),
            ("/ready", self.ready, "GET", "HEAD"),
            ("/metrics", self.metrics, "GET"),
            ("/stats", self.stats, "GET"),
        ):
            for method in methods:
                # One route a method: the schema needs an operation id for each.
                app.add_api_route(path, handler, methods=[method], **described(path, method))

    # ---- generation

    async def chat_completions(self, request: Request) -> Response:
        """OpenAI's chat completions."""
        return await self._generate(request, CHAT_COMPLETIONS)

    async def completions(self, request: Request) -> Response:
        """OpenAI's text completions."""
        return await self._generate(request, COMPLETIONS)

    async def responses(self, request: Request) -> Response:
        """OpenAI's responses: text, and nothing kept."""
        return await self._generate(request, RESPONSES)

    async def fork(self, request: Request) -> Response:
        """A completion that goes on from where a running request stands: an extension."""
        return await self._generate(request, FORK)

    async def _generate(self, request: Request, path: str) -> Response:
        arrived = time.perf_counter()
        body = await read_json(request, self._config)
        prepared = await self._calls.prepare(
            path,
            body,
            tenant=tenant_of(request.scope),
            trace_parent=trace_parent_of(request.scope["headers"]),
        )
        ids = ", ".join(running.request_id for running in prepared.requests[:REQUEST_IDS_MAX])
        return GenerationResponse(
            self._calls.generation(prepared),
            prepared.renderer,
            stream=prepared.call.stream,
            metrics=self._metrics,
            config=self._config,
            arrived=arrived,
            headers={REQUEST_IDS_HEADER: ids, **_warning(prepared.call.ignored)},
        )

    # ---- models and tokens

    async def models(self) -> Response:
        """The models of this server."""
        return _json({"object": "list", "data": [self._describe(name) for name in self._calls.names]})

    async def model(self, model_id: str) -> Response:
        """One model."""
        return _json(self._describe(self._calls.served(model_id)))

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
        self._calls.served(body.text("model"))
        reply = await utility.tokenize(body, self._tokenizer, self._backend.model, self._config)
        return _json(reply, ignored=body.unknown())

    async def detokenize(self, request: Request) -> Response:
        """Text of token ids."""
        body = await read_json(request, self._config)
        self._calls.served(body.text("model"))
        reply = await utility.detokenize(body, self._tokenizer, self._backend.model)
        return _json(reply, ignored=body.unknown())

    async def tokenizer_info(self) -> Response:
        """Special tokens and chat template."""
        return _json(utility.tokenizer_info(self._tokenizer, self._backend.model))

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
            async with asyncio.timeout(self._config.health_seconds_max):
                return await self._backend.health()
        except TimeoutError:
            detail = f"the backend did not answer within {self._config.health_seconds_max:g} s"
        except Exception as error:
            logger.warning("the backend's health is unknown", exc_info=error)
            detail = f"the backend did not answer: {type(error).__name__}"
        return HealthReport(status=HealthStatus.DEAD, detail=detail)

    async def stats(self) -> Response:
        """Counts and gauges of the system and of each worker: an extension."""
        return _json(await self._backend.stats())

    async def metrics(self) -> Response:
        """Prometheus text. A backend that does not answer leaves only this process's own numbers."""
        stats: dict[str, Any] | None = None
        try:
            async with asyncio.timeout(self._config.health_seconds_max):
                stats = await self._backend.stats()
        except Exception as error:
            logger.warning("the backend gave no stats: %s", type(error).__name__)
        # A page of many workers takes tens of milliseconds to write, in which streams should go on.
        page = await asyncio.to_thread(self._metrics.render, stats)
        return Response(page, media_type=CONTENT_TYPE_LATEST)
