"""The HTTP app in replicas of Ray Serve: one, or several, in front of the coordinator.

Owns how a replica is put together, where it listens and what Serve may queue. The app itself knows nothing of Serve. A
replica imports neither torch nor transformers: it needs the tokenizer and `ModelInfo`, which come from the model's
folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from octavo.cluster.coordinator import find_coordinator
from octavo.cluster.coordinator_client import GrpcBackend
from octavo.cluster.listener import Listener
from octavo.cluster.metrics.exposition import Family
from octavo.cluster.metrics.ray_export import keep_publishing
from octavo.cluster.openai.app import create_app
from octavo.cluster.openai.config import HttpConfig
from octavo.cluster.tokenizer import Tokenizer
from octavo.protos.auth import OPEN, Access
from octavo.protos.errors import UnavailableError
from octavo.worker.loader import read_model_info, resolve_model

if TYPE_CHECKING:
    from fastapi import FastAPI
    from ray import serve

logger = logging.getLogger(__name__)

APP_NAME = "octavo"
MAX_ONGOING_REQUESTS = 8192
"""Calls in one replica. Above the front door's own limit, whose refusals are in OpenAI's shape."""
MAX_QUEUED_REQUESTS = 1024
"""Calls that wait at each proxy for a replica; Serve refuses the next with 503."""
DRAIN_SECONDS = 30
"""A replica that is replaced finishes what it answers. One whose coordinator has been drained has nothing left."""
GRACEFUL_SHUTDOWN_SECONDS = DRAIN_SECONDS + 5.0
"""Then Serve ends its process."""
CONNECT_SECONDS = 5.0
"""For the stream to the coordinator, before a new replica listens and says itself that there is none."""
STREAM_ITEMS_PER_SECOND = 8000.0
"""Of a replica that listens itself, beyond which tokens share events: less than half of what it carries
(docs/performance.md)."""
HEAD_NODE = {"node:__internal_head__": 0.001}
"""Ray's mark of the head node. That is the address which clients know, and Serve's proxy is there: a replica elsewhere
would be one more node whose loss breaks connections."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IngressConfig:
    """What a replica is told. The model is named, not sent: each node has, or fetches, its own copy."""

    model: str | None = None
    max_model_len: int | None = None
    """As the workers were told; None: the model's."""
    num_replicas: int = 1
    host: str | None = None
    """Where every replica listens by itself; None: calls come through Serve's proxy."""
    port: int = 0
    http: HttpConfig = field(default_factory=HttpConfig)
    access: Access = OPEN
    """For calls to the coordinator."""


def build_app(config: IngressConfig) -> FastAPI:
    """The app of one replica; its lifespan holds the stream to the coordinator."""
    source = resolve_model(config.model)
    model = read_model_info(source)
    if config.max_model_len is not None:
        model = replace(model, max_model_len=min(model.max_model_len, config.max_model_len))
    tokenizer = Tokenizer(source.tokenizer_dir)
    backend = GrpcBackend(model, find_coordinator, access=config.access)
    http = config.http
    if config.host is not None:
        http = replace(http, stream_items_per_second=STREAM_ITEMS_PER_SECOND)
    if config.num_replicas > 1:
        # A scrape reaches any of them: their counters must not be taken for one that jumps.
        http = replace(http, replica=f"{socket.gethostname()}-{os.getpid()}")
    app = create_app(backend, tokenizer, http)
    listener = None
    if config.host is not None:
        listener = Listener(app, config.host, config.port, drain_seconds=DRAIN_SECONDS)

    async def families() -> list[Family]:
        return app.state.metrics.families()

    @contextlib.asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        backend.start()
        publishing = asyncio.create_task(keep_publishing(families))
        jobs = app.state.jobs
        if jobs is not None:
            # Batches that an earlier process had begun go on.
            jobs.start()
        if listener is not None:
            # One beside others takes no connection before it can answer as they do.
            with contextlib.suppress(UnavailableError):
                await backend.wait_connected(CONNECT_SECONDS)
            await listener.start()
        yield
        if listener is not None:
            await listener.close()
        publishing.cancel()
        await asyncio.gather(publishing, return_exceptions=True)
        if jobs is not None:
            await jobs.close()
        await backend.close()
        tokenizer.close()

    app.router.lifespan_context = lifespan
    return app


def ingress_application(config: IngressConfig, *parts: serve.Application) -> serve.Application:
    """What `serve.run` takes. `parts` are deployed with it."""
    from ray import serve

    # Serve calls a plain function, and nothing else, on the replica and not here.
    def build() -> FastAPI:
        return build_app(config)

    # Annotated as the decorator that it is without a class.
    deployment: Any = serve.deployment(
        serve.ingress(build)(),
        name="ingress",
        num_replicas=config.num_replicas,
        max_ongoing_requests=MAX_ONGOING_REQUESTS,
        max_queued_requests=MAX_QUEUED_REQUESTS,
        graceful_shutdown_timeout_s=GRACEFUL_SHUTDOWN_SECONDS,
        graceful_shutdown_wait_loop_s=0.2,
        # Placed beside the workers, which have claimed the cores.
        ray_actor_options={"num_cpus": 0, "resources": HEAD_NODE},
    )
    application: serve.Application = deployment.bind(*parts)
    return application
