"""The scheduler of one worker: a sans-I/O state machine, turned by `plan` and `commit`.

Owns the queues, the sequences and, through KVManager, every block table. Must not know how a plan reaches a
worker or what time it is. Iteration-level scheduling as in Orca (OSDI'22, section 3), paging as in
PagedAttention (arXiv:2309.06180, section 4), chunked prefill under one token budget with decodes first as in
Sarathi-Serve (arXiv:2403.02310, section 4).

`plan` may be called up to `pipeline_depth` times ahead of `commit`: it counts samples that are under way and
never needs their values. What ends by length is known when planned; what ends by a stop token was planned once
more and is masked by the worker. Blocks freed in between may be given away at once, since a worker runs its
plans in order.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from octavo.protos.errors import IntegrityError, InvalidRequestError, OverloadedError
from octavo.protos.types import MASKED_TOKEN, FinishReason, Request, StepPlan, StepResult, finish_reason
from octavo.scheduler.admission import resolve_max_tokens
from octavo.scheduler.budget import TokenBudget, step_budget
from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.events import (
    Admitted,
    ChunkPlanned,
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
from octavo.scheduler.parking import Parking
from octavo.scheduler.plan_builder import PlanBuilder, PlanRecord
from octavo.scheduler.preemption import PROTECTED_STEPS, choose_victim
from octavo.scheduler.queue import GroupQueue
from octavo.scheduler.reserve import GrowthReserve
from octavo.scheduler.sequence import GroupState, Sequence, SequenceGroup
from octavo.scheduler.stats import SchedulerStats
from octavo.scheduler.step_time import StepTimeModel


class Scheduler:
    """What runs next on one worker, and in which blocks. Deterministic: same calls, same plans."""

    def __init__(self, config: SchedulerConfig, step_time: StepTimeModel | None = None) -> None:
        self.config = config
        self.step_time = step_time or StepTimeModel()
        self.kv = KVManager(config.num_blocks, config.block_size, prefix_cache=config.prefix_cache)
        self.stats = SchedulerStats()
        self._parking = Parking(config, self.kv, self.step_time)
        self._groups: dict[str, SequenceGroup] = {}
        self._waiting = GroupQueue()
        self._running = GroupQueue()
        self._swapped = GroupQueue()
        self._free_rows = list(range(config.max_num_seqs - 1, -1, -1))
        self._released_rows: list[int] = []
        self._to_publish: list[Sequence] = []
        """Running sequences that have filled a block since the last plan."""
        self._returning: list[SequenceGroup] = []
        """Running groups of which some branches have not come back yet."""
        self._reserve = GrowthReserve(config.block_size, config.max_model_len)
        self._in_flight: deque[PlanRecord] = deque()
        self._events: list[Event] = []
        self._next_step_id = 1
        self._next_arrival = 0
        self._now = 0.0

    # --- requests come and go ------------------------------------------------------------------------------

    def add(self, request: Request, now: float) -> list[Event]:
        """Queue a request.

        Raises `RequestTooLargeError` when it could never fit, `OverloadedError` when the queue is full and
        `InvalidRequestError` for an id in use. Then nothing has changed.
        """
        if request.request_id in self._groups:
            raise InvalidRequestError(f"request id {request.request_id!r} is in use", param="request_id")
        max_tokens = resolve_max_tokens(request, self.config)
        if len(self._waiting) >= self.config.max_waiting:
            raise OverloadedError(
                f"{len(self._waiting)} requests wait; the limit is {self.config.max_waiting}"
            )
        group = SequenceGroup(
            request, arrival_number=self._next_arrival, arrived_at=now, max_tokens=max_tokens
        )
        self._next_arrival += 1
        self._groups[request.request_id] = group
        self._waiting.add(group)
        return [Queued(request.request_id, now, len(self._waiting))]

    def abort(self, request_id: str, now: float, reason: FinishReason = FinishReason.ABORT) -> list[Event]:
        """End a request at whatever stage it is, at once. Unknown ids (ended already) are ignored.

        `reason` STOP is for a stop string found outside: the request then ended well.
        """
        group = self._groups.get(request_id)
        if group is None:
            return []
        self._events, kept = [], self._events
        for seq in list(group.live):
            self._finish(seq, reason, now)
        self._events, events = kept, self._events
        return events

    def abort_branch(self, request_id: str, branch: int, now: float) -> list[Event]:
        """End one branch with reason STOP (a stop string was found in its text); the others go on."""
        group = self._groups.get(request_id)
        found = [seq for seq in group.live if seq.branch == branch] if group else []
        if group is None or not found:
            return []
        if not group.forked:
            return self.abort(request_id, now, FinishReason.STOP)
        self._events, kept = [], self._events
        self._finish(found[0], FinishReason.STOP, now)
        self._events, events = kept, self._events
        return events

    # --- one step ------------------------------------------------------------------------------------------

    def plan(self, now: float) -> StepPlan | None:
        """The next step, or None when there is nothing to do or the pipeline is full."""
        if len(self._in_flight) >= self.config.pipeline_depth:
            return None
        self._now = now
        plan = PlanBuilder(self._released_rows)
        self._publish(plan)
        decodes, prefills = self._runnable()
        if self._make_room(decodes, plan):
            decodes, prefills = self._runnable()
        budget = step_budget(
            self.config.max_num_batched_tokens,
            self.config.itl_target,
            self.step_time,
            num_decodes=len(decodes),
            context_tokens=sum(seq.num_computed_tokens for seq in decodes) if self.config.itl_target else 0,
            min_chunk=self.config.block_size,
        )
        self._plan_decodes(decodes, plan, budget)
        # Before the prefills: a copy runs before all writes of its step, so what returning branches share must
        # have been computed by an earlier plan.
        self._plan_returning(plan, budget)
        self._plan_prefills(prefills, plan, budget)
        if self._return_swapped(plan, budget):
            self._admit(plan, budget)
        if not plan.rows and not self._in_flight and self._running.head is not None:
            self._break_deadlock(plan, budget)
        self.kv.finish_plan(plan)
        self._parking.finish_plan(plan)
        if plan.empty:
            return None
        step, record = plan.build(self._next_step_id, self.config.epoch)
        self._next_step_id += 1
        self._released_rows = []
        self._in_flight.append(record)
        self.stats.on_plan(record, self.kv, self._running)
        return step

    def commit(self, result: StepResult, now: float) -> list[Event]:
        """Take in the result of the oldest plan under way; returns every event since the last commit.

        Raises `IntegrityError` for a result that belongs to no such plan (stale epoch, wrong step, wrong size).
        """
        if not self._in_flight:
            raise IntegrityError(f"result of step {result.step_id}, but no plan is under way")
        record = self._in_flight[0]
        if (result.epoch, result.step_id, len(result.token_ids)) != (
            self.config.epoch,
            record.step_id,
            len(record.samples),
        ):
            raise IntegrityError(
                f"result of epoch {result.epoch}, step {result.step_id} with {len(result.token_ids)} tokens; expected "
                f"epoch {self.config.epoch}, step {record.step_id} with {len(record.samples)}"
            )
        self._in_flight.popleft()
        errors = dict(result.row_errors)
        logprobs = result.logprobs
        size = self.config.block_size
        for index, (seq, token) in enumerate(zip(record.samples, result.token_ids.tolist(), strict=True)):
            seq.num_pending -= 1
            if seq.finish_reason is not None:
                continue
            group = seq.group
            if token == MASKED_TOKEN:
                message = errors.get(index, "the worker had ended a branch that the scheduler had not")
                for branch in list(group.live):
                    self._finish(branch, FinishReason.ERROR, now, message)
                continue
            offset = seq.num_planned_outputs - seq.num_pending - 1
            seq.token_ids.append(token)
            metrics = None
            if group.first_token_at is None:
                group.first_token_at = now
                metrics = group.metrics(now)
            chosen = (logprobs[index],) if logprobs else ()
            self._events.append(
                TokensOut(group.request.request_id, now, seq.branch, offset, (token,), chosen, metrics)
            )
            reason = finish_reason(group.request, offset + 1, token, group.max_tokens)
            if reason is not None:
                self._finish(seq, reason, now)
            elif (
                self.config.prefix_cache
                and min(seq.num_computed_tokens, len(seq.token_ids)) // size > seq.num_published_blocks
            ):
                self._to_publish.append(seq)
        self.stats.on_commit(record, result)
        # What blocks took to the host and back is priced by its own rate, and is no property of tokens.
        compute_seconds = result.step_seconds - result.parts_seconds.get("swap", 0.0)
        if record.num_rows and compute_seconds > 0:
            self.step_time.observe(
                num_tokens=record.num_tokens,
                num_rows=record.num_rows,
                context_tokens=record.context_tokens,
                seconds=compute_seconds,
            )
        events, self._events = self._events, []
        return events

    # --- what the drivers and the router may ask -----------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self._groups or self._in_flight or self._released_rows)

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def unfinished(self) -> list[str]:
        """Ids of all requests that have not ended, in order of arrival."""
        return list(self._groups)

    def cached_tokens_of(self, request: Request) -> int:
        """Prompt tokens of `request` whose KV is in this worker's blocks now. Exact; changes nothing."""
        if not self.kv.caches(request):
            return 0
        return self.kv.find(
            (request.cache_salt, request.adapter), request.prompt_token_ids.tobytes()
        ).num_tokens

    @property
    def num_queued_tokens(self) -> int:
        """Prefill tokens that stand before a request arriving now."""
        return sum(
            seq.num_uncomputed_tokens
            for queue in (self._running, self._swapped, self._waiting)
            for group in queue
            for seq in group.live
            if seq.num_uncomputed_tokens > 1
        )

    @property
    def num_running_seqs(self) -> int:
        return sum(len(group.live) for group in self._running)

    @property
    def num_waiting_seqs(self) -> int:
        return sum(group.num_branches for group in self._waiting)

    def snapshot(self) -> dict[str, Any]:
        """Counts now and totals so far, by plain names (`Engine.stats`, `/metrics`)."""
        return self.stats.snapshot(
            self.kv,
            self._parking.host,
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_swapped=len(self._swapped),
        )

    def check_integrity(self) -> None:
        """Raise `IntegrityError` on any broken invariant (rule R2). Call it between steps, at any time."""
        live = [seq for group in self._groups.values() for seq in group.live]
        self.kv.check_integrity(live)
        self._parking.check_integrity(live)
        rows = [seq.row for seq in live if seq.row is not None]
        if sorted(rows + self._free_rows) != list(range(self.config.max_num_seqs)):
            raise IntegrityError("a row is lost or used twice")
        if len(self._waiting) + len(self._running) + len(self._swapped) != len(self._groups):
            raise IntegrityError("a request is in no queue or in two")
        for state, queue in ((GroupState.WAITING, self._waiting), (GroupState.SWAPPED, self._swapped)):
            for group in queue:
                if group.state is not state or any(
                    seq.block_table or seq.row is not None or seq.num_computed_tokens for seq in group.live
                ):
                    raise IntegrityError(f"{group.request.request_id} is parked but holds a block or a row")
        for group in self._running:
            if group.state is not GroupState.RUNNING or not group.live:
                raise IntegrityError(f"{group.request.request_id} runs in state {group.state}")
        for seq in live:
            if (
                not 0 <= seq.num_pending <= self.config.pipeline_depth
                or seq.num_planned_outputs > seq.group.max_tokens
            ):
                raise IntegrityError(f"{seq.group.request.request_id}: {seq.num_pending} samples under way")
            if seq.num_total_tokens != len(seq.token_ids) + seq.num_pending:
                raise IntegrityError(f"{seq.group.request.request_id}: token counts differ")

    # --- inside a plan -------------------------------------------------------------------------------------

    def _publish(self, plan: PlanBuilder) -> None:
        for seq in self._to_publish:
            if seq.row is not None:
                for index, block in self.kv.publish(seq, min(seq.num_computed_tokens, len(seq.token_ids))):
                    plan.update_block(seq.row, index, block)
        self._to_publish = []

    def _runnable(self) -> tuple[list[Sequence], list[Sequence]]:
        """Running branches that have one token to run (decodes), and those that have more (prefills).

        A prompt that has yet to fork is a prefill even with one token left: its last chunk makes the branches.
        """
        decodes: list[Sequence] = []
        prefills: list[Sequence] = []
        for group in self._running:
            max_tokens = group.max_tokens
            for seq in group.live:
                if seq.row is None or seq.num_planned_outputs >= max_tokens:
                    continue
                if seq.num_total_tokens - seq.num_computed_tokens == 1 and group.forked:
                    decodes.append(seq)
                else:
                    prefills.append(seq)
        return decodes, prefills

    def _make_room(self, decodes: list[Sequence], plan: PlanBuilder) -> bool:
        """Park victims until every decode can get its block. True if any was parked."""
        parked = False
        while self.kv.num_new_blocks_for_decodes(decodes) > self.kv.num_free:
            # One request alone always fits: admission saw to it, and the parked hold nothing here.
            self._preempt(plan)
            parked = True
            decodes = [seq for seq in decodes if seq.row is not None]
        return parked

    def _plan_decodes(self, decodes: list[Sequence], plan: PlanBuilder, budget: TokenBudget) -> None:
        size = self.config.block_size
        for seq in decodes:
            if seq.tail_shared or seq.num_computed_tokens % size == 0:
                self.kv.grow(seq, 1, plan)
            plan.schedule(seq, 1)
        budget.take(len(decodes))

    def _plan_prefills(self, prefills: list[Sequence], plan: PlanBuilder, budget: TokenBudget) -> None:
        for seq in prefills:
            self._plan_chunk(seq, plan, budget)

    def _plan_chunk(self, seq: Sequence, plan: PlanBuilder, budget: TokenBudget) -> None:
        """Run as much of `seq` as budget and free blocks allow; at the prompt's end all branches come to be."""
        num_tokens = min(seq.num_uncomputed_tokens, budget.left, self.kv.max_growth(seq, self.kv.num_free))
        if num_tokens <= 0:
            return
        group = seq.group
        self.kv.grow(seq, num_tokens, plan)
        self._events.append(
            ChunkPlanned(
                group.request.request_id,
                self._now,
                seq.branch,
                seq.num_computed_tokens,
                num_tokens,
                self._next_step_id,
            )
        )
        plan.schedule(seq, num_tokens)
        budget.take(num_tokens)
        self._to_publish.append(seq)
        if not group.forked and seq.num_pending:
            self._fork(group, seq, plan)

    def _fork(self, group: SequenceGroup, trunk: Sequence, plan: PlanBuilder) -> None:
        """All branches of a group sample their first token from the prompt's last logits, in this step."""
        index = len(plan.rows) - 1
        for branch in range(1, group.request.params.n):
            child = Sequence(group, branch)
            child.row = self._free_rows.pop()
            self.kv.share_prefix(trunk, child, trunk.num_computed_tokens)
            group.live.append(child)
            plan.fork(trunk, child)
            plan.sample(child, index)
            self._to_publish.append(child)
        group.forked = True
        self._events.append(Forked(group.request.request_id, self._now, group.request.params.n))

    def _plan_returning(self, plan: PlanBuilder, budget: TokenBudget) -> None:
        """Branches of a resumed group return behind its first one, sharing the prompt that it has computed."""
        still: list[SequenceGroup] = []
        for group in self._returning:
            if group.state is not GroupState.RUNNING:
                continue
            prompt = group.request.num_prompt_tokens
            # Taken before any branch starts in this plan: what is shared must have been computed by an earlier one.
            back = [seq for seq in group.live if seq.row is not None]
            source = next((seq for seq in back if seq.num_computed_tokens >= prompt), None)
            for seq in [seq for seq in group.live if seq.row is None]:
                if budget.left == 0 or (back and source is None):
                    break
                hit = self.kv.find_prefix(group, seq.token_ids.tobytes())
                if source is not None and hit.num_tokens < prompt:
                    self.kv.share_prefix(source, seq, prompt)
                elif self.kv.num_blocks_to_admit(seq, hit) > self.kv.num_free:
                    break
                else:
                    self.kv.attach_prefix(seq, hit, plan)
                if self.kv.max_growth(seq, self.kv.num_free) <= 0:
                    self._drop_blocks(seq)
                    break
                self._start_sequence(seq, plan)
                self._plan_chunk(seq, plan, budget)
                if source is None:
                    break
            if any(seq.row is None for seq in group.live):
                still.append(group)
        self._returning = still

    def _admit(self, plan: PlanBuilder, budget: TokenBudget) -> None:
        """Let waiting groups in, in order, while rows, budget and blocks last. Nobody overtakes the head."""
        branches = sum(group.num_branches for group in self._running)
        max_branches = min(self.config.max_num_seqs, self.config.max_num_batched_tokens)
        while budget.left > 0:
            group = self._waiting.head
            if group is None or branches + group.num_branches > max_branches:
                return
            if self._swapped.head is not None and self._swapped.head.order < group.order:
                # Let in what was before the head of the swapped; what is behind it must not overtake.
                return
            if any(seq.num_pending for seq in group.live):
                # Parked while a sample was under way: its value is needed before it can be computed again.
                return
            hit = self.kv.find_prefix(group, group.live[0].token_ids.tobytes())
            if not self._reserve.fits(group, hit, self._running, self.kv):
                return
            branches += group.num_branches
            self._start(group, hit, plan)
            self._plan_chunk(group.live[0], plan, budget)

    def _start(self, group: SequenceGroup, hit: PrefixHit, plan: PlanBuilder) -> None:
        """waiting -> running, for the first time or again."""
        request_id, first = group.request.request_id, group.live[0]
        self._waiting.remove(group)
        group.move_to(GroupState.RUNNING)
        self._running.add(group)
        self.kv.attach_prefix(first, hit, plan)
        cached_tokens = first.num_computed_tokens
        self._start_sequence(first, plan)
        if len(group.live) > 1:
            self._returning.append(group)
        if group.admitted_at is None:
            group.admitted_at = self._now
            group.cached_tokens = cached_tokens
            self._events.append(
                Admitted(request_id, self._now, group.request.num_prompt_tokens, cached_tokens)
            )
        else:
            group.protected_until_step = self._next_step_id + PROTECTED_STEPS
            self._events.append(Resumed(request_id, self._now, cached_tokens))

    def _start_sequence(self, seq: Sequence, plan: PlanBuilder) -> None:
        seq.row = self._free_rows.pop()
        plan.add_sequence(seq)
        recomputed = max(0, seq.num_lost_tokens - seq.num_computed_tokens)
        seq.num_lost_tokens = 0
        seq.group.recomputed_tokens += recomputed
        self.stats.on_start(
            cached_tokens=seq.num_computed_tokens,
            asked_tokens=len(seq.token_ids),
            recomputed_tokens=recomputed,
        )

    def _break_deadlock(self, plan: PlanBuilder, budget: TokenBudget) -> None:
        """Started prefills have taken all blocks and none can go on: the youngest give way to the first."""
        while not plan.rows:
            self._preempt(plan)
            _, prefills = self._runnable()
            self._plan_returning(plan, budget)
            self._plan_prefills(prefills, plan, budget)

    # --- transitions out of running ------------------------------------------------------------------------

    def _preempt(self, plan: PlanBuilder) -> None:
        """running -> swapped or waiting: a victim gives up its blocks and keeps every token."""
        chosen = choose_victim(self._running, self._parking.price, self.config.victims, self._next_step_id)
        assert chosen is not None, "blocks are short and nobody can give way"
        group, prices = chosen
        kind = self._parking.choose(prices)
        for seq in group.live:
            if seq.row is not None:
                self.kv.publish(seq, min(seq.num_computed_tokens, len(seq.token_ids)))
        if kind is PreemptionKind.SWAP:
            self._parking.move_out(group, plan)
        for seq in group.live:
            seq.num_lost_tokens += seq.num_computed_tokens
            self._drop_blocks(seq)
            if seq.row is not None:
                plan.forget_row(seq.row)
            self._release_row(seq)
        # The rows go with this plan, which has not been built yet.
        group.num_preemptions += 1
        self._running.remove(group)
        group.move_to(GroupState.SWAPPED if kind is PreemptionKind.SWAP else GroupState.WAITING)
        (self._swapped if kind is PreemptionKind.SWAP else self._waiting).add(group)
        self._reserve.on_preemption()
        self.stats.on_preemption(kind)
        self._events.append(
            Preempted(
                group.request.request_id,
                self._now,
                kind,
                freed_blocks=prices.freed_blocks,
                lost_tokens=prices.lost_tokens,
                recompute_seconds=prices.recompute_seconds,
                swap_seconds=prices.swap_seconds,
            )
        )

    def _return_swapped(self, plan: PlanBuilder, budget: TokenBudget) -> bool:
        """Bring swapped groups back, in order, while they fit. True if those that wait may be let in after them."""
        branches = sum(group.num_branches for group in self._running)
        while (group := self._swapped.head) is not None:
            waiting = self._waiting.head
            if waiting is not None and waiting.order < group.order:
                return True
            need = self._parking.num_blocks_to_return(group)
            if (
                budget.left < len(group.live)
                or branches + group.num_branches
                > min(self.config.max_num_seqs, self.config.max_num_batched_tokens)
                or any(seq.num_pending for seq in group.live)
                or not self._reserve.has_room(group, need, self._running, self.kv)
            ):
                return False
            branches += group.num_branches
            self._swapped.remove(group)
            group.move_to(GroupState.RUNNING)
            self._running.add(group)
            tokens = self._parking.move_in(group, plan)
            for seq in group.live:
                self._start_sequence(seq, plan)
                self._plan_chunk(seq, plan, budget)
            group.protected_until_step = self._next_step_id + PROTECTED_STEPS
            self._events.append(Resumed(group.request.request_id, self._now, tokens))
        return True

    def _finish(self, seq: Sequence, reason: FinishReason, now: float, error: str | None = None) -> None:
        """A branch ends: its blocks and its row are free at once, and the group ends with its last branch."""
        group = seq.group
        assert seq.finish_reason is None
        seq.finish_reason = reason
        if seq.row is not None and error is None:
            # The last token may never be computed: the worker masks what was planned beyond it.
            self.kv.publish(seq, min(seq.num_computed_tokens, len(seq.token_ids) - 1))
        self._drop_blocks(seq)
        self._parking.forget(seq)
        self._release_row(seq)
        group.live.remove(seq)
        done = not group.live
        if done:
            queues = {
                GroupState.RUNNING: self._running,
                GroupState.WAITING: self._waiting,
                GroupState.SWAPPED: self._swapped,
            }
            queues[group.state].remove(group)
            group.move_to(GroupState.FINISHED)
            del self._groups[group.request.request_id]
            self._reserve.on_finish()
            self.stats.on_finish(reason)
        self._events.append(
            Finished(
                group.request.request_id,
                now,
                seq.branch,
                reason,
                request_finished=done,
                num_output_tokens=seq.num_output_tokens,
                error=error,
                metrics=group.metrics(now) if done else None,
            )
        )

    def _drop_blocks(self, seq: Sequence) -> None:
        self.kv.release(seq)
        seq.num_computed_tokens = 0

    def _release_row(self, seq: Sequence) -> None:
        if seq.row is not None:
            self._released_rows.append(seq.row)
            self._free_rows.append(seq.row)
            seq.row = None
