"""The worker's memory of its running branches, and the flat batch that one step makes of them.

Owns a row for each branch: tokens, block table, progress, sampling parameters, counts for penalties. Plans carry
deltas; this is where they are carried out, in the order in which `StepPlan` lists its fields, once
`plan_checks.py` has passed them: a plan that is refused leaves no trace. State is arrays over rows, so that what
a step costs in Python does not grow with the number of running branches.

Knows nothing of torch: what it hands out is numpy.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from octavo.protos.errors import IntegrityError, PlanRejectedError
from octavo.protos.types import CachedPrefix, Int32Array, NewSequence, Request, StepPlan, finish_reason
from octavo.worker.block_ledger import BlockLedger
from octavo.worker.grammars import GrammarRow, Grammars, TokenMasks
from octavo.worker.logit_rules import LogitEdits, LogitRules
from octavo.worker.plan_checks import (
    BatchLimits,
    Progress,
    TokenPlaces,
    check_arrivals,
    check_blocks,
    check_rows,
    check_swaps,
)
from octavo.worker.prepared_step import FlatInputs, PreparedStep
from octavo.worker.prompt_rows import PromptChunk, PromptRows, find_prompt_chunks
from octavo.worker.random import seed_bits
from octavo.worker.sampler import SamplingBatch

_NO_TOKEN = -1
"""Pads the matrix of stop ids."""


def _num_logprobs(request: Request) -> int:
    """Likeliest tokens to report at each position; -1: nothing. A beam reports its candidates; where branches are
    ranked, the chosen token's log-probability is needed whether or not anybody asked for it."""
    params = request.params
    if params.beam_width is not None:
        return request.num_beam_candidates
    if params.logprobs is None:
        return 0 if params.ranks_by_logprob else -1
    return params.logprobs


@dataclass(frozen=True, slots=True, eq=False)
class _Assumed:
    """A step whose samples are counted as known."""

    step: PreparedStep
    counts: npt.NDArray[np.bool_]
    """[K'] which of them: not those of branches that had ended."""


class InputBatch:
    """Rows of one worker. Not thread-safe: plans are prepared, run and finished one after the other.

    Memory: 4 bytes a token of `max_model_len` and row, of which the system backs only what was ever used;
    the parameters take about 100 bytes a row, penalties 16 bytes a distinct token of the rows that ask for them.
    """

    def __init__(self, limits: BatchLimits, *, num_blocks: int, grammars: Grammars | None = None) -> None:
        """`grammars`: of the model; None where no request is held to any."""
        self.limits = limits
        self._grammars = grammars
        rows = limits.max_num_seqs
        self.ledger = BlockLedger(
            max_num_seqs=rows,
            max_blocks_per_row=-(-limits.max_model_len // limits.block_size),
            num_blocks=num_blocks,
            num_host_blocks=limits.num_host_blocks,
        )
        self.epoch = 0
        self.last_step_id = 0
        self.progress = Progress.empty(rows)
        self._tokens: Int32Array = np.empty((rows, limits.max_model_len), np.int32)
        self._requests: list[Request | None] = [None] * rows
        self._rules: dict[int, LogitRules] = {}
        self._grammar_rows: dict[int, GrammarRow] = {}
        self._prompt_lens: Int32Array = np.zeros(rows, np.int32)
        self._max_tokens: Int32Array = np.zeros(rows, np.int32)
        self._branches: Int32Array = np.zeros(rows, np.int32)
        self._seeds = np.zeros(rows, np.uint64)
        self._temperatures = np.zeros(rows, np.float64)
        self._top_ks = np.zeros(rows, np.int64)
        self._top_ps = np.zeros(rows, np.float64)
        self._min_ps = np.zeros(rows, np.float64)
        self._num_logprobs: Int32Array = np.zeros(rows, np.int32)
        self._num_prompt_logprobs: Int32Array = np.full(rows, -1, np.int32)
        self._greedy = np.zeros(rows, np.bool_)
        self._has_rules = np.zeros(rows, np.bool_)
        self._has_grammar = np.zeros(rows, np.bool_)
        self._stop_ids: Int32Array = np.full((rows, 4), _NO_TOKEN, np.int32)
        self._assumed: _Assumed | None = None

    @property
    def num_rows_in_use(self) -> int:
        return int(self.progress.in_use.sum())

    def cached_prefixes(self) -> list[CachedPrefix]:
        """Of each row in use, the whole blocks that plans have computed, and their tokens."""
        found = []
        for row in np.flatnonzero(self.progress.in_use).tolist():
            request = self._requests[row]
            assert request is not None
            count = int(self.progress.num_computed[row]) // self.limits.block_size
            if count and request.use_prefix_cache:
                found.append(
                    CachedPrefix(
                        token_ids=self._tokens[row, : count * self.limits.block_size].copy(),
                        blocks=self.ledger.table(row)[:count],
                        cache_salt=request.cache_salt,
                        adapter=request.adapter,
                    )
                )
        return found

    def reset(self) -> None:
        """Forget all rows; the next plan is step 1 of this epoch or of a later one."""
        self.last_step_id = 0
        self.progress = Progress.empty(self.limits.max_num_seqs)
        self.ledger.reset()
        self._requests = [None] * self.limits.max_num_seqs
        self._rules.clear()
        self._grammar_rows.clear()
        self._assumed = None

    def prepare(self, plan: StepPlan) -> PreparedStep:
        """Check `plan`, book it and make the step's inputs; `finish` takes the samples.

        Raises `PlanRejectedError`, and then nothing has changed, except that a plan of a newer epoch ends the
        older one and drops its rows, whatever else is wrong with it.
        """
        self._check_turn(plan)
        if plan.epoch > self.epoch:
            self.reset()
            self.epoch = plan.epoch
        after = check_rows(plan, self.progress, self.limits)
        check_swaps(plan, self.ledger, self.limits.num_host_blocks)
        table_lens = self.ledger.lens_before_updates(plan.released_rows, plan.beam_moves)
        updates = self.ledger.check_updates(plan.block_updates, after.in_use, table_lens)
        change = self.ledger.apply(plan.released_rows, plan.beam_moves, updates)
        try:
            check_arrivals(plan, self.ledger, change.taken)
            places = check_blocks(plan, after, self.ledger, self.limits.block_size)
        except PlanRejectedError:
            self.ledger.undo(change)
            raise
        # Nothing below can fail.
        self.last_step_id = plan.step_id
        self.progress = after
        self.ledger.written[change.taken] = True
        self.ledger.host_written[plan.swaps_out[:, 1]] = True
        for row in plan.released_rows.tolist():
            self._requests[row] = None
            self._rules.pop(row, None)
            self._grammar_rows.pop(row, None)
        for new in plan.new_sequences:
            self._admit(new)
        self._move_beams(plan.beam_moves)
        samples = np.flatnonzero(~after.ended[plan.rows[plan.sample_indices]])
        prompts = find_prompt_chunks(plan, places.active, self._prompt_lens, self._num_prompt_logprobs)
        inputs, logit_indices, prompt_indices = self._flatten(plan, places, samples, prompts)
        after.num_computed[plan.rows[places.active]] += plan.num_tokens[places.active]
        for parent, child, branch in plan.forks.tolist():
            self._fork(parent, child, branch)
        sample_rows = plan.sample_rows[samples]
        sampling = self._sampling(sample_rows, logit_indices) if len(samples) else None
        looked_at = (
            PromptRows.of(prompts, plan.rows, prompt_indices, self._tokens, self._num_prompt_logprobs)
            if prompts
            else None
        )
        return PreparedStep(inputs, sampling, samples, sample_rows, after.lengths[sample_rows], looked_at)

    def masks(self, step: PreparedStep) -> TokenMasks | None:
        """What the grammars of the step's samples allow; None where there are none. Needs no logits: call it while the
        device computes these."""
        held = np.flatnonzero(self._has_grammar[step.sample_rows])
        if not len(held):
            return None
        rows = {k: self._grammar_rows[int(step.sample_rows[k])] for k in held.tolist()}
        return TokenMasks.collect(rows, self.limits.vocab_size)

    def can_run_ahead(self, plan: StepPlan, step: PreparedStep) -> bool:
        """Whether `plan` may be prepared before the samples of `step`, the one before it, are known: it changes nothing
        about their rows but by what the device can look up itself."""
        if plan.epoch != self.epoch or len(plan.beam_moves) or step.sampling is None:
            return False
        if (step.sampling.num_logprobs >= 0).any():
            # They are looked up in the logits once the tokens are known; by then the next step has overwritten them.
            return False
        unknown = step.sample_rows[~self.progress.ended[step.sample_rows]]
        if np.isin(unknown, plan.released_rows).any() or np.isin(unknown, plan.forks[:, 0]).any():
            return False
        again = unknown[np.isin(unknown, plan.sample_rows)]
        return not (self._has_rules[again] | self._has_grammar[again] | self.progress.beams[again]).any()

    def assume(self, step: PreparedStep) -> None:
        """Count the samples of `step` as known, so that the plan behind it can be prepared; `finish` must follow it."""
        counts = ~self.progress.ended[step.sample_rows]
        self._assumed = _Assumed(step, counts)
        self.progress.lengths[step.sample_rows[counts]] = step.sample_positions[counts] + 1

    def finish(
        self, step: PreparedStep, token_ids: Int32Array, failed: npt.NDArray[np.bool_]
    ) -> npt.NDArray[np.bool_]:
        """Append the step's samples. All arrays are [K'], aligned with `step.samples`.

        Returns which samples count: not those of branches of which the step before has meanwhile shown that they had
        ended. A row whose branch ends with its token, or has failed, takes no part in what plans sent ahead say of it.
        """
        progress, assumed = self.progress, self._assumed
        if assumed is not None and assumed.step is step:
            # By now a plan behind it may have given away the row of a branch that has ended.
            counts, self._assumed = assumed.counts, None
        else:
            counts = ~progress.ended[step.sample_rows]
        progress.ended[step.sample_rows[counts & failed]] = True
        # A beam's token comes with a later plan, once all beams of its search have been ranked.
        sampled = counts & ~failed & ~progress.beams[step.sample_rows]
        rows, tokens = step.sample_rows[sampled], token_ids[sampled]
        self._tokens[rows, step.sample_positions[sampled]] = tokens
        progress.lengths[rows] = step.sample_positions[sampled] + 1
        for index in np.flatnonzero(self._has_rules[rows]).tolist():
            self._rules[int(rows[index])].add(int(tokens[index]))
        for index in np.flatnonzero(self._has_grammar[rows]).tolist():
            self._grammar_rows[int(rows[index])].add(int(tokens[index]))
        num_outputs = step.sample_positions[sampled] + 1 - self._prompt_lens[rows]
        # The arrays only pick whom to ask; the rule itself is written once, in `finish_reason`.
        may_end = (num_outputs >= self._max_tokens[rows]) | (self._stop_ids[rows] == tokens[:, None]).any(
            axis=1
        )
        for index in np.flatnonzero(may_end).tolist():
            row = int(rows[index])
            request = self._requests[row]
            assert request is not None
            reason = finish_reason(
                request, int(num_outputs[index]), int(tokens[index]), int(self._max_tokens[row])
            )
            progress.ended[row] = reason is not None
        return counts

    def tokens(self, row: int) -> Int32Array:
        """A copy of the tokens that the row has."""
        return self._tokens[row, : self.progress.lengths[row]].copy()

    def check_integrity(self) -> None:
        """Raise `IntegrityError` on a broken invariant of rows or blocks (rule R2)."""
        self.ledger.check_integrity()
        progress, ledger = self.progress, self.ledger
        used = np.flatnonzero(progress.in_use)
        if (bad := (ledger.table_lens > 0) & ~progress.in_use).any():
            raise IntegrityError(f"row {np.flatnonzero(bad)[0]} is free and holds blocks")
        if (bad := progress.num_computed[used] > progress.lengths[used]).any():
            raise IntegrityError(f"row {used[bad][0]} has more computed tokens than tokens")
        slots = ledger.table_lens[used].astype(np.int64) * self.limits.block_size
        if (bad := progress.num_computed[used] > slots).any():
            raise IntegrityError(f"row {used[bad][0]} has more computed tokens than slots")
        if any(
            (self._requests[row] is not None) != progress.in_use[row] for row in range(len(self._requests))
        ):
            raise IntegrityError("rows in use and requests on record differ")
        with_rules = set(np.flatnonzero(self._has_rules & progress.in_use).tolist())
        if with_rules != set(self._rules):
            raise IntegrityError("rows with rules and rules on record differ")
        if set(np.flatnonzero(self._has_grammar & progress.in_use).tolist()) != set(self._grammar_rows):
            raise IntegrityError("rows with grammars and grammars on record differ")

    # --- one plan ------------------------------------------------------------------------------------------

    def _check_turn(self, plan: StepPlan) -> None:
        if plan.epoch < self.epoch:
            raise PlanRejectedError(f"the plan is of epoch {plan.epoch}; epoch {self.epoch} has taken over")
        due = self.last_step_id + 1 if plan.epoch == self.epoch else 1
        if plan.step_id != due:
            raise PlanRejectedError(f"step {plan.step_id} of epoch {plan.epoch} where step {due} was due")

    def _admit(self, new: NewSequence) -> None:
        row, request, params = new.row, new.request, new.request.params
        self._requests[row] = request
        self._tokens[row, : len(new.token_ids)] = new.token_ids
        self._prompt_lens[row] = request.num_prompt_tokens
        self._max_tokens[row] = new.max_tokens
        self._branches[row] = new.branch
        self._seeds[row] = seed_bits(request.seed)
        self._temperatures[row] = params.temperature
        self._top_ks[row] = params.top_k
        self._top_ps[row] = params.top_p
        self._min_ps[row] = params.min_p
        self._num_logprobs[row] = _num_logprobs(request)
        self._num_prompt_logprobs[row] = -1 if params.prompt_logprobs is None else params.prompt_logprobs
        # The likeliest token alone is all that top_k 1 leaves.
        self._greedy[row] = params.greedy or params.top_k == 1 or params.beam_width is not None
        # What ends no hypothesis yet is left out where the search ranks its candidates.
        rules = None if params.beam_width else LogitRules.of(request, new.token_ids, self.limits.vocab_size)
        self._has_rules[row] = rules is not None
        if rules is not None:
            self._rules[row] = rules
        self._has_grammar[row] = params.structured_output is not None
        if params.structured_output is not None:
            assert self._grammars is not None, "a worker without grammars got a request that needs one"
            self._grammar_rows[row] = self._grammars.start(
                params.structured_output, new.token_ids[request.num_prompt_tokens :].tolist()
            )
        stops = sorted(request.stop_ids)
        if len(stops) > self._stop_ids.shape[1]:
            wider = np.full((len(self._stop_ids), len(stops)), _NO_TOKEN, np.int32)
            wider[:, : self._stop_ids.shape[1]] = self._stop_ids
            self._stop_ids = wider
        self._stop_ids[row] = _NO_TOKEN
        self._stop_ids[row, : len(stops)] = stops

    def _fork(self, parent: int, child: int, branch: int) -> None:
        """Make `child` what `parent` is: the step's tokens computed, its sample not yet taken."""
        progress = self.progress
        for array in (
            progress.in_use,
            progress.ended,
            progress.lengths,
            progress.num_computed,
            progress.beams,
        ):
            array[child] = array[parent]
        self._inherit(parent, child, branch)
        length = progress.lengths[parent]
        self._tokens[child, :length] = self._tokens[parent, :length]
        if parent in self._rules:
            self._rules[child] = self._rules[parent].fork()
        if parent in self._grammar_rows:
            self._grammar_rows[child] = self._grammar_rows[parent].fork()
        self.ledger.fork(parent, child)

    def _move_beams(self, moves: Int32Array) -> None:
        """Give beams that go on their parents' tokens and the new one; progress and tables have moved already."""
        for parent, row, branch, token in moves.tolist():
            length = int(self.progress.lengths[row])
            if row != parent:
                self._inherit(parent, row, branch)
                self._tokens[row, : length - 1] = self._tokens[parent, : length - 1]
            self._branches[row] = branch
            self._tokens[row, length - 1] = token

    def _inherit(self, parent: int, child: int, branch: int) -> None:
        """The parent's parameters for its child."""
        for array in (
            self._prompt_lens,
            self._max_tokens,
            self._seeds,
            self._temperatures,
            self._top_ks,
            self._top_ps,
            self._min_ps,
            self._num_logprobs,
            self._num_prompt_logprobs,
            self._greedy,
            self._has_rules,
            self._has_grammar,
            self._stop_ids,
        ):
            array[child] = array[parent]
        self._branches[child] = branch
        self._requests[child] = self._requests[parent]

    def _flatten(
        self,
        plan: StepPlan,
        places: TokenPlaces,
        samples: npt.NDArray[np.int64],
        prompts: list[PromptChunk],
    ) -> tuple[FlatInputs | None, npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The flat batch; for each of `samples` its row of the logits, where a fork's branches share one; and for each
        token of `prompts` the row of the logits that foretells it."""
        none = np.empty(0, np.int64)
        if not len(places.active):
            return None, none, none
        block_size = self.limits.block_size
        rows, counts = plan.rows[places.active], plan.num_tokens[places.active]
        cu_seqlens_q = np.zeros(len(rows) + 1, np.int32)
        np.cumsum(counts, out=cu_seqlens_q[1:])
        context_lens = plan.start_positions[places.active] + counts
        width = -(-int(context_lens.max()) // block_size)
        place = np.zeros(len(plan.rows), np.int64)
        place[places.active] = np.arange(len(rows))
        late_places, late_samples = self._late(places)
        sampled = cu_seqlens_q[place[plan.sample_indices[samples]] + 1].astype(np.int64) - 1
        foretelling = [
            cu_seqlens_q[place[chunk.index]] + np.arange(chunk.count, dtype=np.int64) for chunk in prompts
        ]
        logit_rows, places_of = np.unique(np.concatenate([sampled, *foretelling]), return_inverse=True)
        places_of = places_of.reshape(-1)
        inputs = FlatInputs(
            input_ids=self._tokens[places.rows, places.positions].astype(np.int64),
            positions=places.positions,
            slot_mapping=places.blocks.astype(np.int64) * block_size + places.positions % block_size,
            block_tables=np.ascontiguousarray(self.ledger.tables[rows, :width]),
            cu_seqlens_q=cu_seqlens_q,
            context_lens=context_lens,
            logit_rows=logit_rows,
            late_places=late_places,
            late_samples=late_samples,
        )
        return inputs, places_of[: len(sampled)], places_of[len(sampled) :]

    def _late(self, places: TokenPlaces) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Which of the step's tokens the step before is still sampling, and as which of its samples."""
        if self._assumed is None:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        sample_of_row = np.full(self.limits.max_num_seqs, -1, np.int64)
        step, counts = self._assumed.step, self._assumed.counts
        sample_of_row[step.sample_rows[counts]] = np.flatnonzero(counts)
        samples = sample_of_row[places.rows]
        late = (samples >= 0) & (places.positions == step.sample_positions[samples])
        return np.flatnonzero(late), samples[late]

    def _sampling(self, rows: Int32Array, logit_indices: npt.NDArray[np.int64]) -> SamplingBatch:
        num_outputs = self.progress.lengths[rows] - self._prompt_lens[rows]
        edited = self._has_rules[rows]
        edits = None
        if edited.any():
            outputs = {k: int(num_outputs[k]) for k in np.flatnonzero(edited).tolist()}
            rules = {k: self._rules[int(rows[k])] for k in outputs}
            rules = {k: rule for k, rule in rules.items() if rule.applies(outputs[k])}
            edited = np.zeros(len(rows), np.bool_)
            edited[list(rules)] = True
            edits = LogitEdits.collect(rules, outputs)
        return SamplingBatch(
            logit_indices=logit_indices,
            greedy=self._greedy[rows],
            temperatures=self._temperatures[rows],
            top_ks=self._top_ks[rows],
            top_ps=self._top_ps[rows],
            min_ps=self._min_ps[rows],
            seeds=self._seeds[rows],
            branches=self._branches[rows],
            positions=num_outputs,
            num_logprobs=self._num_logprobs[rows],
            edited=edited | self._has_grammar[rows],
            edits=edits,
        )
