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


def predict(
    loads: Loads, num_prompt_tokens: int, held: Floats, on_host: Floats, shared: Floats
) -> StartTimes:
    """`held`, `on_host` and `shared`: blocks of the prompt that each worker has cached, and of these on the host, and
    in use by others. `shared` counts only where `may_lack_room`."""
    columns = _known(loads).T
    size, budget = columns[Load.BLOCK_SIZE], columns[Load.BUDGET_TOKENS]
    token_seconds, context_seconds = columns[Load.TOKEN_SECONDS], columns[Load.CONTEXT_SECONDS]
    running = columns[Load.RUNNING_BRANCHES]
    seqs = running + columns[Load.WAITING_BRANCHES]
    context = columns[Load.CONTEXT_TOKENS]
    # A step in which all who run decode.
    decode_seconds = (
        columns[Load.FIXED_SECONDS]
        + running * (token_seconds + columns[Load.ROW_SECONDS])
        + context * context_seconds
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
    ttft += _room_seconds(columns, num_prompt_tokens - shared * size, decode_seconds)
    load = columns[Load.FIXED_SECONDS] + (seqs + 1) * (token_seconds + columns[Load.ROW_SECONDS])
    load += (context + num_prompt_tokens) * context_seconds
    return StartTimes(ttft, load, ttft + load, seqs)


def may_lack_room(loads: Loads, num_prompt_tokens: int) -> npt.NDArray[np.bool_]:
    """[workers]: where a request that shares no block would wait for some."""
    short: npt.NDArray[np.bool_] = _short_blocks(loads.T, num_prompt_tokens) > 0
    return short


def _short_blocks(columns: Loads, own_tokens: Floats | int) -> Floats:
    """Blocks that a request which needs room for `own_tokens` must wait for: admission also leaves one for each branch
    to grow into."""
    need = (columns[Load.QUEUED_TOKENS] + own_tokens) / columns[Load.BLOCK_SIZE]
    need += columns[Load.RUNNING_BRANCHES] + 1
    short: Floats = np.maximum(0.0, need + columns[Load.USED_BLOCKS] - columns[Load.NUM_BLOCKS])
    return short


def _room_seconds(columns: Loads, own_tokens: Floats, decode_seconds: Floats) -> Floats:
    """Until enough of those who run have ended to leave blocks and a row.

    They end at a steady rate, all of them within the time that a branch of the usual length takes, and leave what they
    share with nobody. An idle worker has room for any request that it accepts.
    """
    running = columns[Load.RUNNING_BRANCHES]
    seqs = running + columns[Load.WAITING_BRANCHES]
    short_blocks = _short_blocks(columns, own_tokens) / np.maximum(1.0, columns[Load.EXCLUSIVE_BLOCKS])
    short_rows = np.maximum(0.0, seqs + 1 - columns[Load.MAX_BRANCHES]) / np.maximum(1.0, running)
    # Their steps compute what is queued as well.
    chunk = np.minimum(columns[Load.QUEUED_TOKENS], np.maximum(1.0, columns[Load.BUDGET_TOKENS] - running))
    step_seconds = decode_seconds + chunk * columns[Load.TOKEN_SECONDS]
    life_seconds = columns[Load.MEAN_OUTPUT_TOKENS] * step_seconds
    seconds: Floats = np.where(seqs > 0, np.maximum(short_blocks, short_rows) * life_seconds, 0.0)
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
