"""The page at /ui: who gets it, what it is told, and how it looks in a browser."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import re
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import uvicorn

from octavo.cluster.live import CELLS_MAX, block_map
from octavo.cluster.openai import live_page
from octavo.cluster.openai.app import create_app
from octavo.cluster.openai.config import HttpConfig
from octavo.cluster.service_config import ServiceConfig
from octavo.cluster.tokenizer import Tokenizer
from octavo.protos.errors import UnavailableError
from octavo.scheduler.block_pool import BlockState

from ..fake_cluster import Cluster
from ..support import collect, make_request, run, until
from .browser import CHROMIUM, open_page
from .conftest import Api, ScriptedBackend, Server

HOST = {"num_host_blocks": 24, "kv_bytes_per_block": 1024, "host_link_bytes_per_second": 1e9}


def events_of(url: str, count: int, **options: Any) -> list[dict[str, Any]]:
    found = []
    with httpx.stream("GET", f"{url}/ui/events", **options) as reply:
        assert reply.status_code == 200, reply.read()
        assert reply.headers["content-type"].startswith("text/event-stream")
        for line in reply.iter_lines():
            if line.startswith("data: "):
                found.append(json.loads(line.removeprefix("data: ")))
                if len(found) == count:
                    return found
    return found


def app_of(backend: Any, tokenizer: Tokenizer, **config: Any) -> Any:
    return create_app(backend, tokenizer, HttpConfig(live_page=True, **config))


def test_off_unless_asked_for_and_beyond_loopback(backend: ScriptedBackend, tokenizer: Tokenizer) -> None:
    api = Api(create_app(backend, tokenizer, HttpConfig()))
    assert api.get("/ui").status_code == api.get("/ui/events").status_code == 404
    assert ServiceConfig().http_config().live_page
    assert not ServiceConfig(host="0.0.0.0").http_config().live_page
    assert ServiceConfig(host="0.0.0.0", ui=True).http_config().live_page
    assert not ServiceConfig(ui=False).http_config().live_page


def test_the_page_loads_nothing_from_elsewhere(backend: ScriptedBackend, tokenizer: Tokenizer) -> None:
    api = Api(app_of(backend, tokenizer))
    reply = api.get("/ui")
    assert reply.headers["content-type"].startswith("text/html")
    assert "default-src 'self'" in reply.headers["content-security-policy"]
    paths = [path for path in re.findall(r'(?:href|src)="([^"]+)"', reply.text) if path != "data:,"]
    assert len(paths) == 2
    for path in paths:
        assert path.startswith("/ui/")
        assert api.get(path).status_code == 200
    assert "http" not in api.get("/ui/live.js").text


def test_its_data_needs_the_key(backend: ScriptedBackend, tokenizer: Tokenizer) -> None:
    with Server(app_of(backend, tokenizer, api_keys=("secret",))) as server:
        assert httpx.get(f"{server.url}/ui").status_code == 200
        assert httpx.get(f"{server.url}/ui/events").status_code == 401
        (told,) = events_of(server.url, 1, headers={"authorization": "Bearer secret"})
        assert told["workers"] == []


def test_all_viewers_are_told_the_same_and_too_many_are_refused(
    backend: ScriptedBackend, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_page, "VIEWERS_MAX", 2)
    monkeypatch.setattr(live_page, "PERIOD_SECONDS", 5.0)
    asked = 0
    plain = backend.live

    async def live() -> dict[str, Any]:
        nonlocal asked
        asked += 1
        if asked == 3:
            raise UnavailableError("the coordinator cannot be reached")
        return await plain()

    backend.live = live  # type: ignore[method-assign]
    with Server(app_of(backend, tokenizer)) as server:
        with (
            httpx.stream("GET", f"{server.url}/ui/events") as one,
            httpx.stream("GET", f"{server.url}/ui/events") as other,
        ):
            # A stream is counted once it has begun.
            readers = [one.iter_lines(), other.iter_lines()]
            assert all(next(reader).startswith("data: ") for reader in readers)
            assert asked == 1
            assert httpx.get(f"{server.url}/ui/events").status_code == 429
        monkeypatch.setattr(live_page, "PERIOD_SECONDS", 0.1)
        found = events_of(server.url, 4)
        assert {"error": "the coordinator cannot be reached"} in found
        assert found[-1].keys() != {"error"}


def test_a_large_pool_has_cells_of_several_blocks() -> None:
    states = np.zeros(3 * CELLS_MAX - 1, np.uint8)
    states[:4] = (BlockState.SHARED, BlockState.SHARED, BlockState.FREE, BlockState.PRIVATE)
    states[-2:] = BlockState.CACHED
    told = block_map(states.tobytes())
    cells = base64.b64decode(told["cells"])
    assert (told["blocks"], told["blocks_per_cell"], len(cells)) == (len(states), 3, CELLS_MAX)
    assert (cells[0], cells[1], cells[-1]) == (BlockState.SHARED, BlockState.FREE, BlockState.CACHED)
    assert told["counts"] == {"free": len(states) - 5, "cached": 2, "private": 1, "shared": 2}
    assert block_map(b"")["cells"] == ""


def test_what_is_told_of_a_cluster_under_pressure() -> None:
    async def test() -> None:
        async with Cluster(2, step_seconds=0.01, budget=64, info={"num_blocks": 24, **HOST}) as cluster:
            backend = await cluster.backend()
            requests = [
                make_request(f"r{i}", list(range(40)), max_tokens=60, **({"n": 2} if i % 2 else {}))
                for i in range(12)
            ]
            tasks = [asyncio.create_task(collect(backend, request)) for request in requests]
            await until(lambda: cluster.scheduler().snapshot()["sampled_tokens"] > 100)
            told = await backend.live()
            for worker in told["workers"]:
                assert worker["status"] == "ready"
                for kind, total in (("device_blocks", 24), ("host_blocks", 24)):
                    assert sum(worker[kind]["counts"].values()) == worker[kind]["blocks"] == total
                assert worker["device_blocks"]["counts"]["private"] > 0
                assert worker["device_blocks"]["counts"]["shared"] > 0
                assert 0 < len(worker["steps"]) <= 24
                for step in worker["steps"]:
                    assert len(step["rows"]) == len(step["tokens"])
                    assert sum(step["tokens"]) <= step["budget"]
                assert any(step["seconds"] for step in worker["steps"])
            assert {one["id"] for one in told["requests"]} >= {f"r{i}" for i in range(12)}
            assert told["unfinished"] == 12
            await asyncio.gather(*tasks)
            told = await backend.live()
            assert told["unfinished"] == 0
            assert told["time_to_first_token"]["count"] == 12
            assert {one["outcome"] for one in told["requests"]} == {"length"}
            assert "events" not in told["requests"][0]

    run(test())


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here (Debian: apt-get install chromium)")
def test_a_browser_shows_it(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """The real page beside a cluster of fake workers that is short of blocks. `screenshot` is there to be looked at."""

    async def test() -> None:
        async with Cluster(2, step_seconds=0.02, budget=128, info={"num_blocks": 96, **HOST}) as cluster:
            backend = await cluster.backend()

            async def keep_asking(i: int) -> None:
                # However long the browser takes to come, it finds tokens made.
                for turn in itertools.count():
                    request_id, prompt = f"request-{i}-{turn}", list(range(i % 3, 90))
                    await collect(backend, make_request(request_id, prompt, max_tokens=300, n=1 + i % 2))

            tasks = [asyncio.create_task(keep_asking(i)) for i in range(14)]
            await until(lambda: cluster.scheduler().snapshot()["sampled_tokens"] > 100)
            config = uvicorn.Config(
                app_of(backend, tokenizer, api_keys=("secret",)),
                host="127.0.0.1",
                port=0,
                log_level="error",
                lifespan="off",
            )
            server = uvicorn.Server(config)
            serving = asyncio.create_task(server.serve())
            await until(lambda: server.started)
            port = server.servers[0].sockets[0].getsockname()[1]
            async with open_page(f"http://127.0.0.1:{port}/ui") as page:
                await page.until("!document.getElementById('key-form').hidden")
                await page.value("document.getElementById('key').value = 'secret'")
                await page.value("document.querySelector('#key-form button').click()")
                await page.until("document.querySelectorAll('.worker canvas').length == 6")
                await page.until("document.querySelectorAll('#requests tr').length >= 14")
                assert await page.value("document.getElementById('key-form').hidden")
                assert "2 of 2 workers ready" in await page.value(
                    "document.getElementById('state').textContent"
                )
                await page.until(
                    "[...document.querySelectorAll('.figure')].some(one => /^[1-9].*tokens.s$/.test(one.textContent))"
                )
                await page.value("document.querySelector('#requests button').click()")
                await page.until("document.getElementById('timeline').textContent.includes('\"admitted\"')")
                await page.screenshot(tmp_path / "live.png")
                assert not [one for one in page.errors if "401" not in one]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            server.should_exit = True
            await serving

    run(test())
    assert (tmp_path / "live.png").stat().st_size > 10_000
