"""A StepPlan under construction, and what must be remembered of it until its result is in."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np

from octavo.protos.types import Int32Array, NewSequence, StepPlan
from octavo.scheduler.sequence import Sequence, SequenceGroup


def _int32(values: list[int], width: int = 0) -> Int32Array:
    # array("i") converts a list of ints about twice as fast as np.array does.
    flat = np.frombuffer(array("i", values), np.int32)
    return flat.reshape(-1, width) if width else flat


@dataclass(slots=True)
class PlanRecord:
    """A plan that is under way. `samples` are the sequences of its `sample_rows`, in order."""

    step_id: int
    samples: list[Sequence]
    num_tokens: int
    num_rows: int
    context_tokens: int
    """Sum of the context lengths that the step reads."""
    prompts: dict[int, SequenceGroup]
    """Index of the plan's row: whose prompt's log-probabilities it brings."""


class PlanBuilder:
    """Collects one step. Order of calls is the order of rows."""

    def __init__(self, released_rows: list[int]) -> None:
        self.released_rows = released_rows
        self.new_sequences: list[NewSequence] = []
        self.block_updates: list[int] = []
        self.forks: list[int] = []
        self.block_copies: list[int] = []
        self.rows: list[int] = []
        self.num_tokens: list[int] = []
        self.start_positions: list[int] = []
        self.sample_rows: list[int] = []
        self.sample_indices: list[int] = []
        self.samples: list[Sequence] = []
        self.beam_moves: list[int] = []
        self.swaps_out: list[int] = []
        self.swaps_in: list[int] = []
        self.held_blocks: list[int] = []
        """Sources of copies, referenced until the plan is complete."""
        self.held_host_blocks: list[int] = []
        """Sources of swaps in, likewise."""
        self.num_scheduled_tokens = 0
        self.context_tokens = 0
        self.prompts: dict[int, SequenceGroup] = {}
        """See `PlanRecord`."""
        self.num_prompt_logits = 0
        """Prompt tokens of this plan whose log-probabilities are asked for."""

    def update_block(self, row: int, index: int, block: int) -> None:
        self.block_updates += (row, index, block)

    def append_blocks(self, row: int, first: int, table: list[int]) -> None:
        """`table[first:]` is new."""
        for index in range(first, len(table)):
            self.block_updates += (row, index, table[index])

    def forget_row(self, row: int) -> bool:
        """The row is given up in this plan: what its table was told in it would reach nobody, or its next holder.

        Returns whether the row was to be taken in this plan, so that the worker knows of none to release."""
        flat = self.block_updates
        self.block_updates = [
            value for i in range(0, len(flat), 3) if flat[i] != row for value in flat[i : i + 3]
        ]
        moves = [self.beam_moves[i : i + 4] for i in range(0, len(self.beam_moves), 4)]
        self.beam_moves = [value for move in moves if move[1] != row for value in move]
        return any(move[1] == row != move[0] for move in moves)

    def copy_block(self, source: int, destination: int) -> None:
        self.block_copies += (source, destination)

    def swap_out(self, block: int, host_block: int) -> None:
        self.swaps_out += (block, host_block)

    def swap_in(self, host_block: int, block: int) -> None:
        self.swaps_in += (host_block, block)

    def add_sequence(self, seq: Sequence) -> None:
        """Tell the worker all of a branch that it has no row for; its table so far goes along as updates."""
        row, group = seq.row, seq.group
        assert row is not None
        self.new_sequences.append(
            NewSequence(
                row=row,
                request=group.request,
                branch=seq.branch,
                max_tokens=group.max_tokens,
                token_ids=np.frombuffer(seq.token_ids.tobytes(), np.int32),
                num_computed_tokens=seq.num_computed_tokens,
            )
        )
        self.append_blocks(row, 0, seq.block_table)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        assert parent.row is not None
        assert child.row is not None
        self.forks += (parent.row, child.row, child.branch)

    def move_beam(self, seq: Sequence) -> None:
        """The beam goes on from `seq.parent_row`, in its own row, with its last token."""
        assert seq.row is not None
        assert seq.parent_row is not None
        self.beam_moves += (seq.parent_row, seq.row, seq.branch, seq.token_ids[-1])

    def num_tokens_of(self, row: int) -> int:
        """Tokens that this plan computes for `row` so far: a branch that it forks off has its parent's."""
        parents = dict(zip(self.forks[1::3], self.forks[::3], strict=True))
        row = parents.get(row, row)
        return self.num_tokens[self.rows.index(row)] if row in self.rows else 0

    def schedule(self, seq: Sequence, num_tokens: int) -> None:
        """Run the next `num_tokens` of `seq`; where that is all it has, sample its next token."""
        assert seq.row is not None
        if seq.group.request.params.prompt_logprobs is not None:
            self._look_at_prompt(seq, num_tokens)
        self.rows.append(seq.row)
        self.num_tokens.append(num_tokens)
        self.start_positions.append(seq.num_computed_tokens)
        self.num_scheduled_tokens += num_tokens
        seq.num_computed_tokens += num_tokens
        self.context_tokens += seq.num_computed_tokens
        if seq.num_computed_tokens == seq.num_total_tokens:
            self.sample(seq, len(self.rows) - 1)

    def _look_at_prompt(self, seq: Sequence, num_tokens: int) -> None:
        """The chunk's tokens that foretell one of the prompt count; its last foretells the first output."""
        left = seq.group.request.num_prompt_tokens - 1 - seq.num_computed_tokens
        if left > 0:
            self.prompts[len(self.rows)] = seq.group
            self.num_prompt_logits += min(num_tokens, left)

    def sample(self, seq: Sequence, index: int) -> None:
        assert seq.row is not None
        self.sample_rows.append(seq.row)
        self.sample_indices.append(index)
        self.samples.append(seq)
        seq.num_total_tokens += 1
        seq.num_pending += 1
        seq.num_planned_outputs += 1

    @property
    def empty(self) -> bool:
        # A table entry that gave way to the tree's block is told even when nothing runs: searches wait for results.
        return not (self.rows or self.released_rows or self.swaps_out or self.block_updates)

    def build(self, step_id: int, epoch: int) -> tuple[StepPlan, PlanRecord]:
        plan = StepPlan(
            step_id=step_id,
            epoch=epoch,
            released_rows=_int32(self.released_rows),
            swaps_out=_int32(self.swaps_out, 2),
            swaps_in=_int32(self.swaps_in, 2),
            new_sequences=tuple(self.new_sequences),
            beam_moves=_int32(self.beam_moves, 4),
            block_updates=_int32(self.block_updates, 3),
            forks=_int32(self.forks, 3),
            block_copies=_int32(self.block_copies, 2),
            rows=_int32(self.rows),
            num_tokens=_int32(self.num_tokens),
            start_positions=_int32(self.start_positions),
            sample_rows=_int32(self.sample_rows),
            sample_indices=_int32(self.sample_indices),
        )
        record = PlanRecord(
            step_id,
            self.samples,
            self.num_scheduled_tokens,
            len(self.rows),
            self.context_tokens,
            self.prompts,
        )
        return plan, record
