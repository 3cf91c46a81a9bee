"""Which blocks each row holds, kept by the worker itself, so that a bad plan is refused and not carried out.

Owns the rows' block tables and how many rows hold each block. Knows nothing of tokens, requests or tensors. The
scheduler decides who gets a block; the ledger only makes sure that a block is written by its one holder.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from octavo.protos.errors import IntegrityError, PlanRejectedError
from octavo.protos.types import Int32Array

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class LedgerChange:
    """What `BlockLedger.apply` did, for `undo`."""

    table_lens: Int32Array
    rows: Int32Array
    indices: Int32Array
    overwritten: Int32Array
    replaced_tables: tuple[tuple[int, Int32Array], ...]
    """(row, entries) that beams' tables overwrote."""
    taken: Int32Array
    given: Int32Array


def first(array: npt.NDArray[np.integer], bad: BoolArray) -> int:
    """The first element marked bad, to name it in a message."""
    return int(array[bad][0])


def has_duplicates(values: npt.NDArray[np.integer]) -> bool:
    return len(values) > 1 and len(np.unique(values)) < len(values)


class BlockLedger:
    """Block tables of `max_num_seqs` rows over a pool of `num_blocks` blocks.

    Memory: 4 bytes a table entry; entries that no row ever reached take no pages.
    """

    def __init__(
        self, *, max_num_seqs: int, max_blocks_per_row: int, num_blocks: int, num_host_blocks: int = 0
    ) -> None:
        self.num_blocks = num_blocks
        self.tables: Int32Array = np.zeros((max_num_seqs, max_blocks_per_row), np.int32)
        """[row, index]; what lies at and beyond `table_lens` means nothing."""
        self.table_lens: Int32Array = np.zeros(max_num_seqs, np.int32)
        self.num_holders: Int32Array = np.zeros(num_blocks, np.int32)
        """[block] how often it stands in the tables."""
        self.written: BoolArray = np.zeros(num_blocks, np.bool_)
        """[block] whether it was ever given to a row. It keeps its content when the rows are forgotten, so that whoever
        plans next may go on with it."""
        self.host_written: BoolArray = np.zeros(num_host_blocks, np.bool_)
        """[host block] whether anything was swapped into it."""

    def reset(self) -> None:
        self.table_lens[:] = 0
        self.num_holders[:] = 0
        self.host_written[:] = False

    def lens_before_updates(self, released_rows: Int32Array, beam_moves: Int32Array) -> Int32Array:
        """Lengths of all tables once rows are released and beams have moved, int32 [max_num_seqs]."""
        lens = self.table_lens.copy()
        lens[released_rows] = 0
        lens[beam_moves[:, 1]] = self.table_lens[beam_moves[:, 0]]
        return lens

    def check_updates(self, updates: Int32Array, in_use: BoolArray, table_lens: Int32Array) -> Int32Array:
        """Raise `PlanRejectedError` unless `updates` replaces entries or grows tables without a gap.

        Returns what `apply` is to carry out: of several updates of one entry the last.

        updates     int32 [U, 3] (row, index, block), rows known to be in range
        in_use      bool [max_num_seqs], rows that may be updated
        table_lens  int32 [max_num_seqs], of `lens_before_updates`
        """
        if not len(updates):
            return updates
        rows, indices, blocks = updates.T
        max_blocks = self.tables.shape[1]
        if (bad := ~in_use[rows]).any():
            raise PlanRejectedError(f"block update for row {first(rows, bad)}, which is not in use")
        if (bad := (indices < 0) | (indices >= max_blocks)).any():
            raise PlanRejectedError(
                f"block update for row {first(rows, bad)} at index {first(indices, bad)}; "
                f"a table has {max_blocks} entries"
            )
        if (bad := (blocks < 0) | (blocks >= self.num_blocks)).any():
            raise PlanRejectedError(
                f"block update for row {first(rows, bad)} names block {first(blocks, bad)}; "
                f"the pool has {self.num_blocks}"
            )
        entries = rows.astype(np.int64) * max_blocks + indices
        if has_duplicates(entries):
            # A branch that returns with a shared last block and writes into it names that entry twice.
            latest = len(updates) - 1 - np.unique(entries[::-1], return_index=True)[1]
            updates = updates[latest]
            rows, indices, _ = updates.T
        lens = table_lens[rows]
        # No entry is named twice, so growth leaves no gap just if each row's last index is its count of new ones.
        grown = indices >= lens
        new_lens = np.zeros(len(table_lens), np.int64)
        np.add.at(new_lens, rows, grown)
        if (bad := grown & (indices >= lens + new_lens[rows])).any():
            raise PlanRejectedError(
                f"block update for row {first(rows, bad)} at index {first(indices, bad)} leaves a gap: "
                f"the table has {first(lens, bad)} entries"
            )
        return updates

    def apply(self, released_rows: Int32Array, beam_moves: Int32Array, updates: Int32Array) -> LedgerChange:
        """Empty the tables of `released_rows`, give beams their parents' tables, then carry out `updates`, as
        `check_updates` returned them."""
        before = self.table_lens.copy()
        given = [self.table(row) for row in released_rows.tolist()]
        self.table_lens[released_rows] = 0
        moved, replaced = [], []
        for parent, row in beam_moves[:, :2].tolist():
            if row != parent:
                # No parent is a row that another beam moves into, so the order does not matter.
                length = self.table_lens[parent]
                replaced.append((row, self.tables[row, :length].copy()))
                self.tables[row, :length] = self.tables[parent, :length]
                self.table_lens[row] = length
                moved.append(self.table(row))
        rows, indices, blocks = updates.T
        overwritten = self.tables[rows, indices]
        given.append(overwritten[indices < self.table_lens[rows]])
        self.tables[rows, indices] = blocks
        np.maximum.at(self.table_lens, rows, indices + 1)
        change = LedgerChange(
            before,
            rows,
            indices,
            overwritten,
            tuple(replaced),
            np.concatenate([blocks, *moved]) if moved else blocks,
            np.concatenate(given) if len(given) > 1 else given[0],
        )
        self._move(change.taken, change.given)
        return change

    def undo(self, change: LedgerChange) -> None:
        """Take back the latest `apply`."""
        self._move(change.given, change.taken)
        self.tables[change.rows, change.indices] = change.overwritten
        for row, entries in change.replaced_tables:
            self.tables[row, : len(entries)] = entries
        self.table_lens = change.table_lens

    def _move(self, taken: Int32Array, given: Int32Array) -> None:
        # ufunc.at counts a block that occurs twice twice; it costs per block moved, not per block of the pool.
        np.add.at(self.num_holders, taken, 1)
        np.subtract.at(self.num_holders, given, 1)

    def fork(self, parent: int, child: int) -> None:
        """Give `child`, which holds nothing, the parent's blocks."""
        length = self.table_lens[parent]
        self.tables[child, :length] = self.tables[parent, :length]
        self.table_lens[child] = length
        np.add.at(self.num_holders, self.table(child), 1)

    def table(self, row: int) -> Int32Array:
        """A copy of the row's block table."""
        return self.tables[row, : self.table_lens[row]].copy()

    def check_integrity(self) -> None:
        """Raise `IntegrityError` unless the counts agree with the tables."""
        held = np.concatenate([self.table(row) for row in range(len(self.table_lens))])
        if len(held) and not 0 <= held.min() <= held.max() < self.num_blocks:
            raise IntegrityError(f"a block table holds a block outside the pool of {self.num_blocks}")
        counts = np.bincount(held, minlength=self.num_blocks)
        if (bad := counts != self.num_holders).any():
            block = int(np.flatnonzero(bad)[0])
            raise IntegrityError(
                f"block {block} stands in {counts[block]} tables, but {self.num_holders[block]} are on record"
            )
