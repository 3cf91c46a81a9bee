"""Runs the requests of one call against the backend and hands out what is new of each choice.

Owns the life of a call: submit, merge the deltas of all prompts and branches, make text, stop, abort. Knows
nothing of JSON or sockets. Leaving the context ends every stream: what had finished hears nothing, what had not is
aborted.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType

from octavo.cluster.backend import Backend
from octavo.cluster.detokenizer import BranchText
from octavo.cluster.metrics.http import HttpMetrics
from octavo.cluster.ranking import best_branches, num_branches_told
from octavo.cluster.tokenizer import Tokenizer
from octavo.protos.errors import IntegrityError, OctavoError, RequestFailedError, UnavailableError, revive
from octavo.protos.types import FinishReason, OutputDelta, Request, RequestMetrics, TokenLogprobs

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Update:
    """What came for one choice since the last look; deltas that were there at once are one update."""

    index: int
    """Of the choice: prompt number times n, plus branch. While `best_of` branches run, times their number."""
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """As many as `token_ids`, or none when neither the call nor the ranking of `best_of` asks."""
    finish_reason: str | None = None
    score: float | None = None
    """What a beam search ranked it by."""
    prompt_logprobs: Sequence[TokenLogprobs] | None = None
    """Of all prompt tokens but the first, with the choice's first update where the call asks for them."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a whole call."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    def as_dict(self) -> dict[str, object]:
        """OpenAI's `usage` object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class _Branch:
    """One choice: its text so far, and where its token count stands."""

    __slots__ = ("ended", "index", "num_received", "text", "told")

    def __init__(self, index: int, text: BranchText) -> None:
        self.index = index
        self.text = text
        self.num_received = 0
        self.ended = False
        self.told = False
        """Its first update is made."""


class Generation:
    """The running requests of one call.

        async with Generation(backend, tokenizer, requests, metrics) as generation:
            while (updates := await generation.next()) is not None: ...

    Memory is bounded by the requests' own limits: what a slow reader has not fetched is merged, never queued.
    """

    def __init__(
        self,
        backend: Backend,
        tokenizer: Tokenizer,
        requests: Sequence[Request],
        metrics: HttpMetrics,
        context: Sequence[int] = (),
        *,
        without_output: bool = False,
    ) -> None:
        """`context`: see `BranchText`. `without_output`: what is generated is not told, since only the prompt was
        asked for."""
        self.requests = tuple(requests)
        self._without_output = without_output
        self._prompt_logprobs: list[list[TokenLogprobs]] = [[] for _ in requests]
        self._backend = backend
        self._metrics = metrics
        self._branches: list[list[_Branch]] = []
        for number, request in enumerate(requests):
            count = num_branches_told(request.params)
            first = number * count
            self._branches.append(
                [_Branch(first + i, BranchText(tokenizer, request.params, context)) for i in range(count)]
            )
        self._request_metrics: list[RequestMetrics | None] = [None] * len(requests)
        self._pending: dict[int, Update] = {}
        self._news = asyncio.Event()
        """Something for `next`."""
        self._over = asyncio.Event()
        """All have ended, or one has failed."""
        self.first_token_at: float | None = None
        """`time.perf_counter()` of the call's first token."""
        self._error: OctavoError | None = None
        self._num_running = len(requests)
        self._pumps: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Generation:
        self._pumps = [
            asyncio.ensure_future(self._pump(number, request)) for number, request in enumerate(self.requests)
        ]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._num_running or self._error is not None:
            for pump in self._pumps:
                pump.cancel()
        # Cancelled pumps abort their requests; the others end by themselves at once.
        await asyncio.gather(*self._pumps, return_exceptions=True)

    @property
    def finished(self) -> bool:
        """Every choice has its finish reason; `next` may still have updates."""
        return self._num_running == 0

    async def next(self) -> list[Update] | None:
        """What is new, in order of choice; None when all is told. Not for calls whose branches are ranked at the end.

        Raises the `OctavoError` that ended a request, once what came before it is told.
        """
        while not self._pending:
            if self._error is not None:
                raise self._error
            if self._num_running == 0:
                return None
            self._news.clear()
            await self._news.wait()
        return self._take_pending()

    async def all(self) -> list[Update]:
        """Everything, one update a choice, once all have ended; with `best_of` the best, best first. Wakes once, not
        at every token.

        Raises the `OctavoError` that ended a request.
        """
        await self._over.wait()
        if self._error is not None:
            raise self._error
        return self._ranked(self._take_pending())

    def _ranked(self, updates: list[Update]) -> list[Update]:
        """`updates` of finished requests without the branches that lost, numbered by rank."""
        told, ranked = iter(updates), []
        for number, request in enumerate(self.requests):
            group = [next(told) for _ in self._branches[number]]
            if request.params.ranks_by_logprob:
                n = request.params.n
                order = best_branches([update.logprobs for update in group], n)
                group = [replace(group[branch], index=number * n + rank) for rank, branch in enumerate(order)]
            ranked += group
        return ranked

    def _take_pending(self) -> list[Update]:
        updates = [self._pending[index] for index in sorted(self._pending)]
        self._pending = {}
        return updates

    def usage(self) -> Usage:
        """Counts so far; final once `next` gave None. Branches that `best_of` drops were generated, so they count."""
        return Usage(
            prompt_tokens=sum(request.num_prompt_tokens for request in self.requests),
            completion_tokens=sum(branch.text.num_tokens for group in self._branches for branch in group),
            cached_tokens=sum(told.cached_tokens for told in self._request_metrics if told is not None),
        )

    def request_metrics(self) -> list[RequestMetrics | None]:
        """One entry a request; None where the backend has told none."""
        return list(self._request_metrics)

    async def _pump(self, number: int, request: Request) -> None:
        """Take every delta of one request. Sets `_error` rather than raise; on cancellation aborts."""
        stream = self._backend.submit(request)
        exhausted = False
        try:
            async for delta in stream:
                self._take(number, request, delta)
                # Stop strings may have ended all branches; the backend cannot know. A stream that says itself
                # that it is over is read to its end, so that nothing there looks like an abort.
                if not delta.request_finished and self._all_ended(number):
                    break
            else:
                exhausted = True
            if not self._all_ended(number):
                raise RequestFailedError("the backend ended the request without finishing it")
        except OctavoError as error:
            self._fail(error)
        except Exception as error:
            logger.exception("the backend failed in request %s", request.request_id)
            self._fail(RequestFailedError(f"the backend failed: {type(error).__name__}"))
        else:
            self._num_running -= 1
            self._news.set()
            if self._num_running == 0:
                self._over.set()
        finally:
            if not exhausted:
                await _close(stream)

    def _all_ended(self, number: int) -> bool:
        return all(branch.ended for branch in self._branches[number])

    def _fail(self, error: OctavoError) -> None:
        self._error = self._error or error
        self._news.set()
        self._over.set()

    def _take(self, number: int, request: Request, delta: OutputDelta) -> None:
        if delta.metrics is not None:
            self._request_metrics[number] = delta.metrics
        if delta.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
            raise _as_error(delta)
        if delta.prompt_logprobs is not None:
            known = self._prompt_logprobs[number]
            known += delta.prompt_logprobs.after(len(known))
        branch = self._branches[number][delta.branch]
        if branch.ended:
            return  # by a stop string, before the scheduler heard of it
        if delta.offset != branch.num_received:
            raise IntegrityError(
                f"request {request.request_id}: branch {delta.branch} has {branch.num_received} tokens and "
                f"was told of token {delta.offset}"
            )
        if self.first_token_at is None and delta.token_ids:
            self.first_token_at = time.perf_counter()
        self._metrics.on_tokens(len(delta.token_ids), first=branch.num_received == 0)
        branch.num_received += len(delta.token_ids)
        if delta.token_ids or delta.finish_reason is not None:
            self._extend(branch, number, request, delta)
        if branch.ended and delta.finish_reason is None and not self._all_ended(number):
            # Its siblings go on; after the last of them the whole request is aborted.
            self._backend.stop_branch(request.request_id, delta.branch)

    def _extend(self, branch: _Branch, number: int, request: Request, delta: OutputDelta) -> None:
        if self._without_output:
            delta = replace(delta, token_ids=(), logprobs=(), finish_reason=FinishReason.LENGTH)
        finished = delta.finish_reason is not None
        before = branch.text.num_tokens
        # The scheduler says STOP for a token only; stop strings are found here.
        text, stopped = branch.text.push(
            delta.token_ids, finished, stop_token=delta.finish_reason is FinishReason.STOP
        )
        counted = branch.text.num_tokens - before
        update = self._pending.get(branch.index)
        if update is None:
            update = self._pending[branch.index] = Update(branch.index)
            if not branch.told and request.params.prompt_logprobs is not None:
                update.prompt_logprobs = self._prompt_logprobs[number]
            branch.told = True
        update.text += text
        update.token_ids += delta.token_ids[:counted]
        if request.params.logprobs is not None or request.params.ranks_by_logprob:
            update.logprobs += _aligned(delta)[:counted]
        if stopped or finished:
            reason = FinishReason.STOP if stopped else delta.finish_reason
            assert reason is not None
            update.finish_reason = reason.value
            update.score = delta.score
            branch.ended = True
            self._metrics.on_choice(reason.value)
        self._news.set()


def _aligned(delta: OutputDelta) -> list[TokenLogprobs]:
    found = [entry for entry in delta.logprobs if entry is not None]
    if len(found) != len(delta.token_ids):
        raise RequestFailedError("the backend sent tokens without the log-probabilities that were asked for")
    return found


def _as_error(delta: OutputDelta) -> OctavoError:
    message = delta.error or "the request was ended by the server"
    if delta.error_name is not None:
        return revive(delta.error_name, message)
    return (RequestFailedError if delta.finish_reason is FinishReason.ERROR else UnavailableError)(message)


async def _close(stream: AsyncIterator[OutputDelta]) -> None:
    """Abort: plain iterators without `aclose` have nothing to end."""
    close = getattr(stream, "aclose", None)
    if close is not None:
        await close()
