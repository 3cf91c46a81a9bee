"""What happened, one type a transition: the only way in which the scheduler tells anybody anything.

The coordinator turns `TokensOut` and `Finished` into replies, the others into timelines and counters.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from octavo.protos.types import FinishReason, PromptLogprobs, RequestMetrics, TokenLogprobs


class PreemptionKind(enum.StrEnum):
    RECOMPUTE = "recompute"
    SWAP = "swap"


@dataclass(frozen=True, slots=True)
class Event:
    request_id: str
    time: float
    """As handed to the call that caused it."""


@dataclass(frozen=True, slots=True)
class Queued(Event):
    """Accepted; waits for its first admission."""

    queue_length: int
    cached_tokens: int = 0
    """Of its prompt, when it came: an admission in the next plan finds as many."""


class RepredictionCause(enum.StrEnum):
    """What changed the cached tokens that a waiting request was told it would find."""

    COMPUTED = "computed"
    """Others have computed more of its prefix meanwhile."""
    EVICTED = "evicted"
    MOVED = "moved"
    """To the host or back, or loading from there began or ceased to pay."""
    PARENT = "parent"
    """The request that it was forked from went on, or ended."""
    NO_ROOM = "no_room"
    """The part of a block is not taken: the pool has no block for its copy."""


@dataclass(frozen=True, slots=True)
class Repredicted(Event):
    """Its turn has come and it finds more or less than it was told when it was queued (`reservation.py`)."""

    predicted_tokens: int
    """As told in `Queued`."""
    promised_tokens: int
    """What requests ahead of it were to compute of its prompt."""
    found_tokens: int
    causes: tuple[RepredictionCause, ...]


@dataclass(frozen=True, slots=True)
class Admitted(Event):
    """waiting -> running for the first time."""

    num_prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class ChunkPlanned(Event):
    """A piece of the prefill got its place in a step."""

    branch: int
    start: int
    num_tokens: int
    step_id: int


@dataclass(frozen=True, slots=True)
class Forked(Event):
    """The prompt is computed; all `num_branches` branches go on from it, sharing its blocks."""

    num_branches: int


@dataclass(frozen=True, slots=True)
class Preempted(Event):
    """running -> swapped, or waiting again: its blocks went to others. Both prices, whichever was chosen."""

    kind: PreemptionKind
    freed_blocks: int
    lost_tokens: int
    recompute_seconds: float
    swap_seconds: float | None = None
    """None where swapping was impossible: no host pool, no room in it, or a link of unknown bandwidth."""


@dataclass(frozen=True, slots=True)
class Resumed(Event):
    """swapped, or waiting again -> running."""

    cached_tokens: int
    """Tokens whose KV need not be computed again: swapped in, or found in the prefix tree."""


@dataclass(frozen=True, slots=True)
class TokensOut(Event):
    """New output tokens of one branch, in order, each exactly once."""

    branch: int
    offset: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    metrics: RequestMetrics | None = None
    """With the first token of its request: whoever ends it from outside must know what was cached."""


@dataclass(frozen=True, slots=True)
class PromptLogprobsOut(Event):
    """Log-probabilities of a part of the prompt, in order, each once, all before the first token."""

    logprobs: PromptLogprobs


@dataclass(frozen=True, slots=True)
class Finished(Event):
    """One branch ended; `request_finished` with the last of its request, which ends exactly once."""

    branch: int
    reason: FinishReason
    request_finished: bool
    num_output_tokens: int
    error: str | None = None
    error_name: str | None = None
    """Class of `errors.py`; None: `RequestFailedError`."""
    metrics: RequestMetrics | None = None
    """With `request_finished`."""
    score: float | None = None
    """Of a beam search's hypothesis."""
