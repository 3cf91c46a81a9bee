"""What a worker's scheduler tells the router of its load: one row of numbers, rewritten after every call.

The router keeps one matrix for all workers and hands each scheduler its row, so that choosing among hundreds of
workers is a few array operations and asks nobody anything.
"""

from __future__ import annotations

import enum

import numpy as np
import numpy.typing as npt

Loads = npt.NDArray[np.float64]
"""[workers, len(Load)]"""


class Load(enum.IntEnum):
    """Columns. Tokens, blocks, branches and steps are counts."""

    QUEUED_TOKENS = 0
    """Prefill that stands before a request arriving now, apart from what plans under way compute."""
    WAITING_TOKENS = 1
    """Of these, of requests that have not been admitted or are parked: they take blocks when they start."""
    WAITING_BRANCHES = 2
    RUNNING_BRANCHES = 3
    USED_BLOCKS = 4
    EXCLUSIVE_BLOCKS = 5
    """Of these, held by one branch: what its end leaves free."""
    IN_FLIGHT_TOKENS = 6
    """Of plans under way; a request arriving now comes behind them."""
    IN_FLIGHT_STEPS = 7
    CONTEXT_TOKENS = 8
    """That a step reads, each branch its own: more than the blocks in use hold where prefixes are shared."""
    MEAN_OUTPUT_TOKENS = 9
    """Of branches that ended lately: how soon those who run make room."""
    FIXED_SECONDS = 10
    """This and the next three: the coefficients of the StepTimeModel."""
    TOKEN_SECONDS = 11
    ROW_SECONDS = 12
    CONTEXT_SECONDS = 13
    NUM_BLOCKS = 14
    """From here on: what never changes."""
    BLOCK_SIZE = 15
    BUDGET_TOKENS = 16
    MAX_BRANCHES = 17
    HOST_BLOCK_SECONDS = 18
    """To load one block from the host tier; 0 without one."""
