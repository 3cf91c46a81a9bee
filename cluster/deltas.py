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

    @classmethod
    def of(cls, before: TokensOut | None, event: TokensOut | Finished | PromptLogprobsOut) -> _Branch:
        """With `before`, and ready to take `event`."""
        if before is not None:
            branch = cls(before.offset)
            branch.take(before)
            return branch
        if isinstance(event, PromptLogprobsOut):
            return cls(0)
        return cls(event.num_output_tokens if isinstance(event, Finished) else event.offset)

    def take(self, event: TokensOut | Finished | PromptLogprobsOut) -> None:
        if isinstance(event, Finished):
            self.finished = event
            return
        if isinstance(event, PromptLogprobsOut):
            found, before = event.logprobs, self.prompt
            self.prompt = (
                found if before is None else PromptLogprobs(before.start, before.entries + found.entries)
            )
            return
        self.token_ids += event.token_ids
        self.metrics = self.metrics or event.metrics
        # Steps in which no row asked for log-probabilities carry none at all.
        self.logprobs += event.logprobs or (None,) * len(event.token_ids)


def deltas_of(events: Iterable[Event], error: OctavoError | None = None) -> list[OutputDelta]:
    """One delta for each branch that got tokens or ended, in order of first mention.

    `error` is why branches that ended with ERROR and no message of their own did.
    """
    branches: dict[tuple[str, int], TokensOut | _Branch] = {}
    for event in events:
        if isinstance(event, (TokensOut, Finished, PromptLogprobsOut)):
            key = (event.request_id, 0 if isinstance(event, PromptLogprobsOut) else event.branch)
            found = branches.get(key)
            if found is None and isinstance(event, TokensOut):
                # Most branches have one event a step and do not end: that event says it all.
                branches[key] = event
                continue
            if not isinstance(found, _Branch):
                found = branches[key] = _Branch.of(found, event)
            found.take(event)
    return [
        _running(found) if isinstance(found, TokensOut) else _delta(request_id, branch, found, error)
        for (request_id, branch), found in branches.items()
    ]


def _running(event: TokensOut) -> OutputDelta:
    """Of a branch that has nothing to say but these tokens."""
    logprobs = event.logprobs
    return OutputDelta(
        request_id=event.request_id,
        branch=event.branch,
        offset=event.offset,
        token_ids=event.token_ids,
        logprobs=() if all(entry is None for entry in logprobs) else logprobs,
        metrics=event.metrics,
    )


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
