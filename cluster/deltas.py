"""Scheduler events to what a caller of a request gets to see.

Owns one rule: the tokens of a branch in one batch of events are one delta, and its end rides on it. Knows
nothing of who is waiting for them.
"""

from __future__ import annotations

from collections.abc import Iterable

from octavo.protos.errors import OctavoError, RequestFailedError, revive
from octavo.protos.types import FinishReason, OutputDelta, PromptLogprobs, RequestMetrics, TokenLogprobs
from octavo.scheduler.events import Event, Finished, PromptLogprobsOut, TokensOut


class _Branch:
    """Tokens and end of one branch within one batch of events."""

    __slots__ = ("finished", "logprobs", "metrics", "offset", "prompt", "token_ids")

    def __init__(self, offset: int) -> None:
        self.offset = offset
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs | None] = []
        self.finished: Finished | None = None
        self.metrics: RequestMetrics | None = None
        self.prompt: PromptLogprobs | None = None


def deltas_of(events: Iterable[Event], error: OctavoError | None = None) -> list[OutputDelta]:
    """One delta for each branch that got tokens or ended, in order of first mention.

    `error` is why branches that ended with ERROR and no message of their own did.
    """
    branches: dict[tuple[str, int], _Branch] = {}
    for event in events:
        if isinstance(event, TokensOut):
            key = (event.request_id, event.branch)
            branch = branches.get(key)
            if branch is None:
                branch = branches[key] = _Branch(event.offset)
            branch.token_ids += event.token_ids
            branch.metrics = branch.metrics or event.metrics
            # Steps in which no row asked for log-probabilities carry none at all.
            branch.logprobs += event.logprobs or (None,) * len(event.token_ids)
        elif isinstance(event, PromptLogprobsOut):
            key = (event.request_id, 0)
            branch = branches.setdefault(key, _Branch(0))
            found = event.logprobs
            before = branch.prompt
            branch.prompt = (
                found if before is None else PromptLogprobs(before.start, before.entries + found.entries)
            )
        elif isinstance(event, Finished):
            key = (event.request_id, event.branch)
            branch = branches.get(key)
            if branch is None:
                branch = branches[key] = _Branch(event.num_output_tokens)
            branch.finished = event
    return [_delta(request_id, branch, found, error) for (request_id, branch), found in branches.items()]


def _delta(request_id: str, branch: int, found: _Branch, error: OctavoError | None) -> OutputDelta:
    end = found.finished
    message = name = None
    if end is not None and end.reason is FinishReason.ERROR:
        if end.error is not None:
            error = revive(end.error_name or RequestFailedError.__name__, end.error)
        error = error or RequestFailedError("the request failed")
        message, name = error.message, type(error).__name__
    return OutputDelta(
        request_id=request_id,
        branch=branch,
        offset=found.offset,
        token_ids=tuple(found.token_ids),
        prompt_logprobs=found.prompt,
        logprobs=() if all(entry is None for entry in found.logprobs) else tuple(found.logprobs),
        finish_reason=end.reason if end else None,
        request_finished=end is not None and end.request_finished,
        error=message,
        error_name=name,
        metrics=(end.metrics if end else None) or found.metrics,
        score=end.score if end else None,
    )
