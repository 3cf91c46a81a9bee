"""The HTTP app over an in-process engine, reached without a socket: what a server does, in this process alone.

Owns the putting together. A batch that runs this way goes through the same validation, templates and error words as
one that a server answers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from octavo.cluster.engine import Engine
from octavo.cluster.engine_backend import EngineBackend
from octavo.cluster.openai.app import create_app

BASE_URL = "http://in-process"
"""Any URL does: nothing leaves the process."""


@contextmanager
def in_process_transport(model: str | None = None, *, device: str = "auto") -> Iterator[httpx.ASGITransport]:
    """An httpx transport that is answered by `model` in this process; for `AsyncClient(BASE_URL, transport=...)`.

    Raises `ModelLoadError` and `ConfigError` as `Engine` does.
    """
    with Engine(model, device=device) as engine:
        app = create_app(EngineBackend(engine.loop, engine.model), engine.tokenizer)
        yield httpx.ASGITransport(app)
