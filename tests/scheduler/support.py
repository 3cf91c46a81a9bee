"""Builders that scheduler tests share."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import numpy as np

from octavo.protos.types import BranchSoFar, FinishReason, Request, Resume, SamplingParams
from octavo.scheduler.admission import resolve_max_tokens
from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.events import Event, Finished, TokensOut
from octavo.scheduler.scheduler import Scheduler

from .fake_worker import FakeWorker, expected_beams, expected_tokens


def make_request(
    name: str,
    prompt: Iterable[int],
    *,
    seed: int = 0,
    priority: int = 0,
    eos: tuple[int, ...] = (),
    salt: str = "",
    cache: bool = True,
    fork_of: str = "",
    **params: Any,
) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=np.fromiter(prompt, np.int32),
        params=SamplingParams(**params),
        seed=seed,
        priority=priority,
        eos_token_ids=eos,
        cache_salt=salt,
        use_prefix_cache=cache,
        fork_of=fork_of,
    )


class Harness:
    """A scheduler and a fake worker; checks after every step what must always hold (rule R2)."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int = 16,
        max_num_seqs: int = 64,
        budget: int = 512,
        depth: int = 2,
        **config: Any,
    ) -> None:
        self.config = SchedulerConfig(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            pipeline_depth=depth,
            **config,
        )
        self.scheduler = Scheduler(self.config)
        self.worker = FakeWorker(num_blocks, block_size, max_num_seqs, budget)
        self.requests: dict[str, Request] = {}
        self.limits: dict[str, int] = {}
        self.tokens: dict[tuple[str, int], list[int]] = defaultdict(list)
        self.ends: dict[str, list[Finished]] = defaultdict(list)
        self.events: list[Event] = []
        self.plans: list[Any] = []
        self.pending: list[Any] = []
        self.now = 0.0

    def add(self, request: Request) -> None:
        events = self.scheduler.add(request, self.now)
        self.requests[request.request_id] = request
        self.limits[request.request_id] = resolve_max_tokens(request, self.config)
        self.take(events)

    def take(self, events: list[Event]) -> None:
        self.events += events
        for event in events:
            if isinstance(event, TokensOut):
                got = self.tokens[event.request_id, event.branch]
                assert event.offset == len(got), "tokens came twice or not at all"
                assert not any(end.branch == event.branch for end in self.ends[event.request_id])
                got += event.token_ids
            elif isinstance(event, Finished):
                assert not any(end.request_finished for end in self.ends[event.request_id])
                self.ends[event.request_id].append(event)

    def plan(self) -> bool:
        self.now += 0.001
        plan = self.scheduler.plan(self.now)
        if plan is None:
            return False
        self.scheduler.check_integrity()
        self.plans.append(plan)
        self.pending.append(plan)
        return True

    def abort(self, name: str) -> None:
        self.take(self.scheduler.abort(name, self.now))
        self.scheduler.check_integrity()

    def stop(self, name: str, branch: int) -> None:
        self.take(self.scheduler.abort_branch(name, branch, self.now))
        self.scheduler.check_integrity()

    def commit(self, fail: frozenset[int] = frozenset()) -> None:
        self.now += 0.01
        self.take(self.scheduler.commit(self.worker.execute(self.pending.pop(0), fail=fail), self.now))
        self.scheduler.check_integrity()

    def lose_worker(self) -> None:
        """The worker dies with all that it holds, and plans that are out with it. Its requests go on, on an empty one
        and with a new scheduler, from the tokens that their callers have."""
        unfinished = self.scheduler.unfinished()
        self.config = dataclasses.replace(self.config, epoch=self.config.epoch + 1)
        reserve = self.scheduler._life.reserve
        self.scheduler = Scheduler(self.config)
        self.scheduler._life.reserve._min = self.scheduler._life.reserve.horizon = reserve._min
        self.worker = FakeWorker(
            self.config.num_blocks,
            self.config.block_size,
            self.config.max_num_seqs,
            self.config.max_num_batched_tokens,
        )
        self.pending.clear()
        for name in unfinished:
            request = self.requests[name]
            reasons = {end.branch: end.reason for end in self.ends[name]}
            branches = tuple(
                BranchSoFar(
                    token_ids=np.array(self.tokens[name, branch], np.int32), finish_reason=reasons.get(branch)
                )
                for branch in range(request.params.num_branches)
            )
            begun = not request.params.beam_width and any(len(branch.token_ids) for branch in branches)
            self.take(self.scheduler.add(request, self.now, Resume(branches=branches if begun else ())))
        self.scheduler.check_integrity()

    def step(self) -> bool:
        """Fill the pipeline, then take in one result."""
        while self.plan():
            pass
        if not self.pending:
            return False
        self.commit()
        return True

    def run(self, limit: int = 20_000) -> None:
        for _ in range(limit):
            if not self.step():
                self.check_idle()
                return
        raise AssertionError(f"not done after {limit} steps")

    def check_idle(self) -> None:
        """Everything ended exactly once, nothing leaked, and all tokens are those of an undisturbed run."""
        snapshot = self.scheduler.snapshot()
        assert (snapshot["running"], snapshot["waiting"], snapshot["swapped"]) == (0, 0, 0)
        assert snapshot["blocks_used"] == 0
        assert snapshot["blocks_free"] + snapshot["blocks_cached"] == self.config.num_blocks
        assert not self.worker.rows
        assert not self.scheduler.has_work
        for name, request in self.requests.items():
            ends = self.ends[name]
            assert [end.request_finished for end in ends].count(True) == 1
            if request.params.beam_width:
                self.check_beams(name)
                continue
            for end in ends:
                want = expected_tokens(request, end.branch, self.limits[name])
                got = self.tokens[name, end.branch]
                assert end.num_output_tokens == len(got)
                # STOP without such a token was a stop string, found by whoever makes text.
                by_token = end.reason is FinishReason.STOP and not set(request.eos_token_ids).isdisjoint(
                    got[-1:]
                )
                if end.reason is FinishReason.LENGTH or by_token:
                    assert got == want, f"{name}/{end.branch}"
                else:
                    assert got == want[: len(got)]

    def check_beams(self, name: str) -> None:
        ends, request = self.ends[name], self.requests[name]
        assert [end.branch for end in ends] == list(range(request.params.n))
        got = [(self.tokens[name, end.branch], end.score, end.reason) for end in ends]
        if ends[0].score is None:
            assert all(
                not tokens and reason in (FinishReason.ABORT, FinishReason.ERROR, FinishReason.STOP)
                for tokens, _, reason in got
            )
            return
        for (tokens, score, reason), want in zip(
            got, expected_beams(request, self.limits[name]), strict=True
        ):
            assert (tokens, reason) == (want[0], want[2])
            assert abs(score - want[1]) < 1e-9

    def count(self, kind: type[Event]) -> int:
        return sum(isinstance(event, kind) for event in self.events)
