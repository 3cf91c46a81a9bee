"""A port of one's own: shared among replicas, left without cutting anybody, and refused where it is taken."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from octavo.cluster.listener import Listener

HOST = "127.0.0.1"


class App:
    """Answers with its name; a call to /slow once `go` is set."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.go = asyncio.Event()
        self.num_waiting = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/slow":
            self.num_waiting += 1
            await self.go.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": self.name.encode()})


@contextlib.asynccontextmanager
async def calling(port: int) -> AsyncIterator[httpx.AsyncClient]:
    """Every call over a connection of its own."""
    limits = httpx.Limits(max_keepalive_connections=0)
    url = f"http://{HOST}:{port}"
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=10, trust_env=False) as client:
        yield client


def test_a_replica_that_leaves_finishes_what_it_answers_and_the_others_take_the_rest() -> None:
    async def scenario() -> None:
        old, new = App("old"), App("new")
        leaving = Listener(old, HOST, 0, drain_seconds=10)
        port = await leaving.start()
        staying = Listener(new, HOST, port, drain_seconds=10)
        async with calling(port) as client:
            slow = asyncio.create_task(client.get("/slow"))
            while not old.num_waiting:
                await asyncio.sleep(0.01)
            assert await staying.start() == port
            closing = asyncio.create_task(leaving.close())
            while leaving._server.servers[0].is_serving():
                await asyncio.sleep(0.01)
            assert {(await client.get("/")).text for _ in range(20)} == {"new"}
            assert not closing.done()
            old.go.set()
            assert (await slow).text == "old"
            await closing
            await staying.close()

    asyncio.run(scenario())


def test_what_is_not_over_in_time_is_cut() -> None:
    async def scenario() -> None:
        app = App("alone")
        listener = Listener(app, HOST, 0, drain_seconds=1)
        async with calling(await listener.start()) as client:
            slow = asyncio.create_task(client.get("/slow"))
            while not app.num_waiting:
                await asyncio.sleep(0.01)
            async with asyncio.timeout(5):
                await listener.close()
            with pytest.raises(httpx.HTTPError):
                (await slow).raise_for_status()

    asyncio.run(scenario())


def test_a_port_that_somebody_else_has_is_refused() -> None:
    async def scenario() -> None:
        with socket.create_server((HOST, 0)) as taken:
            listener = Listener(App("late"), HOST, taken.getsockname()[1], drain_seconds=1)
            with pytest.raises(OSError, match="in use"):
                await listener.start()
            await listener.close()

    asyncio.run(scenario())
