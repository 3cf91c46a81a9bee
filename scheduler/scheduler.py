"""The scheduler of one worker: a sans-I/O state machine, turned by `plan` and `commit`.

Owns the calls that drivers make, the plans under way and what their results mean. What goes into a step is decided in
`planner.py`; where a request stands, and what a change of its state does, is `lifecycle.py`; block tables are
KVManager's. Must not know how a plan reaches a worker or what time it is.

Iteration-level scheduling as in Orca (OSDI'22, section 3), paging as in PagedAttention (arXiv:2309.06180,
section 4), chunked prefill under one token budget with decodes first as in Sarathi-Serve (arXiv:2403.02310,
section 4).

`plan` may be called up to `pipeline_depth` times ahead of `commit`: it counts samples that are under way and
never needs their values. What ends by length is known when planned; what ends by a stop token was planned once
more and is masked by the worker. Blocks freed in between may be given away at once, since a worker runs its
plans in order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np

from octavo.protos.errors import DeadlineExceededError, IntegrityError, InvalidRequestError
from octavo.protos.types import (
    MASKED_TOKEN,
    CachedPrefix,
    FinishReason,
    Int32Array,
    PromptLogprobs,
    Request,
    Resume,
    StepPlan,
    StepResult,
    check_resume,
    finish_reason,
)
from octavo.scheduler.admission import resolve_max_tokens
from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.events import Event, PromptLogprobsOut, TokensOut
from octavo.scheduler.kv_manager import KVManager, PrefixHit
from octavo.scheduler.lifecycle import Lifecycle
from octavo.scheduler.load import Load, Loads
from octavo.scheduler.parking import Parking, loading_pays
from octavo.scheduler.plan_builder import PlanBuilder, PlanRecord
from octavo.scheduler.planner import Planner
from octavo.scheduler.sequence import Sequence, SequenceGroup
from octavo.scheduler.stats import SchedulerStats
from octavo.scheduler.step_time import StepTimeModel
from octavo.scheduler.stretch import Stretch, find_stretch


class Scheduler:
    """What runs next on one worker, and in which blocks. Deterministic: same calls, same plans."""

    def __init__(self, config: SchedulerConfig, step_time: StepTimeModel | None = None) -> None:
        self.config = config
        self.step_time = step_time or StepTimeModel()
        self.kv = KVManager(
            config.num_blocks,
            config.block_size,
            prefix_cache=config.prefix_cache,
            num_host_blocks=config.num_host_blocks,
            loading_pays=lambda: loading_pays(config, self.step_time),
        )
        self.stats = SchedulerStats()
        self._parking = Parking(config, self.kv, self.step_time)
        self._life = Lifecycle(config, self.kv, self._parking, self.stats, self.step_time)
        self._planner = Planner(config, self.kv, self._life, self._parking, self.step_time)
        self._in_flight: deque[PlanRecord] = deque()
        self._next_step_id = 1
        self._load: Loads | None = None

    def adopt(self, prefixes: Iterable[CachedPrefix]) -> int:
        """Before the first request: take into the prefix tree what the worker has in its blocks from an earlier
        scheduler. Returns how many blocks that were. Raises `IntegrityError` for what cannot be."""
        assert not self.has_work, "blocks are adopted before any is given away"
        for prefix in prefixes:
            self.kv.adopt(
                (prefix.cache_salt, prefix.adapter), prefix.token_ids.tobytes(), prefix.blocks.tolist()
            )
        return self.kv.tree.num_blocks

    # --- requests come and go ------------------------------------------------------------------------------

    def add(
        self, request: Request, now: float, resume: Resume | None = None, *, promised_tokens: int = 0
    ) -> list[Event]:
        """Queue a request, or one that stood at `resume` on another worker: it goes on from there. `promised_tokens` of
        its prompt will be cached when its turn comes.

        Raises `RequestTooLargeError` when it could never fit, `OverloadedError` when the queue is full and
        `InvalidRequestError` for an id in use or a `resume` that is none of this request. Then nothing has changed.
        """
        max_tokens = resolve_max_tokens(request, self.config)
        if resume is not None:
            check_resume(request, resume, max_tokens)
        hit = self._find(request)
        cached = max(hit.num_tokens, self._cached_in_parent(request))
        queued = self._life.enqueue(request, max_tokens, cached, promised_tokens, now, resume, hit)
        self._tell_load()
        return [queued]

    def abort(self, request_id: str, now: float, reason: FinishReason = FinishReason.ABORT) -> list[Event]:
        """End a request at whatever stage it is, at once. Unknown ids (ended already) are ignored.

        `reason` STOP is for a stop string found outside: the request then ended well.
        """
        group = self._life.groups.get(request_id)
        return [] if group is None else self._end(list(group.live), reason, now)

    def abort_branch(self, request_id: str, branch: int, now: float) -> list[Event]:
        """End one branch with reason STOP (a stop string was found in its text); the others go on.

        Beams have no text before their search is over: nothing happens."""
        group = self._life.groups.get(request_id)
        if group is None or group.beams is not None:
            return []
        # Before the prompt has forked its first branch stands for all.
        ended = [seq for seq in group.live if seq.branch == branch or not group.forked]
        return self._end(ended, FinishReason.STOP, now)

    def expire(self, now: float) -> list[Event]:
        """End requests whose `timeout_seconds` have passed: nobody waits for them. Call it before `plan`."""
        events: list[Event] = []
        for group in self._life.expired(now):
            message = (
                f"the request did not finish within its timeout of {group.request.timeout_seconds:.3g} s "
                f"(state {group.state.value}, {sum(seq.num_output_tokens for seq in group.live)} tokens made)"
            )
            name = DeadlineExceededError.__name__
            events += self._end(list(group.live), FinishReason.ERROR, now, message, name)
        return events

    @property
    def next_deadline(self) -> float:
        """When `expire` may find something again; infinite where nothing has a timeout."""
        return self._life.next_deadline

    def _end(
        self,
        sequences: list[Sequence],
        reason: FinishReason,
        now: float,
        error: str | None = None,
        error_name: str | None = None,
    ) -> list[Event]:
        """End branches between two commits; what the plans have caused so far waits for the next commit."""
        kept = self._life.take_events()
        if sequences and sequences[0].group.beams is not None:
            self._life.finish_beams(sequences[0].group, reason, now, error, error_name)
        else:
            for seq in sequences:
                self._life.finish(seq, reason, now, error, error_name)
        events, self._life.events = self._life.take_events(), kept
        self._tell_load()
        return events

    # --- one step ------------------------------------------------------------------------------------------

    def plan(self, now: float) -> StepPlan | None:
        """The next step, or None when there is nothing to do or the pipeline is full."""
        if len(self._in_flight) >= self.config.pipeline_depth:
            return None
        plan = PlanBuilder(self._life.released_rows)
        self._planner.fill(plan, self._next_step_id, now, under_way=bool(self._in_flight))
        if plan.empty:
            self._tell_load()
            return None
        step, record = plan.build(self._next_step_id, self.config.epoch)
        self._next_step_id += 1
        self._life.released_rows = []
        self._in_flight.append(record)
        self.stats.on_plan(record, self.kv, self._life.running)
        self._tell_load()
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
        beams_done: list[SequenceGroup] = []
        for row_index, found in result.prompt_logprobs:
            self._take_prompt_logprobs(record, row_index, found, now)
        for index, (seq, token) in enumerate(zip(record.samples, result.token_ids.tolist(), strict=True)):
            seq.num_pending -= 1
            if seq.finish_reason is not None:
                continue
            group = seq.group
            if token == MASKED_TOKEN:
                message = errors.get(index, "the worker had ended a branch that the scheduler had not")
                if group.beams is not None:
                    self._life.finish_beams(group, FinishReason.ERROR, now, message)
                    continue
                for branch in list(group.live):
                    self._life.finish(branch, FinishReason.ERROR, now, message)
                continue
            if group.beams is not None:
                # Not a token: the likeliest ones. The search goes on when all beams have theirs.
                seq.num_total_tokens -= 1
                seq.num_planned_outputs -= 1
                self._life.recount(group)
                seq.candidates = logprobs[index]
                if all(beam.candidates is not None for beam in group.live):
                    beams_done.append(group)
                continue
            offset = seq.num_planned_outputs - seq.num_pending - 1
            seq.token_ids.append(token)
            metrics = None
            if group.first_token_at is None:
                group.first_token_at = now
                metrics = group.metrics(now)
            chosen = (logprobs[index],) if logprobs else ()
            self._life.events.append(
                TokensOut(group.request.request_id, now, seq.branch, offset, (token,), chosen, metrics)
            )
            reason = finish_reason(group.request, offset + 1, token, group.max_tokens)
            if reason is not None:
                self._life.finish(seq, reason, now)
        for group in beams_done:
            self._life.advance_beams(group, now)
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
        self._tell_load()
        return self._life.take_events()

    def _take_prompt_logprobs(
        self, record: PlanRecord, row_index: int, found: PromptLogprobs, now: float
    ) -> None:
        group = record.prompts.get(row_index)
        if group is None:
            raise IntegrityError(f"log-probabilities of the prompt of row {row_index}, which asked for none")
        entries = found.after(group.num_prompt_logprobs)
        if entries and group.live:
            start = group.num_prompt_logprobs + 1
            group.num_prompt_logprobs += len(entries)
            told = PromptLogprobs(start, entries)
            self._life.events.append(PromptLogprobsOut(group.request.request_id, now, told))

    # --- what the drivers and the router may ask -----------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self._life.groups or self._in_flight or self._life.released_rows)

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def budget_tokens(self) -> int:
        """The token budget of the latest plan."""
        return self._planner.budget_tokens

    def unfinished(self) -> list[str]:
        """Ids of all requests that have not ended, in order of arrival."""
        return list(self._life.groups)

    def runs(self, request_id: str) -> bool:
        """Whether this request is here and has not ended."""
        return request_id in self._life.groups

    def awaits_first_token(self, request_id: str) -> bool:
        """Whether this request is here and its prompt has yet to be computed."""
        group = self._life.groups.get(request_id)
        return group is not None and group.first_token_at is None

    def cached_tokens_of(self, request: Request) -> int:
        """Prompt tokens of `request` whose KV is in this worker's blocks now. Exact; changes nothing."""
        return max(self._find(request).num_tokens, self._cached_in_parent(request))

    def _find(self, request: Request) -> PrefixHit:
        if not self.kv.reads(request):
            return PrefixHit([])
        return self.kv.find((request.cache_salt, request.adapter), request.prompt_token_ids.tobytes())

    def _cached_in_parent(self, request: Request) -> int:
        sources = self._life.fork_sources(request)
        if not sources:
            return 0
        tokens = request.prompt_token_ids.tobytes()
        return max(self.kv.find_in(one, one.num_computed_tokens, tokens).num_tokens for one in sources)

    def num_blocks_shared(self, request: Request, num_blocks: int) -> int:
        """Of the first `num_blocks` of its prompt, those that somebody holds now: starting it on them takes no
        room. Others, cached, are free, and are free no more once it runs."""
        root_key = (request.cache_salt, request.adapter)
        blocks = self.kv.match(root_key, request.prompt_token_ids.tobytes(), num_blocks)
        return len(blocks) - self.kv.pool.ref_counts(blocks).count(0)

    def predicted_tokens(self, request_id: str) -> int:
        """Prompt tokens that a waiting request would find in the prefix tree now: what it was told when it was queued,
        kept up to date."""
        return self._life.reservations.predicted_tokens(request_id)

    def tokens_of(self, request_id: str, branch: int = 0) -> tuple[Request, Int32Array]:
        """An unfinished request, and the tokens of one branch, prompt and outputs that are known: where a fork of it
        begins.

        Raises `InvalidRequestError` for a request that is not here, and for a branch that is not running or that no
        fork can go on from: a beam search has no answer before its end.
        """
        group = self._life.groups.get(request_id)
        if group is None:
            raise InvalidRequestError(f"no request {request_id!r} is running", param="request_id")
        if group.beams is not None:
            raise InvalidRequestError("a beam search cannot be forked before it ends", param="request_id")
        # Before the prompt has forked its first branch stands for all.
        seq = next((seq for seq in group.live if seq.branch == branch or not group.forked), None)
        if seq is None or not 0 <= branch < group.request.params.num_branches:
            raise InvalidRequestError(
                f"branch {branch} of request {request_id!r} is not running", param="branch"
            )
        return group.request, np.frombuffer(seq.token_ids.tobytes(), np.int32)

    @property
    def num_running_seqs(self) -> int:
        """Branches with a row."""
        return self._life.num_rows

    def report_load(self, row: Loads | None) -> None:
        """Keep `row` ([len(Load)], None: nothing) up to date from now on."""
        self._load = row
        if row is not None:
            config = self.config
            block_seconds = 0.0
            if config.num_host_blocks and config.host_link_bytes_per_second > 0:
                block_seconds = config.kv_bytes_per_block / config.host_link_bytes_per_second
            row[Load.NUM_BLOCKS :] = (
                config.num_blocks,
                config.block_size,
                config.max_num_batched_tokens,
                min(config.max_num_seqs, config.max_num_batched_tokens),
                block_seconds,
            )
            self._tell_load()

    def _tell_load(self) -> None:
        self._life.reservations.refresh()
        if self._load is None:
            return
        life, waiting = self._life, self._life.waiting.num_tokens + self._life.swapped.num_tokens
        self._load[: Load.NUM_BLOCKS] = (
            self._planner.prefill_left + waiting,
            waiting,
            life.waiting.num_branches + life.swapped.num_branches,
            life.num_rows,
            self.kv.pool.num_used,
            self.kv.pool.num_exclusive,
            sum([record.num_tokens for record in self._in_flight]),
            len(self._in_flight),
            self._in_flight[-1].context_tokens if self._in_flight else 0,
            life.mean_output_tokens,
            *self.step_time.coefficients,
        )

    def snapshot(self) -> dict[str, Any]:
        """Counts now and totals so far, by plain names (`Engine.stats`, `/metrics`)."""
        return self.stats.snapshot(
            self.kv,
            num_running=len(self._life.running),
            num_waiting=len(self._life.waiting),
            num_swapped=len(self._life.swapped),
            num_wasted_slots=self.kv.num_wasted_slots(
                seq for group in self._life.running for seq in group.live
            ),
        )

    def block_states(self) -> tuple[bytes, bytes]:
        """`BlockState` of every block, uint8: on the device, and on the host, where PRIVATE is swapped out."""
        return self.kv.pool.states(), self.kv.host.states()

    def stretch(self) -> Stretch | None:
        """Steps ahead in which there is nothing to decide, for a simulator (`stretch.py`)."""
        return find_stretch(self.config, self._life, self.kv, self._in_flight, self.stats)

    def skip(self, stretch: Stretch, num_steps: int, token: int) -> None:
        """Be where `num_steps` commits, each followed by a plan, would have led."""
        self._next_step_id = stretch.advance(num_steps, token) + 1
        self._tell_load()

    def check_integrity(self) -> None:
        """Raise `IntegrityError` on any broken invariant (rule R2). Call it between steps, at any time."""
        live = self._life.live()
        self.kv.check_integrity(live)
        self._parking.check_integrity(live)
        self._life.check_integrity()
        self._life.reservations.check_integrity()
