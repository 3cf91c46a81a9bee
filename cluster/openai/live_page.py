"""The page at /ui: plain HTML, one script, fed by server-sent events. Read-only.

Owns how often the system is looked at, and by how many at once. What is shown is `live.py`'s.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from importlib.resources import files

import orjson
from fastapi import FastAPI
from starlette.responses import Response, StreamingResponse

from octavo.cluster.backend import Backend
from octavo.cluster.openai.sse import EVENT_STREAM, event
from octavo.protos.errors import OctavoError, OverloadedError

PERIOD_SECONDS = 1.0
VIEWERS_MAX = 16
_FILES = {
    "/ui": ("live.html", "text/html; charset=utf-8"),
    "/ui/live.js": ("live.js", "text/javascript; charset=utf-8"),
    "/ui/live.css": ("live.css", "text/css; charset=utf-8"),
}
_HEADERS = {
    # Nothing from elsewhere, and in nobody's frame.
    "content-security-policy": "default-src 'self'; img-src data:; frame-ancestors 'none'",
    "cache-control": "no-cache",
}


def add_to(app: FastAPI, backend: Backend) -> None:
    """Routes of the page and of its events, outside of the API's document."""
    folder = files("octavo.cluster.openai") / "page"
    for path, (name, media_type) in _FILES.items():
        content = (folder / name).read_bytes()

        async def page(content: bytes = content, media_type: str = media_type) -> Response:
            return Response(content, media_type=media_type, headers=_HEADERS)

        app.add_api_route(path, page, methods=["GET"], include_in_schema=False, response_model=None)
    viewers = Viewers(backend)
    app.add_api_route(
        "/ui/events", viewers.events, methods=["GET"], include_in_schema=False, response_model=None
    )


class Viewers:
    """Everybody who looks gets the same events: the system is asked once a period, and only while somebody looks."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._num_viewers = 0
        self._asked_at = float("-inf")
        self._told = b""
        self._asking = asyncio.Lock()

    async def events(self) -> Response:
        """A stream without end. Raises `OverloadedError` for one viewer too many."""
        if self._num_viewers >= VIEWERS_MAX:
            raise OverloadedError(f"{VIEWERS_MAX} pages are open; the limit is {VIEWERS_MAX}")
        return StreamingResponse(
            self._stream(), media_type=EVENT_STREAM, headers={"cache-control": "no-store"}
        )

    async def _stream(self) -> AsyncIterator[bytes]:
        self._num_viewers += 1
        try:
            while True:
                yield event(await self._now())
                await asyncio.sleep(PERIOD_SECONDS)
        finally:
            self._num_viewers -= 1

    async def _now(self) -> bytes:
        async with self._asking:
            clock = asyncio.get_running_loop().time()
            if clock - self._asked_at >= PERIOD_SECONDS / 2:
                self._asked_at = clock
                try:
                    self._told = orjson.dumps(await self._backend.live())
                except OctavoError as error:
                    self._told = orjson.dumps({"error": error.message})
            return self._told
