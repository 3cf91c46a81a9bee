"""When would a request start on each worker: predicted seconds to its first token, for all workers at once.

Pure array arithmetic on the schedulers' `Load` rows. A first token waits for the plans that are under way, for the
prefill queued before it, for blocks and rows that those who run must give up first, for what is loaded from the
host, and for its own prompt; each step on the way also computes one token of every branch that runs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from octavo.scheduler.load import Load, Loads

Floats = npt.NDArray[np.float64]
"""[workers]"""


@dataclass(frozen=True, slots=True)
class StartTimes:
    """Each [workers], seconds but for the last."""

    ttft: Floats
    load: Floats
    """Price of joining the decode batch."""
    total: Floats
    num_seqs: Floats
    """Branches that run or wait."""


def predict(loads: Loads, num_prompt_tokens: int, held: Floats, on_host: Floats) -> StartTimes:
    """`held` and `on_host`: blocks of the prompt that each worker has cached, and of these on the host."""
    columns = _known(loads).T
    size, budget = columns[Load.BLOCK_SIZE], columns[Load.BUDGET_TOKENS]
    token_seconds, context_seconds = columns[Load.TOKEN_SECONDS], columns[Load.CONTEXT_SECONDS]
    running = columns[Load.RUNNING_BRANCHES]
    seqs = running + columns[Load.WAITING_BRANCHES]
    used = columns[Load.USED_BLOCKS]
    # A step in which all who run decode. Blocks in use tell what they read.
    decode_seconds = (
        columns[Load.FIXED_SECONDS]
        + running * (token_seconds + columns[Load.ROW_SECONDS])
        + used * size * context_seconds
    )
    uncached = num_prompt_tokens - held * size
    tokens = columns[Load.QUEUED_TOKENS] + uncached
    room = np.maximum(1.0, budget - running)
    steps = np.ceil(tokens / room)
    own_steps = np.ceil(uncached / room)
    ttft = (
        columns[Load.IN_FLIGHT_STEPS] * decode_seconds
        + columns[Load.IN_FLIGHT_TOKENS] * token_seconds
        + steps * decode_seconds
        + tokens * token_seconds
        + own_steps * (num_prompt_tokens - uncached / 2) * context_seconds
        + on_host * columns[Load.HOST_BLOCK_SECONDS]
    )
    ttft += _room_seconds(columns, uncached, seqs, decode_seconds)
    load = columns[Load.FIXED_SECONDS] + (seqs + 1) * (token_seconds + columns[Load.ROW_SECONDS])
    load += (used * size + num_prompt_tokens) * context_seconds
    return StartTimes(ttft, load, ttft + load, seqs)


def _room_seconds(columns: Loads, uncached: Floats, seqs: Floats, decode_seconds: Floats) -> Floats:
    """Until enough of those who run have ended to leave blocks and a row.

    They end at a steady rate: all of them within the time that a branch of the usual length takes.
    """
    used = columns[Load.USED_BLOCKS]
    need = (columns[Load.WAITING_TOKENS] + uncached) / columns[Load.BLOCK_SIZE]
    short_blocks = np.maximum(0.0, need + used - columns[Load.NUM_BLOCKS]) / np.maximum(1.0, used)
    short_rows = np.maximum(0.0, seqs + 1 - columns[Load.MAX_BRANCHES])
    short_rows /= np.maximum(1.0, columns[Load.RUNNING_BRANCHES])
    life_seconds = columns[Load.MEAN_OUTPUT_TOKENS] * decode_seconds
    seconds: Floats = np.maximum(short_blocks, short_rows) * life_seconds
    return seconds


def _known(loads: Loads) -> Loads:
    """Workers of which nothing has been measured are taken for the average of the others; where nothing is known of
    any, a token is as good a unit as a second."""
    model = slice(Load.FIXED_SECONDS, Load.CONTEXT_SECONDS + 1)
    measured = loads[:, model].any(axis=1)
    if measured.all():
        return loads
    loads = loads.copy()
    loads[~measured, model] = loads[measured, model].mean(axis=0) if measured.any() else (0.0, 1.0, 0.0, 0.0)
    return loads
