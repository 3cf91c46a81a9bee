"""Fills one step: the order of its passes, and what each of them lets in (DESIGN §4).

Owns the decisions of `Scheduler.plan`: decodes first, then branches and prefills that have started, then what returns
from the host, then what waits, all under one token budget; and who is parked when blocks run out. What a change of
state does is `lifecycle.py`; block tables are KVManager's.
"""

from __future__ import annotations

from octavo.protos.types import MAX_PROMPT_LOGITS
from octavo.scheduler.budget import TokenBudget, step_budget
from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.events import ChunkPlanned
from octavo.scheduler.kv_manager import KVManager, PrefixHit
from octavo.scheduler.lifecycle import Lifecycle
from octavo.scheduler.parking import Parking
from octavo.scheduler.plan_builder import PlanBuilder
from octavo.scheduler.preemption import choose_victim
from octavo.scheduler.queue import OUTPUT_WEIGHT
from octavo.scheduler.sequence import GroupState, Sequence, SequenceGroup
from octavo.scheduler.step_time import StepTimeModel


class Planner:
    """Makes plans one after the other. Keeps nothing between them that a decision rests on."""

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVManager,
        lifecycle: Lifecycle,
        parking: Parking,
        step_time: StepTimeModel,
    ) -> None:
        self._config = config
        self._kv = kv
        self._life = lifecycle
        self._parking = parking
        self._step_time = step_time
        self._step_id = 0
        self._now = 0.0
        self.prefill_left = 0
        """Tokens of started prefills that the latest plan has left."""
        self.budget_tokens = 0
        """What the latest plan could have had."""

    def fill(self, plan: PlanBuilder, step_id: int, now: float, *, under_way: bool) -> None:
        """Decide everything that step `step_id` does. `under_way`: results of earlier steps are still to come."""
        self._step_id, self._now = step_id, now
        self.prefill_left = 0
        self._life.waiting.now = now
        self._kv.begin_plan(plan)
        self._life.place_beams(plan)
        self._publish(plan)
        decodes, prefills = self._runnable()
        if self._make_room(decodes, plan):
            decodes, prefills = self._runnable()
        budget = step_budget(
            self._config.max_num_batched_tokens,
            self._config.itl_target,
            self._step_time,
            num_decodes=len(decodes),
            context_tokens=sum(seq.num_computed_tokens for seq in decodes) if self._config.itl_target else 0,
            min_chunk=self._config.block_size,
        )
        self.budget_tokens = budget.limit
        self._plan_decodes(decodes, plan, budget)
        # Before the prefills: a copy runs before all writes of its step, so what returning branches share must
        # have been computed by an earlier plan.
        self._plan_returning(plan, budget)
        self._plan_prefills(prefills, plan, budget)
        if self._return_swapped(plan, budget):
            self._admit(plan, budget)
        if not plan.rows and not under_way and self._life.running.head is not None:
            self._break_deadlock(plan, budget)
        if self._life.waiting.is_shared:
            for seq in plan.samples:
                self._life.waiting.charge(seq.group.request.tenant, OUTPUT_WEIGHT)
        self._kv.finish_plan(plan)

    def _publish(self, plan: PlanBuilder) -> None:
        for seq in self._life.to_publish:
            if seq.row is not None:
                for index, block in self._kv.publish(seq, min(seq.num_computed_tokens, len(seq.token_ids))):
                    plan.update_block(seq.row, index, block)
        self._life.to_publish = []

    def _runnable(self) -> tuple[list[Sequence], list[Sequence]]:
        """Running branches that have one token to run (decodes), and those that have more (prefills).

        A prompt that has yet to fork is a prefill even with one token left: its last chunk makes the branches.
        """
        decodes: list[Sequence] = []
        prefills: list[Sequence] = []
        for group in self._life.running:
            max_tokens = group.max_tokens
            # A search goes on once its candidates are in; all others count on a sample that is under way.
            for seq in group.live if group.beams is None else group.ready_beams():
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
        while self._kv.num_new_blocks_for_decodes(decodes) > self._kv.num_free:
            # One request alone always fits: admission saw to it, and the parked hold nothing here.
            self._preempt(plan)
            parked = True
            decodes = [seq for seq in decodes if seq.row is not None]
        return parked

    def _plan_decodes(self, decodes: list[Sequence], plan: PlanBuilder, budget: TokenBudget) -> None:
        size = self._config.block_size
        for seq in decodes:
            if seq.tail_shared or seq.num_computed_tokens % size == 0:
                self._kv.grow(seq, 1, plan)
            plan.schedule(seq, 1)
        budget.take(len(decodes))

    def _plan_prefills(self, prefills: list[Sequence], plan: PlanBuilder, budget: TokenBudget) -> None:
        for seq in prefills:
            self._plan_chunk(seq, plan, budget)

    def _plan_chunk(self, seq: Sequence, plan: PlanBuilder, budget: TokenBudget) -> None:
        """Run as much of `seq` as budget and free blocks allow; at the prompt's end all branches come to be."""
        need = seq.num_uncomputed_tokens
        num_tokens = min(need, budget.left, self._kv.max_growth(seq, self._kv.num_free))
        if seq.group.request.params.prompt_logprobs is not None:
            num_tokens = min(num_tokens, _num_tokens_to_look_at(seq, plan))
        self.prefill_left += need - max(0, num_tokens)
        if num_tokens <= 0:
            return
        group = seq.group
        self._kv.grow(seq, num_tokens, plan)
        self._life.events.append(
            ChunkPlanned(
                group.request.request_id,
                self._now,
                seq.branch,
                seq.num_computed_tokens,
                num_tokens,
                self._step_id,
            )
        )
        plan.schedule(seq, num_tokens)
        self._kv.publish_planned(seq)
        budget.take(num_tokens)
        self._life.waiting.charge(group.request.tenant, num_tokens)
        self._life.to_publish.append(seq)
        if not group.forked and seq.num_pending:
            self._life.fork(seq, plan, self._now)

    def _plan_returning(self, plan: PlanBuilder, budget: TokenBudget) -> None:
        """Branches of a resumed group return behind its first one, sharing the prompt that it has computed."""
        still: list[SequenceGroup] = []
        for group in self._life.returning:
            if group.state is not GroupState.RUNNING:
                continue
            prompt = group.request.num_prompt_tokens
            # Taken before any branch starts in this plan: what is shared must have been computed by an earlier one.
            back = [seq for seq in group.live if seq.row is not None]
            source = next((seq for seq in back if seq.num_computed_tokens >= prompt), None)
            for seq in [seq for seq in group.live if seq.row is None]:
                if budget.left == 0 or (back and source is None):
                    break
                hit = self._kv.find_prefix(group, seq.token_ids.tobytes())
                if self._kv.num_blocks_to_admit(seq, hit) > self._kv.num_free:
                    hit = self._kv.without_tail(hit)
                if source is not None and hit.num_tokens < prompt:
                    self._kv.share_prefix(source, seq, prompt)
                elif self._kv.num_blocks_to_admit(seq, hit) > self._kv.num_free:
                    break
                else:
                    self._kv.attach_prefix(seq, hit, plan)
                if self._kv.max_growth(seq, self._kv.num_free) <= 0:
                    self._life.drop_blocks(seq)
                    break
                self._life.start_sequence(seq, plan)
                self._plan_chunk(seq, plan, budget)
                if source is None:
                    break
            if any(seq.row is None for seq in group.live):
                still.append(group)
        self._life.returning = still

    def _return_swapped(self, plan: PlanBuilder, budget: TokenBudget) -> bool:
        """Bring swapped groups back, in order, while they fit. True if those that wait may be let in after them."""
        branches = sum(group.num_branches for group in self._life.running)
        while (group := self._life.swapped.head) is not None:
            waiting = self._life.waiting.head
            if waiting is not None and waiting.order < group.order:
                return True
            need = self._parking.num_blocks_to_return(group)
            if (
                budget.left < len(group.live)
                or branches + group.num_branches
                > min(self._config.max_num_seqs, self._config.max_num_batched_tokens)
                or not self._may_return(group)
                or not self._life.reserve.has_room(group, need, self._life.running, self._kv)
            ):
                return False
            branches += group.num_branches
            self._life.bring_back(group, plan, self._step_id, self._now)
            # A prompt that was parked before its end may fork here; its new branches have their token already.
            for seq in list(group.live):
                self._plan_chunk(seq, plan, budget)
        return True

    def _admit(self, plan: PlanBuilder, budget: TokenBudget) -> None:
        """Let waiting groups in, in order, while rows, budget and blocks last. Nobody overtakes the head."""
        branches = sum(group.num_branches for group in self._life.running)
        max_branches = min(self._config.max_num_seqs, self._config.max_num_batched_tokens)
        while budget.left > 0:
            group = self._life.waiting.head
            if group is None or branches + group.num_branches > max_branches:
                return
            if self._life.swapped.head is not None and self._life.swapped.head.order < group.order:
                # Let in what was before the head of the swapped; what is behind it must not overtake.
                return
            if not self._may_return(group):
                return
            hit = self._find(group, plan)
            fits = self._life.reserve.fits(group, hit, self._life.running, self._kv)
            no_room = not fits and hit.tail_block is not None
            if no_room:
                # The source of the copy is held beside it: a request that fills the pool must do without.
                hit = self._kv.without_tail(hit)
                fits = self._life.reserve.fits(group, hit, self._life.running, self._kv)
            if not fits:
                return
            branches += group.num_branches
            self._life.start(group, hit, plan, self._step_id, self._now, no_room=no_room)
            self._plan_chunk(group.live[0], plan, budget)

    def _find(self, group: SequenceGroup, plan: PlanBuilder) -> PrefixHit:
        """Where a waiting group can start: in the prefix tree, or in the blocks of the request it was forked from."""
        tokens = group.live[0].token_ids.tobytes()
        hit = self._kv.find_prefix(group, tokens)
        for source in self._life.fork_sources(group.request):
            if source.row is None:
                continue
            computed = source.num_computed_tokens - plan.num_tokens_of(source.row)
            found = self._kv.find_in(source, computed, tokens)
            if found.tail_block in plan.block_copies[1::2]:
                # It is being made by this very plan, and copies of one plan know no order.
                found = self._kv.without_tail(found)
            if found.num_tokens > hit.num_tokens:
                hit = found
        return hit

    def _may_return(self, group: SequenceGroup) -> bool:
        """Not in the step in which it gave way, nor before samples that were under way then have come in: their
        values are needed to go on."""
        return group.parked_at_step < self._step_id and not any(seq.num_pending for seq in group.live)

    def _break_deadlock(self, plan: PlanBuilder, budget: TokenBudget) -> None:
        """Started prefills have taken all blocks and none can go on: the youngest give way to the first."""
        while not plan.rows:
            self._preempt(plan)
            _, prefills = self._runnable()
            self.prefill_left = 0
            self._plan_returning(plan, budget)
            self._plan_prefills(prefills, plan, budget)

    def _preempt(self, plan: PlanBuilder) -> None:
        """Choose a victim, price both ways, and park it."""
        chosen = choose_victim(self._life.running, self._parking.price, self._config.victims, self._step_id)
        assert chosen is not None, "blocks are short and nobody can give way"
        self._life.park(*chosen, plan, self._step_id, self._now)


def _num_tokens_to_look_at(seq: Sequence, plan: PlanBuilder) -> int:
    """Tokens that `seq`, whose prompt's log-probabilities are asked for, may compute in this plan."""
    left = seq.group.request.num_prompt_tokens - 1 - seq.num_computed_tokens
    room = MAX_PROMPT_LOGITS - plan.num_prompt_logits
    return room if left > room else seq.num_uncomputed_tokens
