"""Which blocks a step shares, and when a pass of their own is worth it."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.worker.shared_prefix import SAVED_BYTES_MIN, num_shared_blocks

LARGE = SAVED_BYTES_MIN  # of a block: a single one, shared by two, is worth it


def shared(tables, contexts, rows=None, *, block_bytes=LARGE, block_size=4):
    rows = [1] * len(contexts) if rows is None else rows
    return num_shared_blocks(
        np.array(tables, np.int32),
        np.array(contexts, np.int32),
        np.concatenate([[0], np.cumsum(rows)]).astype(np.int32),
        block_size=block_size,
        layer_block_bytes=block_bytes,
    )


@pytest.mark.parametrize(
    ("tables", "contexts", "rows", "expected"),
    [
        ([[5, 6, 7], [5, 6, 8]], [10, 12], None, 2),
        ([[5, 6, 7], [5, 9, 8]], [10, 12], None, 1),
        ([[4, 6, 7], [5, 6, 8]], [10, 12], None, 0),
        ([[5, 6, 7]], [12], None, 0),  # nobody to share with
        (
            [[5, 6, 7], [5, 6, 7]],
            [9, 9],
            None,
            2,
        ),  # tables alike: what stands past the whole blocks is left out
        ([[5, 6], [5, 6]], [8, 8], None, 1),  # this step writes the second block's last slot
        ([[5, 6, 7], [5, 6, 8]], [10, 12], [4, 1], 1),  # ... or a chunk's first rows stand in it
        ([[5, 0], [5, 0]], [4, 8], None, 0),  # the shorter one has no whole block before this step
    ],
)
def test_whole_blocks_that_begin_every_table(tables, contexts, rows, expected):
    assert shared(tables, contexts, rows) == expected


def test_little_is_not_worth_a_pass():
    tables, contexts = [[5, 6, 7], [5, 6, 8], [5, 6, 9]], [10, 12, 9]
    assert shared(tables, contexts, block_bytes=-(-SAVED_BYTES_MIN // 4)) == 2
    assert shared(tables, contexts, block_bytes=SAVED_BYTES_MIN // 4 - 1) == 0
    # Two blocks would be worth it, and only one is shared.
    tables[0][1] = 3
    assert shared(tables, contexts, block_bytes=SAVED_BYTES_MIN // 4) == 0
