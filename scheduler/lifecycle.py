"""Requests by state, and every transition between states: one method, one event (DESIGN §4).

Owns the queues, the rows and what a transition does to blocks. When a transition happens is decided by
`scheduler.py`; this module must not know of budgets or of the order of a plan.

    waiting -> running -> finished | aborted | failed;  running -> waiting or swapped -> running
"""

from __future__ import annotations

import math
from array import array
from heapq import heappop, heappush

from octavo.protos.errors import IntegrityError, InvalidRequestError, OverloadedError
from octavo.protos.types import FinishReason, Request, Resume
from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.events import (
    Admitted,
    Event,
    Finished,
    Forked,
    Preempted,
    PreemptionKind,
    Queued,
    Resumed,
    TokensOut,
)
from octavo.scheduler.kv_manager import KVManager, PrefixHit
from octavo.scheduler.parking import Parking, Prices
from octavo.scheduler.plan_builder import PlanBuilder
from octavo.scheduler.preemption import PROTECTED_STEPS
from octavo.scheduler.queue import GroupQueue, ParkedQueue, WaitingQueue, tokens_to_compute
from octavo.scheduler.reservation import Reservations
from octavo.scheduler.reserve import GrowthReserve
from octavo.scheduler.sequence import GroupState, Sequence, SequenceGroup
from octavo.scheduler.stats import SchedulerStats
from octavo.scheduler.step_time import StepTimeModel

_RESUMED_FIRST = 2**62
"""Taken from the arrival numbers of requests that have waited elsewhere: more than will ever arrive."""


RETRY_FRACTION = 8
"""A refused client is asked to come back when so much of the queue has been computed."""
RETRY_SECONDS_MAX = 60.0

MEAN_WEIGHT = 0.05
"""Of one branch that ended in `mean_output_tokens`."""


class Lifecycle:
    """All requests of one worker that have not ended. Events gather in `events` until somebody takes them."""

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVManager,
        parking: Parking,
        stats: SchedulerStats,
        step_time: StepTimeModel,
    ) -> None:
        self.groups: dict[str, SequenceGroup] = {}
        self.waiting = WaitingQueue(config.priority_aging_seconds)
        self.reservations = Reservations(kv, self.waiting)
        """What those that wait for the first time will find cached."""
        self.running = GroupQueue()
        self.swapped = ParkedQueue()
        self.returning: list[SequenceGroup] = []
        """Running groups of which some branches have not come back yet."""
        self.moving: list[SequenceGroup] = []
        """Searches that took a step since the last plan."""
        self.to_publish: list[Sequence] = []
        """Sequences that ran a chunk of their prompt in the last plan. What is generated enters the tree when its
        blocks are given up: nobody asks for it before, and a decode step then costs nothing for it."""
        self.released_rows: list[int] = []
        """To be told to the worker with the next plan."""
        self.reserve = GrowthReserve(config.block_size, config.max_model_len)
        self.events: list[Event] = []
        self.mean_output_tokens = float(config.block_size)
        """Of branches that ended, the latest count most."""
        self._config = config
        self._kv = kv
        self._parking = parking
        self._stats = stats
        self._step_time = step_time
        self._free_rows = list(range(config.max_num_seqs - 1, -1, -1))
        self._next_arrival = 0
        self._deadlines: list[tuple[float, str]] = []
        """A heap; what has ended is found out when its time comes."""

    @property
    def num_rows(self) -> int:
        """Rows in use: branches that run."""
        return self._config.max_num_seqs - len(self._free_rows)

    def take_events(self) -> list[Event]:
        events, self.events = self.events, []
        return events

    # --- into the queue, and out of it ----------------------------------------------------------------------

    def enqueue(
        self,
        request: Request,
        max_tokens: int,
        cached_tokens: int,
        promised_tokens: int,
        now: float,
        resume: Resume | None,
        hit: PrefixHit,
    ) -> Event:
        """new -> waiting. `hit` is what of its prompt is in the tree; `cached_tokens` count what a running parent has
        too. Raises `InvalidRequestError` for an id in use, `OverloadedError` for a full queue.

        One that was accepted before (`resume`) is never refused for load, and goes before all new ones."""
        if request.request_id in self.groups:
            raise InvalidRequestError(f"request id {request.request_id!r} is in use", param="request_id")
        if resume is None:
            self._check_room(request)
        arrival = self._next_arrival - (_RESUMED_FIRST if resume is not None else 0)
        age = resume.metrics.total_seconds if resume is not None else 0.0
        group = SequenceGroup(
            request,
            arrival_number=arrival,
            arrived_at=now - age,
            max_tokens=max_tokens,
            priority_aging_seconds=self._config.priority_aging_seconds,
        )
        if resume is not None:
            group.go_on_from(resume)
        if request.timeout_seconds is not None:
            heappush(self._deadlines, (group.arrived_at + request.timeout_seconds, request.request_id))
        group.found_tokens = max(cached_tokens, promised_tokens)
        self._next_arrival += 1
        self.groups[request.request_id] = group
        self.waiting.add(group)
        if group.admitted_at is None:
            self.reservations.hold(group, hit, predicted=cached_tokens, promised=promised_tokens)
        return Queued(request.request_id, now, len(self.waiting), cached_tokens)

    def _check_room(self, request: Request) -> None:
        """Raise `OverloadedError` where the queue is full, with the seconds after which its first part has moved on."""
        waiting, config = self.waiting, self._config
        tokens = waiting.num_prompt_tokens + request.num_prompt_tokens
        if len(waiting) >= config.max_waiting:
            what = f"{len(waiting)} requests wait; the limit is {config.max_waiting}"
        elif len(waiting) and tokens > config.max_waiting_tokens:
            what = (
                f"{waiting.num_prompt_tokens} prompt tokens wait and this request has {request.num_prompt_tokens}; "
                f"the limit is {config.max_waiting_tokens}"
            )
        else:
            return
        chunk = config.max_num_batched_tokens
        seconds = self._step_time.prefill_seconds(tokens, chunk_tokens=chunk) / RETRY_FRACTION
        raise OverloadedError(what, retry_after_seconds=min(RETRY_SECONDS_MAX, max(1.0, seconds)))

    @property
    def next_deadline(self) -> float:
        """Not after the first deadline of those that run; infinite without any."""
        return self._deadlines[0][0] if self._deadlines else math.inf

    def expired(self, now: float) -> list[SequenceGroup]:
        """Unfinished requests that nobody waits for any more; each is told once."""
        late = []
        while self._deadlines and self._deadlines[0][0] <= now:
            group = self.groups.get(heappop(self._deadlines)[1])
            if group is not None:
                late.append(group)
        return late

    def start(
        self,
        group: SequenceGroup,
        hit: PrefixHit,
        plan: PlanBuilder,
        step_id: int,
        now: float,
        *,
        no_room: bool,
    ) -> None:
        """waiting -> running, for the first time or again. `no_room`: more was found than is taken."""
        request_id, first = group.request.request_id, group.live[0]
        self.events += self.reservations.settle(group, hit, now, no_room=no_room)
        self.waiting.remove(group)
        group.move_to(GroupState.RUNNING)
        self.running.add(group)
        self._kv.attach_prefix(first, hit, plan)
        cached_tokens = first.num_computed_tokens
        self.start_sequence(first, plan)
        if len(group.live) > 1:
            self.returning.append(group)
        if group.admitted_at is None:
            group.admitted_at = now
            group.cached_tokens = cached_tokens
            self.events.append(Admitted(request_id, now, group.request.num_prompt_tokens, cached_tokens))
        else:
            group.protected_until_step = step_id + PROTECTED_STEPS
            self.events.append(Resumed(request_id, now, cached_tokens))

    def start_sequence(self, seq: Sequence, plan: PlanBuilder) -> None:
        seq.row = self._free_rows.pop()
        plan.add_sequence(seq)
        if seq.num_uncomputed_tokens:
            # They come again; until then the search must not go on without this beam's blocks.
            seq.candidates = None
        recomputed = max(0, seq.num_lost_tokens - seq.num_computed_tokens)
        seq.num_lost_tokens = 0
        seq.group.recomputed_tokens += recomputed
        self._stats.on_start(
            cached_tokens=seq.num_computed_tokens,
            asked_tokens=len(seq.token_ids),
            recomputed_tokens=recomputed,
        )

    def fork(self, trunk: Sequence, plan: PlanBuilder, now: float) -> None:
        """All branches of a group sample their first token from the prompt's last logits, in this step."""
        group, index = trunk.group, len(plan.rows) - 1
        for branch in range(1, group.request.params.num_branches):
            child = Sequence(group, branch)
            child.row = self._free_rows.pop()
            self._kv.share_prefix(trunk, child, trunk.num_computed_tokens)
            group.live.append(child)
            plan.fork(trunk, child)
            plan.sample(child, index)
            self.to_publish.append(child)
        group.forked = True
        self.events.append(Forked(group.request.request_id, now, group.request.params.num_branches))

    # --- beams -----------------------------------------------------------------------------------------------

    def advance_beams(self, group: SequenceGroup, now: float) -> None:
        """Every beam has its candidates: fork those that go on more than once, drop those that do not, or end.

        The worker hears of it with the next plan (`place_beams`). A group that has been parked meanwhile goes on as
        well: what it holds in host blocks is shared like what it holds in device blocks.
        """
        assert group.beams is not None
        beams, prompt = list(group.live), group.request.num_prompt_tokens
        candidates = [beam.candidates for beam in beams if beam.candidates is not None]
        steps = group.beams.advance(candidates, lambda index: beams[index].token_ids[prompt:])
        if not steps:
            if group.beams.finished:
                self.finish_beams(group, None, now)
            else:
                self.finish_beams(
                    group, FinishReason.ERROR, now, "no token can be sampled: every one is banned"
                )
            return
        # Children are made before any of their parents gets its token.
        first: dict[int, Sequence] = {}
        live = []
        for step in steps:
            parent = beams[step.beam]
            live.append(self._fork_beam(parent) if step.beam in first else parent)
            first.setdefault(step.beam, parent)
        for index, beam in enumerate(beams):
            if index not in first:
                self._drop(beam, publish=False)
        group.live = live
        for branch, (step, seq) in enumerate(zip(steps, live, strict=True)):
            seq.branch = branch
            seq.candidates = None
            seq.parent_row = beams[step.beam].row
            seq.token_ids.append(step.token)
            seq.num_total_tokens += 1
            seq.num_planned_outputs += 1
        self.moving.append(group)
        self.recount(group)

    def _fork_beam(self, parent: Sequence) -> Sequence:
        child = Sequence(parent.group, parent.branch)
        child.token_ids = array("i", parent.token_ids)
        child.num_total_tokens = parent.num_total_tokens
        child.num_planned_outputs = parent.num_planned_outputs
        self._kv.share_prefix(parent, child, parent.num_computed_tokens)
        self._parking.share(parent, child)
        return child

    def place_beams(self, plan: PlanBuilder) -> None:
        """Tell the worker where beams go on, before anything else of this plan: they have rows like all others then."""
        for group in self.moving:
            for seq in group.live:
                if seq.parent_row is not None:
                    if seq.row is None:
                        seq.row = self._free_rows.pop()
                    plan.move_beam(seq)
                    seq.parent_row = None
        self.moving = []

    def finish_beams(
        self,
        group: SequenceGroup,
        reason: FinishReason | None,
        now: float,
        error: str | None = None,
        error_name: str | None = None,
    ) -> None:
        """The search is over: its best hypotheses are the answer. With a `reason` it ends without one."""
        assert group.beams is not None
        request_id, n = group.request.request_id, group.request.params.n
        for seq in list(group.live):
            self._drop(seq, publish=error is None)
            seq.finish_reason = reason or FinishReason.STOP
        group.live = []
        found = group.beams.finished[:n] if reason is None else []
        if group.first_token_at is None and found:
            group.first_token_at = now
        metrics = group.metrics(now)
        self._close(group, reason or found[0].reason)
        for branch in range(len(found) or n):
            hypothesis = found[branch] if found else None
            if hypothesis is not None:
                self.events.append(
                    TokensOut(request_id, now, branch, 0, hypothesis.token_ids, hypothesis.logprobs)
                )
            last = branch == (len(found) or n) - 1
            self.events.append(
                Finished(
                    request_id,
                    now,
                    branch,
                    hypothesis.reason if hypothesis else reason or FinishReason.ERROR,
                    request_finished=last,
                    num_output_tokens=len(hypothesis.token_ids) if hypothesis else 0,
                    error=error,
                    error_name=error_name,
                    metrics=metrics if last else None,
                    score=hypothesis.score if hypothesis else None,
                )
            )

    # --- out of running, and back ----------------------------------------------------------------------------

    def park(self, group: SequenceGroup, prices: Prices, plan: PlanBuilder, step_id: int, now: float) -> None:
        """running -> swapped or waiting: a victim gives up its blocks and keeps every token."""
        kind = self._parking.choose(prices)
        for seq in group.live:
            if seq.row is not None:
                self._kv.publish(seq, min(seq.num_computed_tokens, len(seq.token_ids)))
        if kind is PreemptionKind.SWAP:
            self._parking.move_out(group, plan)
        for seq in group.live:
            seq.num_lost_tokens += seq.num_computed_tokens
            seq.parent_row = None
            if kind is PreemptionKind.RECOMPUTE:
                seq.candidates = None
            self.drop_blocks(seq)
            if seq.row is not None and plan.forget_row(seq.row):
                # A beam forked in this very plan: the worker has not heard of the row.
                self._free_rows.append(seq.row)
                seq.row = None
            self._release_row(seq)
        # The rows go with this plan, which has not been built yet.
        group.num_preemptions += 1
        group.parked_at_step = step_id
        self.running.remove(group)
        group.move_to(GroupState.SWAPPED if kind is PreemptionKind.SWAP else GroupState.WAITING)
        (self.swapped if kind is PreemptionKind.SWAP else self.waiting).add(group)
        self.reserve.on_preemption()
        self._stats.on_preemption(kind)
        self.events.append(
            Preempted(
                group.request.request_id,
                now,
                kind,
                freed_blocks=prices.freed_blocks,
                lost_tokens=prices.lost_tokens,
                recompute_seconds=prices.recompute_seconds,
                swap_seconds=prices.swap_seconds,
            )
        )

    def bring_back(self, group: SequenceGroup, plan: PlanBuilder, step_id: int, now: float) -> None:
        """swapped -> running, all branches at once."""
        self.swapped.remove(group)
        group.move_to(GroupState.RUNNING)
        self.running.add(group)
        tokens = self._parking.move_in(group, plan)
        for seq in group.live:
            self.start_sequence(seq, plan)
        group.protected_until_step = step_id + PROTECTED_STEPS
        self.events.append(Resumed(group.request.request_id, now, tokens))

    # --- the end -----------------------------------------------------------------------------------------------

    def finish(
        self,
        seq: Sequence,
        reason: FinishReason,
        now: float,
        error: str | None = None,
        error_name: str | None = None,
    ) -> None:
        """A branch ends: its blocks and its row are free at once, and the group ends with its last branch."""
        group = seq.group
        assert seq.finish_reason is None
        seq.finish_reason = reason
        self._drop(seq, publish=error is None)
        group.live.remove(seq)
        self.mean_output_tokens += MEAN_WEIGHT * (seq.num_output_tokens - self.mean_output_tokens)
        done = not group.live
        if not done:
            self.recount(group)
        if done:
            self._close(group, reason)
        self.events.append(
            Finished(
                group.request.request_id,
                now,
                seq.branch,
                reason,
                request_finished=done,
                num_output_tokens=seq.num_output_tokens,
                error=error,
                error_name=error_name,
                metrics=group.metrics(now) if done else None,
            )
        )

    def _drop(self, seq: Sequence, *, publish: bool) -> None:
        """Everything that a branch holds is free at once, its row with the next plan."""
        if seq.row is not None and publish:
            # The last token may never be computed: the worker masks what was planned beyond it.
            self._kv.publish(seq, min(seq.num_computed_tokens, len(seq.token_ids) - 1))
        self.drop_blocks(seq)
        self._parking.forget(seq)
        self._release_row(seq)

    def _close(self, group: SequenceGroup, reason: FinishReason) -> None:
        """The group has no branch left."""
        queues: dict[GroupState, GroupQueue | WaitingQueue] = {
            GroupState.RUNNING: self.running,
            GroupState.WAITING: self.waiting,
            GroupState.SWAPPED: self.swapped,
        }
        queues[group.state].remove(group)
        self.reservations.forget(group)
        group.move_to(GroupState.FINISHED)
        del self.groups[group.request.request_id]
        self.reserve.on_finish()
        self._stats.on_finish(reason)

    def recount(self, group: SequenceGroup) -> None:
        """A branch of `group`, which may be parked, came or went, or has a token more or less."""
        if group.state is GroupState.WAITING:
            self.waiting.recount(group)
        elif group.state is GroupState.SWAPPED:
            self.swapped.recount(group)

    def drop_blocks(self, seq: Sequence) -> None:
        self._kv.release(seq)
        seq.num_computed_tokens = 0

    def _release_row(self, seq: Sequence) -> None:
        if seq.row is not None:
            self.released_rows.append(seq.row)
            self._free_rows.append(seq.row)
            seq.row = None

    def live(self) -> list[Sequence]:
        """All branches that have not ended, in order of arrival."""
        return [seq for group in self.groups.values() for seq in group.live]

    def fork_sources(self, request: Request) -> list[Sequence]:
        """Running branches of the request that `request` goes on from; a fork shares even what is not to be cached."""
        parent = self.groups.get(request.fork_of)
        if request.params.prompt_logprobs is not None:
            return []  # what is shared has no logits
        if parent is None or parent.root_key != (request.cache_salt, request.adapter):
            return []
        return parent.live

    def check_integrity(self) -> None:
        """Raise `IntegrityError` unless every request is in one queue and every row in one place (rule R2)."""
        live = self.live()
        rows = [seq.row for seq in live if seq.row is not None]
        if sorted(rows + self._free_rows) != list(range(self._config.max_num_seqs)):
            raise IntegrityError("a row is lost or used twice")
        if len(self.waiting) + len(self.running) + len(self.swapped) != len(self.groups):
            raise IntegrityError("a request is in no queue or in two")
        for parked in (self.waiting, self.swapped):
            if parked.num_tokens != sum(map(tokens_to_compute, parked)):
                raise IntegrityError("the tokens of those who wait are miscounted")
            if parked.num_branches != sum(group.num_branches for group in parked):
                raise IntegrityError("the branches of those who wait are miscounted")
        for state, queue in ((GroupState.WAITING, self.waiting), (GroupState.SWAPPED, self.swapped)):
            for group in queue:
                if group.state is not state or any(
                    seq.block_table or seq.row is not None or seq.num_computed_tokens for seq in group.live
                ):
                    raise IntegrityError(f"{group.request.request_id} is parked but holds a block or a row")
        for group in self.running:
            if group.state is not GroupState.RUNNING or not group.live:
                raise IntegrityError(f"{group.request.request_id} runs in state {group.state}")
        for seq in live:
            if (
                not 0 <= seq.num_pending <= self._config.pipeline_depth
                or seq.num_planned_outputs > seq.group.max_tokens
            ):
                raise IntegrityError(f"{seq.group.request.request_id}: {seq.num_pending} samples under way")
            if seq.num_total_tokens != len(seq.token_ids) + seq.num_pending:
                raise IntegrityError(f"{seq.group.request.request_id}: token counts differ")
