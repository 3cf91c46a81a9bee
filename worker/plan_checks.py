"""Every rule a StepPlan must keep, checked against the worker's own count before anything is done.

Owns the rules that need rows and lengths; `block_ledger.py` has those of blocks. Changes nothing. Each check is
a few numpy operations over all rows; only new sequences are looked at one by one. A violation is a
`PlanRejectedError` that names row and numbers: it means that the planner and this worker disagree, and running
on would corrupt somebody's tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from octavo.protos.errors import InvalidRequestError, PlanRejectedError
from octavo.protos.types import Int32Array, NewSequence, StepPlan
from octavo.worker.block_ledger import BlockLedger, BoolArray, first, has_duplicates


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Sizes that plans must stay within."""

    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int
    vocab_size: int
    block_size: int
    num_host_blocks: int = 0


@dataclass(slots=True, eq=False)
class Progress:
    """How far each row is, all [max_num_seqs]."""

    in_use: BoolArray
    ended: BoolArray
    """Finished or failed, not yet released: plans sent ahead may still name it, and it takes no part."""
    lengths: Int32Array
    """Tokens known: prompt and outputs."""
    num_computed: Int32Array
    beams: BoolArray
    """Hypotheses of a beam search: they report candidates, and plans give them their tokens."""

    @classmethod
    def empty(cls, max_num_seqs: int) -> Progress:
        return cls(
            np.zeros(max_num_seqs, np.bool_),
            np.zeros(max_num_seqs, np.bool_),
            np.zeros(max_num_seqs, np.int32),
            np.zeros(max_num_seqs, np.int32),
            np.zeros(max_num_seqs, np.bool_),
        )

    def copy(self) -> Progress:
        return Progress(
            self.in_use.copy(),
            self.ended.copy(),
            self.lengths.copy(),
            self.num_computed.copy(),
            self.beams.copy(),
        )


@dataclass(frozen=True, slots=True, eq=False)
class TokenPlaces:
    """Where the step's tokens go. Rows that have ended are left out."""

    active: Int32Array
    """[S'] indices into the plan's `rows`."""
    positions: npt.NDArray[np.int64]
    """[T] in the sequence."""
    rows: npt.NDArray[np.int64]
    """[T]"""
    blocks: Int32Array
    """[T]"""


def check_rows(plan: StepPlan, now: Progress, limits: BatchLimits) -> Progress:
    """Check all but blocks; returns the progress as it stands when the plan's rows start to run."""
    _check_shapes(plan)
    _check_row_ids("released_rows", plan.released_rows, limits)
    after = now.copy()
    _require_in_use("released_rows", plan.released_rows, after)
    after.in_use[plan.released_rows] = False
    for new in plan.new_sequences:
        _check_new_sequence(new, after, limits)
        after.in_use[new.row] = True
        after.ended[new.row] = False
        after.lengths[new.row] = len(new.token_ids)
        after.num_computed[new.row] = new.num_computed_tokens
        after.beams[new.row] = new.request.num_beam_candidates > 0
    _check_beam_moves(plan, after, limits)
    if (bad := (plan.block_updates[:, 0] < 0) | (plan.block_updates[:, 0] >= limits.max_num_seqs)).any():
        raise PlanRejectedError(f"block_updates names row {first(plan.block_updates[:, 0], bad)}")
    _check_row_ids("rows", plan.rows, limits)
    _require_in_use("rows", plan.rows, after)
    _check_tokens(plan, after, limits)
    _check_forks(plan, after, limits)
    _check_samples(plan, after, limits)
    return after


def check_swaps(plan: StepPlan, ledger: BlockLedger, num_host_blocks: int) -> None:
    """Check what swaps can be checked for before the plan is booked: what they read, and what they write outside."""
    if not (len(plan.swaps_out) or len(plan.swaps_in)):
        return
    for name, device_column in (("swaps_out", 0), ("swaps_in", 1)):
        swaps = getattr(plan, name)
        device, host = swaps[:, device_column], swaps[:, 1 - device_column]
        if (bad := (device < 0) | (device >= ledger.num_blocks)).any():
            raise PlanRejectedError(
                f"{name} names block {first(device, bad)}; the pool has {ledger.num_blocks}"
            )
        if (bad := (host < 0) | (host >= num_host_blocks)).any():
            raise PlanRejectedError(
                f"{name} names host block {first(host, bad)}; there are {num_host_blocks}"
            )
        if has_duplicates(swaps[:, 1]):
            raise PlanRejectedError(f"{name} writes a block twice: {swaps[:, 1].tolist()}")
    sources, host_sources = plan.swaps_out[:, 0], plan.swaps_in[:, 0]
    # A cached block stands in no table, but somebody must have filled it.
    if (bad := ~ledger.written[sources]).any():
        raise PlanRejectedError(f"swaps_out reads block {first(sources, bad)}, which no row ever held")
    if (bad := np.isin(host_sources, plan.swaps_out[:, 1])).any():
        raise PlanRejectedError(
            f"host block {first(host_sources, bad)} is both read and written by swaps of one plan"
        )
    if (bad := ~ledger.host_written[host_sources]).any():
        raise PlanRejectedError(
            f"swaps_in reads host block {first(host_sources, bad)}, which nothing was swapped into"
        )


def check_arrivals(plan: StepPlan, ledger: BlockLedger, taken: Int32Array) -> None:
    """Check where swaps arrive, against `ledger` with the plan's updates carried out; `taken` are their blocks.

    Whoever holds such a block must have got it in this plan: KV that arrives must not land on KV that is there.
    """
    if not len(plan.swaps_in):
        return
    destinations = plan.swaps_in[:, 1]
    holders = ledger.num_holders[destinations]
    if (bad := holders == 0).any():
        raise PlanRejectedError(f"swaps_in fills block {first(destinations, bad)}, which stands in no table")
    if (bad := holders > np.bincount(taken, minlength=ledger.num_blocks)[destinations]).any():
        raise PlanRejectedError(
            f"swaps_in fills block {first(destinations, bad)}, which a row held before this plan"
        )
    if (bad := np.isin(destinations, plan.block_copies[:, 1])).any():
        raise PlanRejectedError(f"both a swap and a copy fill block {first(destinations, bad)}")


def check_blocks(plan: StepPlan, after: Progress, ledger: BlockLedger, block_size: int) -> TokenPlaces:
    """Check tables, copies and writes against `ledger`, which has carried out all but the forks."""
    for new in plan.new_sequences:
        if new.num_computed_tokens > int(ledger.table_lens[new.row]) * block_size:
            raise PlanRejectedError(
                f"row {new.row} starts with {new.num_computed_tokens} computed tokens, "
                f"but its table has {ledger.table_lens[new.row]} blocks"
            )
    active = np.flatnonzero(~after.ended[plan.rows]).astype(np.int32)
    rows, starts, counts = plan.rows[active], plan.start_positions[active], plan.num_tokens[active]
    if (bad := starts + counts > ledger.table_lens[rows].astype(np.int64) * block_size).any():
        raise PlanRejectedError(
            f"row {first(rows, bad)} runs to position {first(starts + counts, bad)}, "
            f"but its table has {first(ledger.table_lens[rows], bad)} blocks of {block_size}"
        )
    ends = np.cumsum(counts, dtype=np.int64)
    token_rows = np.repeat(rows.astype(np.int64), counts)
    positions = np.arange(len(token_rows)) + np.repeat(starts - (ends - counts), counts)
    blocks = ledger.tables[token_rows, positions // block_size]
    holders = ledger.num_holders
    if (holders[blocks] != 1).any():
        full = (positions // block_size + 1) * block_size <= np.repeat(starts + counts, counts)
        holders = _num_holders_inside(plan, ledger, blocks[full], block_size)
    _check_copies(plan.block_copies, ledger, holders)
    if (bad := holders[blocks] != 1).any():
        raise PlanRejectedError(
            f"row {first(token_rows, bad)} writes block {first(blocks, bad)}, "
            f"which stands in {first(ledger.num_holders[blocks], bad)} tables"
        )
    return TokenPlaces(active, positions, token_rows, blocks)


def _num_holders_inside(
    plan: StepPlan, ledger: BlockLedger, filled: Int32Array, block_size: int
) -> Int32Array:
    """[num_blocks] holders of each block, without those that are new in this plan and begin behind one of `filled`.

    These the plan writes to their ends; and a step's KV is written before it is read, so they are read complete."""
    behind = np.zeros(ledger.num_blocks, np.int32)
    for new in plan.new_sequences:
        # Once a table: one that names a block twice remains its holder.
        behind[ledger.tables[new.row, : new.num_computed_tokens // block_size]] += 1
    holders = ledger.num_holders.copy()
    filled = np.unique(filled)
    holders[filled] -= behind[filled]
    return holders


def _check_shapes(plan: StepPlan) -> None:
    for name, width in (
        ("swaps_out", 2),
        ("swaps_in", 2),
        ("beam_moves", 4),
        ("block_updates", 3),
        ("forks", 3),
        ("block_copies", 2),
    ):
        array = getattr(plan, name)
        if array.ndim != 2 or array.shape[1] != width:
            raise PlanRejectedError(f"{name} must be [*, {width}], got {list(array.shape)}")
    if not plan.rows.shape == plan.num_tokens.shape == plan.start_positions.shape == (len(plan.rows),):
        raise PlanRejectedError("rows, num_tokens and start_positions differ in length")
    if not plan.sample_rows.shape == plan.sample_indices.shape == (len(plan.sample_rows),):
        raise PlanRejectedError("sample_rows and sample_indices differ in length")


def _check_row_ids(name: str, rows: Int32Array, limits: BatchLimits) -> None:
    if (bad := (rows < 0) | (rows >= limits.max_num_seqs)).any():
        raise PlanRejectedError(f"{name} names row {first(rows, bad)}; there are {limits.max_num_seqs}")
    if has_duplicates(rows):
        raise PlanRejectedError(f"{name} names a row twice: {rows.tolist()}")


def _require_in_use(name: str, rows: Int32Array, progress: Progress) -> None:
    if (bad := ~progress.in_use[rows]).any():
        raise PlanRejectedError(f"{name} names row {first(rows, bad)}, which is not in use")


def _check_new_sequence(new: NewSequence, after: Progress, limits: BatchLimits) -> None:
    where = f"new sequence in row {new.row}"
    if not 0 <= new.row < limits.max_num_seqs:
        raise PlanRejectedError(f"{where}: there are {limits.max_num_seqs} rows")
    if after.in_use[new.row]:
        raise PlanRejectedError(f"{where}: the row is in use")
    prompt, tokens = new.request.prompt_token_ids, new.token_ids
    if len(prompt) < 1 or tokens.ndim != 1 or not np.array_equal(tokens[: len(prompt)], prompt):
        raise PlanRejectedError(f"{where}: its tokens do not begin with its prompt")
    if tokens.min() < 0 or tokens.max() >= limits.vocab_size:
        raise PlanRejectedError(f"{where}: a token id is outside [0, {limits.vocab_size - 1}]")
    if new.branch < 0:
        raise PlanRejectedError(f"{where}: branch {new.branch}")
    if len(prompt) + new.max_tokens > limits.max_model_len:
        raise PlanRejectedError(
            f"{where}: prompt {len(prompt)} plus max_tokens {new.max_tokens} exceed {limits.max_model_len}"
        )
    if len(tokens) - len(prompt) >= new.max_tokens:
        raise PlanRejectedError(
            f"{where}: has {len(tokens) - len(prompt)} outputs already; max_tokens is {new.max_tokens}"
        )
    # A beam that has its candidates waits for the others with all tokens computed.
    if not 0 <= new.num_computed_tokens < len(tokens) + (new.request.num_beam_candidates > 0):
        raise PlanRejectedError(f"{where}: {new.num_computed_tokens} of its {len(tokens)} tokens computed")
    try:
        new.request.params.check_vocab(limits.vocab_size)
    except InvalidRequestError as error:
        raise PlanRejectedError(f"{where}: {error.message}") from error


def _check_beam_moves(plan: StepPlan, after: Progress, limits: BatchLimits) -> None:
    """Check `beam_moves` and carry them out on `after`."""
    if not len(plan.beam_moves):
        return
    parents, rows, branches, tokens = plan.beam_moves.T
    if (bad := (parents < 0) | (parents >= limits.max_num_seqs)).any():
        raise PlanRejectedError(
            f"a beam goes on from row {first(parents, bad)}; there are {limits.max_num_seqs}"
        )
    _require_in_use("a beam move", parents, after)
    if (bad := ~after.beams[parents] | after.ended[parents]).any():
        raise PlanRejectedError(f"a beam goes on from row {first(parents, bad)}, which is no running beam")
    _check_row_ids("beam_moves", rows, limits)
    if (bad := after.in_use[rows] & (rows != parents)).any():
        raise PlanRejectedError(f"a beam goes on in row {first(rows, bad)}, which is in use")
    if (bad := branches < 0).any():
        raise PlanRejectedError(f"a beam goes on as branch {first(branches, bad)}")
    if (bad := (tokens < 0) | (tokens >= limits.vocab_size)).any():
        raise PlanRejectedError(
            f"a beam gets token {first(tokens, bad)}; the vocabulary has {limits.vocab_size}"
        )
    lengths = after.lengths[parents]
    if (bad := after.num_computed[parents] != lengths).any():
        raise PlanRejectedError(
            f"a beam goes on from row {first(parents, bad)}, whose tokens are not all computed"
        )
    if (bad := lengths >= limits.max_model_len).any():
        raise PlanRejectedError(
            f"a beam goes on from row {first(parents, bad)} beyond {limits.max_model_len} tokens"
        )
    # The right-hand sides are read whole before anything is written: a parent may be a row that is moved into.
    after.num_computed[rows] = after.num_computed[parents]
    after.lengths[rows] = lengths + 1
    after.in_use[rows] = True
    after.ended[rows] = False
    after.beams[rows] = True


def _check_tokens(plan: StepPlan, after: Progress, limits: BatchLimits) -> None:
    if (bad := plan.num_tokens < 1).any():
        raise PlanRejectedError(f"row {first(plan.rows, bad)} runs {first(plan.num_tokens, bad)} tokens")
    if plan.num_scheduled_tokens > limits.max_num_batched_tokens:
        raise PlanRejectedError(
            f"{plan.num_scheduled_tokens} tokens scheduled; "
            f"max_num_batched_tokens is {limits.max_num_batched_tokens}"
        )
    # A row that has ended stays where it ended, while the planner still counts on.
    live = ~after.ended[plan.rows]
    computed = after.num_computed[plan.rows]
    if (bad := live & (plan.start_positions != computed)).any():
        raise PlanRejectedError(
            f"row {first(plan.rows, bad)} is planned from position {first(plan.start_positions, bad)}; "
            f"{first(computed, bad)} of its tokens are computed"
        )
    lengths = after.lengths[plan.rows]
    # Subtracted, not added: a count near 2**31 must not wrap around.
    if (bad := live & (plan.num_tokens > lengths - computed)).any():
        raise PlanRejectedError(
            f"row {first(plan.rows, bad)} is planned {first(plan.num_tokens, bad)} tokens from "
            f"{first(computed, bad)}; it has {first(lengths, bad)}"
        )


def _check_forks(plan: StepPlan, after: Progress, limits: BatchLimits) -> None:
    if not len(plan.forks):
        return
    parents, children, branches = plan.forks.T
    if (bad := (parents < 0) | (parents >= limits.max_num_seqs)).any():
        raise PlanRejectedError(f"a fork of row {first(parents, bad)}; there are {limits.max_num_seqs}")
    _require_in_use("a fork", parents, after)
    _check_row_ids("forks", children, limits)
    if (bad := after.in_use[children]).any():
        raise PlanRejectedError(f"a fork into row {first(children, bad)}, which is in use")
    if (bad := branches < 0).any():
        raise PlanRejectedError(f"a fork into row {first(children, bad)} as branch {first(branches, bad)}")
    if (bad := ~np.isin(children, plan.sample_rows)).any():
        raise PlanRejectedError(f"a fork into row {first(children, bad)}, which samples nothing")


def _check_samples(plan: StepPlan, after: Progress, limits: BatchLimits) -> None:
    _check_row_ids("sample_rows", plan.sample_rows, limits)
    indices = plan.sample_indices
    if (bad := (indices < 0) | (indices >= len(plan.rows))).any():
        raise PlanRejectedError(
            f"row {first(plan.sample_rows, bad)} samples from index {first(indices, bad)} "
            f"of {len(plan.rows)} rows"
        )
    sources = plan.rows[indices]
    expected = np.arange(limits.max_num_seqs, dtype=np.int32)
    expected[plan.forks[:, 1]] = plan.forks[:, 0]
    if (bad := expected[plan.sample_rows] != sources).any():
        raise PlanRejectedError(
            f"row {first(plan.sample_rows, bad)} samples from the logits of row {first(sources, bad)}, "
            "which is neither itself nor its parent in this plan"
        )
    left = after.lengths[sources] - after.num_computed[sources] - plan.num_tokens[indices]
    if (bad := ~after.ended[sources] & (left > 0)).any():
        raise PlanRejectedError(
            f"row {first(sources, bad)} samples with {first(left, bad)} of its tokens not yet computed"
        )


def _check_copies(copies: Int32Array, ledger: BlockLedger, holders: Int32Array) -> None:
    """`holders`: [num_blocks], of `_num_holders_inside`."""
    if not len(copies):
        return
    sources, destinations = copies.T
    if (bad := (copies < 0) | (copies >= ledger.num_blocks)).any():
        raise PlanRejectedError(f"a copy names block {first(copies, bad)}; the pool has {ledger.num_blocks}")
    if has_duplicates(destinations):
        raise PlanRejectedError(f"two copies into one block: {destinations.tolist()}")
    if (bad := np.isin(destinations, sources)).any():
        raise PlanRejectedError(f"block {first(destinations, bad)} is both source and destination of copies")
    if (bad := holders[destinations] != 1).any():
        raise PlanRejectedError(
            f"a copy into block {first(destinations, bad)}, "
            f"which stands in {first(ledger.num_holders[destinations], bad)} tables"
        )
