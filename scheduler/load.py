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
    IN_FLIGHT_TOKENS = 5
    """Of plans under way; a request arriving now comes behind them."""
    IN_FLIGHT_STEPS = 6
    MEAN_OUTPUT_TOKENS = 7
    """Of branches that ended lately: how soon those who run make room."""
    FIXED_SECONDS = 8
    """This and the next three: the coefficients of the StepTimeModel."""
    TOKEN_SECONDS = 9
    ROW_SECONDS = 10
    CONTEXT_SECONDS = 11
    NUM_BLOCKS = 12
    """From here on: what never changes."""
    BLOCK_SIZE = 13
    BUDGET_TOKENS = 14
    MAX_BRANCHES = 15
    HOST_BLOCK_SECONDS = 16
    """To load one block from the host tier; 0 without one."""
