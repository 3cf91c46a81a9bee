"""Workload traces in the formats of their publishers, as one stream of requests.

A trace says when, how long and, where it knows, which blocks of which prompts are the same. Prompts are made up from
that only when a request arrives: equal block ids give equal tokens, so that the scheduler's own prefix tree finds
what the trace says is shared. Traces without ids share nothing.
"""

from __future__ import annotations

import csv
import gzip
import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import IO, Any

import numpy as np

from octavo.protos.errors import InvalidRequestError
from octavo.protos.types import Int32Array

TOKEN_IDS = 2**31 - 1


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One call: when it comes (seconds from the trace's start) and what it asks for."""

    at_seconds: float
    num_prompt_tokens: int
    num_output_tokens: int
    block_ids: Int32Array | None = None
    """[ceil(prompt / block_tokens)]: equal beginnings are equal prompts. None: nothing is shared."""
    block_tokens: int = 512
    session: str = ""
    token_ids: Int32Array | None = None
    """[num_prompt_tokens], where the trace knows them."""

    def prompt(self, number: int) -> Int32Array:
        """[num_prompt_tokens]; `number` tells prompts without block ids apart."""
        if self.token_ids is not None:
            return self.token_ids
        if self.block_ids is None:
            first = number * 1_000_003 % TOKEN_IDS
            tokens = np.arange(first, first + self.num_prompt_tokens, dtype=np.int64) % TOKEN_IDS
        else:
            starts = self.block_ids.astype(np.int64) * self.block_tokens
            tokens = (starts[:, None] + np.arange(self.block_tokens)).reshape(-1) % TOKEN_IDS
            tokens = tokens[: self.num_prompt_tokens]
        return tokens.astype(np.int32)


@dataclass(frozen=True)
class Trace:
    """Requests in order of arrival."""

    name: str
    requests: list[TraceRequest] = field(repr=False)

    @property
    def seconds(self) -> float:
        return self.requests[-1].at_seconds if self.requests else 0.0

    def cut(self, num_requests: int) -> Trace:
        """The first so many."""
        return replace(self, requests=self.requests[:num_requests])

    def faster(self, factor: float) -> Trace:
        """The same requests, `factor` times as many a second."""
        return replace(
            self, requests=[replace(one, at_seconds=one.at_seconds / factor) for one in self.requests]
        )

    def at_most(self, num_tokens: int) -> Trace:
        """Without those that are longer, prompt and output together."""
        kept = [one for one in self.requests if one.num_prompt_tokens + one.num_output_tokens <= num_tokens]
        return replace(self, requests=kept)


# --- one reader a format -----------------------------------------------------------------------------------


def _open(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8")
    return path.open(encoding="utf-8")


def read_mooncake(lines: Iterable[str]) -> Iterator[TraceRequest]:
    """`{"timestamp": ms, "input_length", "output_length", "hash_ids": ids of 512-token prefix blocks}` a line."""
    for line in lines:
        row = json.loads(line)
        yield TraceRequest(
            row["timestamp"] / 1000,
            row["input_length"],
            max(1, row["output_length"]),
            np.asarray(row["hash_ids"], np.int32),
            512,
        )


def read_azure(lines: Iterable[str]) -> Iterator[TraceRequest]:
    """TIMESTAMP,ContextTokens,GeneratedTokens. Timestamps have seven digits of a second."""
    first: datetime | None = None
    for row in csv.DictReader(lines):
        whole, _, fraction = row["TIMESTAMP"].partition(".")
        at = datetime.fromisoformat(whole)
        first = first or at
        seconds = (at - first).total_seconds() + float(f"0.{fraction or 0}")
        yield TraceRequest(seconds, max(1, int(row["ContextTokens"])), max(1, int(row["GeneratedTokens"])))


def read_plain(lines: Iterable[str]) -> Iterator[TraceRequest]:
    """`{"at": seconds, "prompt_tokens", "output_tokens"}` a line, and if known `"blocks"` (ids) of `"block_tokens"`
    tokens each (512)."""
    for line in lines:
        row = json.loads(line)
        blocks = row.get("blocks")
        yield TraceRequest(
            float(row["at"]),
            int(row["prompt_tokens"]),
            max(1, int(row["output_tokens"])),
            None if blocks is None else np.asarray(blocks, np.int32),
            int(row.get("block_tokens", 512)),
        )


def read_agentic(lines: Iterable[str], *, spacing_seconds: float = 30.0) -> Iterator[TraceRequest]:
    """One session a line, with `requests` (`t` seconds into it, `in`, `out`, `hash_rle`); 64-token blocks.

    The sessions' own beginnings are not known: each starts `spacing_seconds` after the one before. Ids are local to a
    session, so sessions share nothing. Requests of sub-agents count as requests of their session.
    """
    offset = 0
    for number, line in enumerate(lines):
        session = json.loads(line)
        size, highest = session["block_size"], 0
        for at, row in _agentic_rows(session["requests"], 0.0):
            runs = row["hash_rle"]
            ids = np.concatenate([np.arange(a, a + n) for a, n in zip(runs[::2], runs[1::2], strict=True)])
            highest = max(highest, int(ids.max()))
            tokens = min(row["in"], len(ids) * size)
            yield TraceRequest(
                number * spacing_seconds + at,
                tokens,
                max(1, row["out"]),
                (ids + offset).astype(np.int32),
                size,
                session["id"],
            )
        offset += highest + 1


def _agentic_rows(rows: list[dict[str, Any]], begin: float) -> Iterator[tuple[float, dict[str, Any]]]:
    for row in rows:
        if row["type"] == "subagent":
            yield from _agentic_rows(row["requests"], begin + row["t"])
        elif row.get("hash_rle"):
            yield begin + row["t"], row


def read_servegen(lines: Iterable[str], *, hours: float = 1.0, seed: int = 0) -> Iterator[TraceRequest]:
    """One client a line: `windows` of 600 s with the law of its arrivals, `pdf` of its lengths. Drawn, not recorded:
    `seed` decides. The busiest `hours` begin the day's first window in which anybody calls."""
    rng = np.random.default_rng(seed)
    clients = [json.loads(line) for line in lines]
    busy = [row[0] for client in clients for row in client["windows"] if row[1] > 0]
    begin = min(busy, default=0.0)
    for client in clients:
        pdf = client["pdf"].get("0", {})
        if not pdf.get("input_tokens") or not pdf.get("output_tokens"):
            continue
        for start, rate, _, law, a, b in client["windows"]:
            if rate <= 0 or not begin <= start < begin + hours * 3600:
                continue
            at = start
            while True:
                at += float(rng.gamma(a, b) if law == "Gamma" else b * rng.weibull(a))
                if at >= start + 600:
                    break
                prompt, output = (_draw(rng, pdf[name]) for name in ("input_tokens", "output_tokens"))
                yield TraceRequest(at - begin, prompt, output)


def _draw(rng: np.random.Generator, histogram: list[list[float]]) -> int:
    weights = np.array([p for _, p in histogram])
    return max(1, int(histogram[int(rng.choice(len(histogram), p=weights / weights.sum()))][0]))


READERS: dict[str, Callable[[Iterable[str]], Iterator[TraceRequest]]] = {
    "mooncake": read_mooncake,
    "azure": read_azure,
    "agentic": read_agentic,
    "servegen": read_servegen,
    "plain": read_plain,
}


def guess_format(first_line: str) -> str:
    """The format whose first line looks like this. Raises `InvalidRequestError` for none."""
    if first_line.startswith("TIMESTAMP,"):
        return "azure"
    try:
        row = json.loads(first_line)
    except ValueError:
        row = {}
    for name, field_name in (
        ("mooncake", "hash_ids"),
        ("servegen", "windows"),
        ("agentic", "requests"),
        ("plain", "prompt_tokens"),
    ):
        if field_name in row:
            return name
    raise InvalidRequestError(
        f"no trace that is known begins like this: {first_line[:80]!r}; known are {', '.join(READERS)}",
        param="trace",
    )


def read_trace(path: Path, kind: str | None = None) -> Trace:
    """The whole file, sorted by arrival, starting at 0. Raises `InvalidRequestError` for what cannot be read."""
    try:
        with _open(path) as file:
            first = file.readline()
        kind = kind or guess_format(first)
        if kind not in READERS:
            raise InvalidRequestError(
                f"format must be one of {', '.join(READERS)}, got {kind!r}", param="format"
            )
        with _open(path) as file:
            requests = sorted(READERS[kind](file), key=lambda one: one.at_seconds)
    except (OSError, ValueError, KeyError, TypeError) as error:
        message = f"{path} cannot be read as a {kind or 'known'} trace: {error}"
        raise InvalidRequestError(message, param="trace") from None
    if not requests:
        raise InvalidRequestError(f"{path} holds no request", param="trace")
    for number, one in enumerate(requests):
        if one.num_prompt_tokens < 1 or not math.isfinite(one.at_seconds):
            raise InvalidRequestError(f"{path}: request {number} has no prompt or no time", param="trace")
    begin = requests[0].at_seconds
    return Trace(path.name, [replace(one, at_seconds=one.at_seconds - begin) for one in requests])
