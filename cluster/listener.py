"""A port of its own for an HTTP app, on the loop of whoever starts it.

Owns the listening socket and how its connections end. Knows nothing of Ray Serve, whose proxy is thereby out of the
way: that one hands on each call and each streamed item as a message between processes, first come first served, for
several times what the call itself costs here (docs/performance.md).
"""

from __future__ import annotations

import asyncio
import socket

import uvicorn
from starlette.types import ASGIApp

BACKLOG = 2048
"""Connections that wait to be accepted."""
KEEP_ALIVE_SECONDS = 90
"""Of an idle connection: longer than load balancers keep theirs, or they would use one that is about to close."""
START_POLL_SECONDS = 0.01


class Listener:
    """`start`, then `close`, once each, on one loop."""

    def __init__(self, app: ASGIApp, host: str, port: int, *, drain_seconds: int) -> None:
        """`drain_seconds`: how long `close` lets calls finish that are being answered. Port 0: any free one."""
        self._address = (host, port)
        self._server = uvicorn.Server(
            uvicorn.Config(
                app,
                lifespan="off",  # of whoever owns the app
                log_config=None,
                log_level="warning",
                access_log=False,
                ws="none",
                backlog=BACKLOG,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=drain_seconds,
            )
        )
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> int:
        """Returns the port, once it answers. Raises `OSError` when nobody may listen there."""
        sock = _listening_socket(*self._address)
        self._task = asyncio.create_task(self._server.serve(sockets=[sock]))
        while not self._server.started:
            if self._task.done():
                self._task.result()
            await asyncio.sleep(START_POLL_SECONDS)
        port: int = sock.getsockname()[1]
        return port

    async def close(self) -> None:
        """Take no more connections, let calls finish, and cut what is left."""
        self._server.should_exit = True
        if self._task is not None:
            await self._task


def _listening_socket(host: str, port: int) -> socket.socket:
    """Bound, and not alone: replicas on one machine share the port, among which the kernel spreads connections, and one
    that is replaced leaves while its successor is there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind((host, port))
    except BaseException:
        sock.close()
        raise
    return sock
