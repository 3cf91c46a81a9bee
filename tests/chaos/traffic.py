"""The streams of a chaos run: 40 greedy and 20 seeded sampled ones, what each must give, and how it came."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass, field

import numpy as np

from octavo.protos.types import Request, SamplingParams


def make_requests(name: str, *, greedy: int = 40, sampled: int = 20, max_tokens: int = 160) -> list[Request]:
    """Prompts of 3 to 60 tokens, half of them with a common beginning. Sampled ones have penalties, a `min_tokens`
    that a stop id must wait for, two branches (every fourth), or best_of."""
    rng = random.Random(f"{greedy} {sampled}")
    shared = [rng.randrange(3, 64) for _ in range(24)]
    requests = []
    for number in range(greedy + sampled):
        prompt = shared[: 24 * (number % 2)] + [rng.randrange(3, 64) for _ in range(rng.randint(3, 36))]
        options: dict = {"temperature": 0.0, "ignore_eos": True}
        if number >= greedy:
            options = {"temperature": 0.9, "top_p": 0.95, "seed": number, "ignore_eos": number % 3 > 0}
            if number % 4 == 0:
                options |= {"n": 2}
            elif number % 4 == 1:
                options |= {"min_tokens": 40, "stop_token_ids": (5,), "presence_penalty": 0.5}
            elif number % 4 == 2:
                options |= {"repetition_penalty": 1.1, "frequency_penalty": 0.2}
            else:
                options |= {"best_of": 3}
        params = SamplingParams(max_tokens=max_tokens - number % 7, **options)
        requests.append(
            Request(
                request_id=f"{name}-{number}",
                prompt_token_ids=np.array(prompt, np.int32),
                params=params,
                seed=params.seed or number,
                eos_token_ids=() if params.ignore_eos else (2,),
            )
        )
    return requests


def reference(requests: list[Request]) -> list[dict[int, list[int]]]:
    """What an undisturbed run gives, by the plain sampler that documentation words."""
    from ..worker.executor_support import expected_tokens

    return [
        {
            branch: expected_tokens(request, branch, request.params.max_tokens or 0)
            for branch in range(request.params.num_branches)
        }
        for request in requests
    ]


@dataclass
class Stream:
    """One request as its client sees it."""

    request: Request
    tokens: dict[int, list[int]] = field(default_factory=dict)
    ends: dict[int, str] = field(default_factory=dict)
    arrivals: list[float] = field(default_factory=list)
    """When something came, by `time.monotonic`."""
    error: str | None = None

    async def follow(self, backend) -> None:
        """Offsets must rise without gap or overlap, and each branch ends once."""
        async for delta in backend.submit(self.request):
            if delta.error is not None:
                self.error = delta.error
                return
            assert delta.branch not in self.ends, "a branch ended twice"
            tokens = self.tokens.setdefault(delta.branch, [])
            assert delta.offset == len(tokens), f"{len(tokens)} tokens, and then those from {delta.offset}"
            tokens += delta.token_ids
            self.arrivals.append(time.monotonic())
            if delta.finish_reason is not None:
                self.ends[delta.branch] = delta.finish_reason.value

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.tokens.values()))

    @property
    def gap_seconds(self) -> float:
        """The longest time between two arrivals."""
        return max((b - a for a, b in zip(self.arrivals, self.arrivals[1:], strict=False)), default=0.0)


class Traffic:
    """All streams of one run."""

    def __init__(self, requests: list[Request]) -> None:
        self.streams = [Stream(request) for request in requests]
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, backend) -> None:
        self._tasks = [asyncio.create_task(stream.follow(backend)) for stream in self.streams]

    @property
    def num_tokens(self) -> int:
        return sum(stream.num_tokens for stream in self.streams)

    async def finish(self, seconds: float) -> None:
        await asyncio.wait_for(asyncio.gather(*self._tasks), seconds)

    def outputs(self) -> list[dict[int, list[int]]]:
        for stream in self.streams:
            assert stream.error is None, f"{stream.request.request_id}: {stream.error}"
            assert set(stream.ends) == set(range(stream.request.params.num_branches))
        return [stream.tokens for stream in self.streams]

    @property
    def gap_seconds(self) -> float:
        return max(stream.gap_seconds for stream in self.streams)
