"""What a request of the in-process engine gives to its caller: a stream of pieces, or one finished output.

Owns the way from deltas of tokens to texts, stop strings included. Knows nothing of how requests are made.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from octavo.cluster.detokenizer import BranchText
from octavo.cluster.engine_loop import EngineLoop
from octavo.cluster.forking import fork_context
from octavo.cluster.outputs import CompletionOutput, RequestOutput
from octavo.cluster.ranking import best_branches, num_branches_told
from octavo.cluster.tokenizer import Tokenizer
from octavo.protos import errors
from octavo.protos.types import FinishReason, OutputDelta, Request, RequestMetrics, TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamDelta:
    """What is new in one branch of a streamed request."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    score: float | None = None
    """With the end of a beam: what the search ranked it by."""


class EngineStream(Iterator[StreamDelta]):
    """One running request, as it is made. Submits it at once; `close`, or dropping the last reference, aborts it.

    Raises what `EngineLoop.submit` raises. For one thread at a time.
    """

    def __init__(
        self, loop: EngineLoop, tokenizer: Tokenizer, request: Request, *, forked_at: int | None = None
    ) -> None:
        self.request_id = request.request_id
        """For `Engine.fork`."""
        self.num_prompt_tokens = request.num_prompt_tokens
        """Of a fork: with the parent's outputs that it goes on from."""
        self.forked_at = forked_at
        """Output tokens of the parent that this fork includes; None when it is no fork."""
        self._loop = loop
        self._deltas: queue.SimpleQueue[OutputDelta] = queue.SimpleQueue()
        count = num_branches_told(request.params)
        context = fork_context(request, forked_at or 0)
        self._texts = [BranchText(tokenizer, request.params, context) for _ in range(count)]
        self._live: set[int] = set()
        loop.submit(request, self._deltas.put)
        self._live.update(range(count))

    def __next__(self) -> StreamDelta:
        while self._live:
            delta = self._deltas.get()
            if delta.error is not None:
                self.close()
                raise errors.revive(delta.error_name or "RequestFailedError", delta.error)
            if delta.branch not in self._live:
                continue
            text, stopped = _push(self._texts[delta.branch], delta)
            reason = FinishReason.STOP if stopped else delta.finish_reason
            if reason is not None:
                self._live.discard(delta.branch)
                if not self._live:
                    self._loop.abort(self.request_id)
                elif delta.finish_reason is None:
                    self._loop.stop_branch(self.request_id, delta.branch)
            if text or delta.token_ids or reason:
                return StreamDelta(
                    index=delta.branch,
                    text=text,
                    token_ids=delta.token_ids,
                    finish_reason=reason.value if reason else None,
                    score=delta.score,
                )
        raise StopIteration

    def close(self) -> None:
        """Abort what is unfinished. May be called twice."""
        if self._live:
            self._live.clear()
            self._loop.abort(self.request_id)

    def __del__(self) -> None:
        # Leaving a `for` loop early is the usual way to stop; nothing else holds the stream then.
        if getattr(self, "_live", None):
            self._loop.abandon(self.request_id)


@dataclass(slots=True)
class _Branch:
    text: BranchText
    parts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    reason: FinishReason | None = None
    score: float | None = None

    @property
    def counted_logprobs(self) -> tuple[TokenLogprobs | None, ...]:
        """A stop string ends the branch at the token that completed it; the same step may have made more."""
        return tuple(self.logprobs[: self.text.num_tokens])

    def output(self, index: int, with_logprobs: bool) -> CompletionOutput:
        logprobs = self.counted_logprobs if with_logprobs else None
        return CompletionOutput(
            index=index,
            text="".join(self.parts),
            token_ids=tuple(self.token_ids[: self.text.num_tokens]),
            finish_reason=self.reason.value if self.reason else None,
            logprobs=logprobs,
            cumulative_logprob=None
            if logprobs is None
            else sum(entry.logprob for entry in logprobs if entry is not None),
            score=self.score,
        )


class Collector:
    """Gathers the deltas of one request on the loop's thread and tells `done`, with itself, once at its end."""

    def __init__(
        self,
        loop: EngineLoop,
        tokenizer: Tokenizer,
        request: Request,
        prompt: str | None,
        done: Callable[[Collector], None],
    ) -> None:
        """`prompt`: its text, where it was given as text."""
        self.request = request
        self._prompt = prompt
        self._loop = loop
        self._done = done
        count = num_branches_told(request.params)
        self._branches = [_Branch(BranchText(tokenizer, request.params)) for _ in range(count)]
        self._metrics = RequestMetrics()
        self._error: tuple[str, str] | None = None
        self._prompt_logprobs: list[TokenLogprobs] = []

    @property
    def num_tokens(self) -> int:
        return sum(len(branch.token_ids) for branch in self._branches)

    def take(self, delta: OutputDelta) -> None:
        """A sink of `EngineLoop.submit`."""
        branch = self._branches[delta.branch]
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs += delta.prompt_logprobs.after(len(self._prompt_logprobs))
        if delta.error is not None:
            self._error = (delta.error_name or "RequestFailedError", delta.error)
        elif branch.reason is None:
            self._take_tokens(branch, delta)
        if delta.request_finished:
            self._metrics = delta.metrics or self._metrics
            self._done(self)

    def _take_tokens(self, branch: _Branch, delta: OutputDelta) -> None:
        text, stopped = _push(branch.text, delta)
        branch.parts.append(text)
        branch.token_ids += delta.token_ids
        branch.logprobs += delta.logprobs or (None,) * len(delta.token_ids)
        branch.reason = delta.finish_reason
        branch.score = delta.score
        if stopped:
            branch.reason = FinishReason.STOP
            if delta.finish_reason is None:
                self._loop.stop_branch(self.request.request_id, delta.branch)

    def raise_error(self) -> None:
        """Raise the error that ended the request, if one has."""
        if self._error is not None:
            raise errors.revive(*self._error)

    def output(self) -> RequestOutput:
        """Once `done` was told: the branches that are returned, in their order."""
        params, branches = self.request.params, self._branches
        if params.ranks_by_logprob:
            order = best_branches([branch.counted_logprobs for branch in branches], params.n)
            branches = [branches[index] for index in order]
        return RequestOutput(
            request_id=self.request.request_id,
            prompt=self._prompt,
            prompt_token_ids=tuple(self.request.prompt_token_ids.tolist()),
            outputs=tuple(
                branch.output(index, params.logprobs is not None) for index, branch in enumerate(branches)
            ),
            prompt_logprobs=None if params.prompt_logprobs is None else (None, *self._prompt_logprobs),
            metrics=self._metrics,
        )


def _push(text: BranchText, delta: OutputDelta) -> tuple[str, bool]:
    return text.push(
        delta.token_ids,
        finished=delta.finish_reason is not None,
        stop_token=delta.finish_reason is FinishReason.STOP and bool(delta.token_ids),
    )
