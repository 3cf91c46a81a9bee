"""Puts load on a running endpoint and measures what a client sees: `octavo bench`.

Owns the workload (prompts, arrivals), the client's clock and the figures. Speaks OpenAI's streaming API and nothing
else, so any server can be measured. One asyncio loop; the client must not be what is measured, so nothing is parsed
while streams run but their events.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import orjson

from octavo.cluster import client_protocol as protocol
from octavo.cluster.client_http import checked_base_url, events_of, mapped, reply_of
from octavo.protos import errors

WORDS = (
    *(
        "time",
        "year",
        "people",
        "way",
        "day",
        "man",
        "thing",
        "woman",
        "life",
        "child",
        "world",
        "school",
        "state",
    ),
    *("family", "student", "group", "country", "problem", "hand", "part", "place", "case", "week", "company"),
    *(
        "system",
        "program",
        "question",
        "work",
        "government",
        "number",
        "night",
        "point",
        "home",
        "water",
        "room",
    ),
)
"""Of synthetic prompts; common ones are about one token each."""
PERCENTILES = (50, 90, 99)
ERRORS_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What to send. Raises `ConfigError` naming the option."""

    num_requests: int = 100
    concurrency: int = 16
    """Requests under way at once; with `rate` the most of them."""
    rate: float | None = None
    """Requests a second, with exponential gaps (Poisson); None: the next as soon as one ends."""
    max_tokens: int = 64
    prompt_words: int = 128
    """Of a synthetic prompt."""
    shared_words: int = 0
    """So many of them, at the beginning, are the same in all prompts."""
    ignore_eos: bool = True
    """Every answer has `max_tokens` tokens; needs a server that knows the field."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_requests", "concurrency", "max_tokens", "prompt_words"):
            if getattr(self, name) < 1:
                raise errors.ConfigError(f"{name} must be at least 1, got {getattr(self, name)}", param=name)
        if not 0 <= self.shared_words <= self.prompt_words:
            raise errors.ConfigError(
                f"shared_words must be in [0, {self.prompt_words}], got {self.shared_words}",
                param="shared_words",
            )
        if self.rate is not None and not 0 < self.rate < float("inf"):
            raise errors.ConfigError(f"rate must be above 0, got {self.rate}", param="rate")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Whom to send it to."""

    url: str
    model: str
    api_key: str | None = None
    timeout_seconds: float = 600.0
    """That an answer may be silent."""


@dataclass(slots=True)
class Sample:
    """One request as its client saw it. Seconds since it was sent."""

    token_seconds: list[float] = field(default_factory=list)
    """When each event with text came."""
    seconds: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Figures:
    """Of a whole run. Latencies are mappings of `mean`, `p50`, `p90`, `p99`, `max`, in seconds."""

    requests: int
    failed: int
    seconds: float
    requests_per_second: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    output_tokens_per_second: float
    prompt_tokens_per_second: float
    ttft: Mapping[str, float]
    """Time to first token."""
    itl: Mapping[str, float]
    """Time between two tokens: of each request the mean after the first token."""
    gap: Mapping[str, float]
    """Longest time between two events of a request."""
    latency: Mapping[str, float]
    errors: Mapping[str, int]
    """The commonest, with their counts."""

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self)


def read_prompts(path: Path) -> list[str]:
    """One prompt a line: text, or JSON with "prompt", "question", "text" or chat messages. Raises `ConfigError`."""
    try:
        lines = [line for line in path.read_text("utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as problem:
        raise errors.ConfigError(f"cannot read {path}: {problem}", param="prompts") from problem
    if not lines:
        raise errors.ConfigError(f"{path} holds no prompts", param="prompts")
    return [_prompt_of(line) for line in lines]


def _prompt_of(line: str) -> str:
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        return line
    if isinstance(record, dict):
        record = record.get("body", record)
        for name in ("prompt", "question", "text"):
            if isinstance(record.get(name), str):
                return str(record[name])
        turns = (turn for turn in record.get("messages") or () if isinstance(turn, dict))
        said = [turn["content"] for turn in turns if isinstance(turn.get("content"), str)]
        if said:
            return "\n".join(said)
    return line


def make_prompts(load: Load) -> list[str]:
    """Synthetic prompts, the same for the same seed."""
    chance = random.Random(load.seed)
    shared = chance.choices(WORDS, k=load.shared_words)
    own = load.prompt_words - load.shared_words
    # A number first: random words alone would now and then begin alike.
    return [
        " ".join([*shared, f"{number}:", *chance.choices(WORDS, k=own)][: load.prompt_words or 1])
        for number in range(load.num_requests)
    ]


async def run_load(
    load: Load,
    endpoint: Endpoint,
    *,
    prompts: Sequence[str] | None = None,
    on_done: Callable[[Sample], None] = lambda sample: None,
) -> Figures:
    """Send it all and wait for the answers. `prompts`: in place of synthetic ones; over again at their end."""
    base_url = checked_base_url(endpoint.url)
    texts = prompts or make_prompts(load)
    headers = {"content-type": "application/json"}
    if endpoint.api_key:
        headers["authorization"] = f"Bearer {endpoint.api_key}"
    limits = httpx.Limits(max_connections=load.concurrency, max_keepalive_connections=load.concurrency)
    room = asyncio.Semaphore(load.concurrency)
    chance = random.Random(load.seed + 1)
    async with httpx.AsyncClient(
        base_url=base_url, headers=headers, limits=limits, timeout=endpoint.timeout_seconds
    ) as http:

        async def one(number: int) -> Sample:
            try:
                body = _body(load, endpoint.model, texts[number % len(texts)])
                sample = await _measure(http, base_url, body)
            finally:
                room.release()
            on_done(sample)
            return sample

        began = time.perf_counter()
        due = began
        tasks = []
        for number in range(load.num_requests):
            if load.rate is not None:
                due += chance.expovariate(load.rate)
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
            await room.acquire()
            tasks.append(asyncio.create_task(one(number)))
        samples = await asyncio.gather(*tasks)
        return summarise(samples, time.perf_counter() - began)


def _body(load: Load, model: str, prompt: str) -> bytes:
    body: dict[str, Any] = {
        "model": model,
        "prompt": prompt,
        "max_tokens": load.max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if load.ignore_eos:
        body["ignore_eos"] = True
    return orjson.dumps(body)


async def _measure(http: httpx.AsyncClient, base_url: str, body: bytes) -> Sample:
    """One request. Whatever goes wrong is in the sample: a run goes on."""
    sample = Sample()
    began = time.perf_counter()
    try:
        request = http.build_request("POST", protocol.COMPLETIONS, content=body)
        response = await mapped(http.send(request, stream=True), base_url)
        try:
            if response.status_code >= 400:
                await mapped(response.aread(), base_url)
                reply_of(response).raise_for_status()
            await _follow(response, base_url, sample, began)
        finally:
            await response.aclose()
    except errors.OctavoError as error:
        sample.error = error.message
    sample.seconds = time.perf_counter() - began
    return sample


async def _follow(response: httpx.Response, base_url: str, sample: Sample, began: float) -> None:
    async for event in events_of(response, base_url):
        now = time.perf_counter() - began
        if event == b"[DONE]":
            return
        chunk = protocol.parse_body(event)
        if usage := chunk.get("usage"):
            sample.prompt_tokens = usage.get("prompt_tokens") or 0
            sample.output_tokens = usage.get("completion_tokens") or 0
            sample.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        if protocol.parse_delta(chunk):
            sample.token_seconds.append(now)
    raise errors.UnavailableError("the stream ended before the answer was complete", code="stream_cut")


def summarise(samples: Sequence[Sample], seconds: float) -> Figures:
    """The figures of a run that took so long."""
    good = [sample for sample in samples if sample.error is None]
    spoke = [sample for sample in good if sample.token_seconds]
    outputs, prompts = (sum(getattr(s, f"{kind}_tokens") for s in good) for kind in ("output", "prompt"))
    problems: dict[str, int] = {}
    for sample in samples:
        if sample.error is not None:
            problems[sample.error] = problems.get(sample.error, 0) + 1
    shown = sorted(problems.items(), key=lambda item: -item[1])[:ERRORS_SHOWN]
    return Figures(
        requests=len(samples),
        failed=len(samples) - len(good),
        seconds=seconds,
        requests_per_second=len(good) / seconds,
        prompt_tokens=prompts,
        cached_tokens=sum(sample.cached_tokens for sample in good),
        output_tokens=outputs,
        output_tokens_per_second=outputs / seconds,
        prompt_tokens_per_second=prompts / seconds,
        ttft=_spread([sample.token_seconds[0] for sample in spoke]),
        itl=_spread([_itl(sample) for sample in spoke if sample.output_tokens > 1]),
        gap=_spread([_longest_gap(sample) for sample in spoke if len(sample.token_seconds) > 1]),
        latency=_spread([sample.seconds for sample in good]),
        errors=dict(shown),
    )


def _itl(sample: Sample) -> float:
    """Tokens may share an event, so the mean is what can be told."""
    return (sample.token_seconds[-1] - sample.token_seconds[0]) / (sample.output_tokens - 1)


def _longest_gap(sample: Sample) -> float:
    return max(after - before for before, after in pairwise(sample.token_seconds))


def _spread(values: Sequence[float]) -> dict[str, float]:
    """Mean, nearest-rank percentiles and maximum; empty without values."""
    if not values:
        return {}
    ranked = sorted(values)
    found = {"mean": sum(ranked) / len(ranked)}
    found |= {f"p{share}": ranked[max(0, -(-len(ranked) * share // 100) - 1)] for share in PERCENTILES}
    return {**found, "max": ranked[-1]}
