"""Sends bodies to a server beside a neighbour, and judges what comes back."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import httpx

CONCURRENCY = 16
ANSWER_SECONDS_MAX = 60.0
"""A call that takes longer hangs: nothing here asks for more than a few tokens, or for as many as the model takes."""
NEIGHBOUR: dict[str, Any] = {
    "prompt": "Once upon a time",
    "max_tokens": 100,
    "temperature": 0,
    "ignore_eos": True,
    "stream": True,
}


@dataclass
class Verdict:
    statuses: Counter[int] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    neighbours: int = 0
    """Streams that ran beside, each equal to the one that ran alone."""


async def attack(url: str, calls: Iterable[tuple[str, bytes]]) -> Verdict:
    """Send all calls, and a neighbour's stream again and again, which must not notice."""
    verdict = Verdict()
    limits = httpx.Limits(max_connections=CONCURRENCY + 2)
    async with httpx.AsyncClient(
        base_url=url, timeout=ANSWER_SECONDS_MAX, limits=limits, trust_env=False
    ) as http:
        alone = await _neighbour(http)
        over = asyncio.Event()

        async def beside() -> None:
            while not over.is_set():
                text = await _neighbour(http)
                if text != alone:
                    verdict.faults.append(f"the neighbour got {text[:80]!r} for {alone[:80]!r}")
                verdict.neighbours += 1

        todo = iter(calls)

        async def work() -> None:
            for path, body in todo:
                await _judge(http, path, body, verdict)

        watching = asyncio.create_task(beside())
        try:
            await asyncio.gather(*(work() for _ in range(CONCURRENCY)))
        finally:
            over.set()
            await watching
    return verdict


async def _neighbour(http: httpx.AsyncClient) -> str:
    text = ""
    async with http.stream("POST", "/v1/completions", json=NEIGHBOUR) as reply:
        assert reply.status_code == 200, await reply.aread()
        async for line in reply.aiter_lines():
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["text"]
    return text


async def _judge(http: httpx.AsyncClient, path: str, body: bytes, verdict: Verdict) -> None:
    try:
        reply = await http.post(path, content=body, headers={"content-type": "application/json"})
        problem = _problem(reply, body)
        verdict.statuses[reply.status_code] += 1
    except httpx.HTTPError as error:
        problem = f"{type(error).__name__}: {error}"
    if problem:
        verdict.faults.append(f"{path} {body[:300]!r}: {problem}")


def _problem(reply: httpx.Response, body: bytes) -> str | None:
    """What is wrong with an answer, whatever was asked."""
    status = reply.status_code
    # A caller that gives itself no time has asked for it.
    if status >= 500 and not (status == 504 and b"timeout" in body):
        return f"HTTP {status}: {reply.text[:300]}"
    if reply.headers["content-type"].startswith("text/event-stream"):
        return None if _whole(reply.text) else f"a stream without an end: {reply.text[-200:]!r}"
    try:
        told = json.loads(reply.text, parse_constant=_refuse)
    except ValueError as error:
        return f"no JSON: {error}"
    if status >= 400 and not {"message", "type", "param", "code"} <= told.get("error", {}).keys():
        return f"no error object: {reply.text[:200]}"
    return None


def _whole(events: str) -> bool:
    return "data: [DONE]" in events or "event: response." in events.rsplit("\n\n", 2)[-2]


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
