"""Going on from where another request stands: what a fork takes of its parent, for the engine and for HTTP.

Owns which words an id that does not run is answered with, and what a fork's parameters are when none are given. A
fork is an ordinary request whose prompt is the parent's tokens so far.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from octavo.cluster.detokenizer import UNFINISHED_CHARS_MAX
from octavo.protos.errors import InvalidRequestError, NotFoundError
from octavo.protos.types import Int32Array, Request, SamplingParams

if TYPE_CHECKING:
    from octavo.scheduler.scheduler import Scheduler


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokensSoFar:
    """One branch of an unfinished request, at the time of asking."""

    token_ids: Int32Array
    """[P + outputs so far], read-only."""
    num_prompt_tokens: int
    """P."""
    cache_salt: str = ""
    adapter: str = ""
    use_prefix_cache: bool = True

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @classmethod
    def of(cls, parent: Request, token_ids: Int32Array) -> TokensSoFar:
        return cls(
            token_ids=token_ids,
            num_prompt_tokens=parent.num_prompt_tokens,
            cache_salt=parent.cache_salt,
            adapter=parent.adapter,
            use_prefix_cache=parent.use_prefix_cache,
        )


def not_running(request_id: str) -> NotFoundError:
    return NotFoundError(f"no request {request_id!r:.100} is running here", param="request_id")


def parent_of(scheduler: Scheduler, request_id: str, branch: int) -> tuple[Request, Int32Array]:
    """An unfinished request and the tokens of one of its branches.

    Raises `NotFoundError` for an id that does not run, and `InvalidRequestError` for a branch that does not (param
    "branch") and for a beam search (param "request_id").
    """
    try:
        return scheduler.tokens_of(request_id, branch)
    except InvalidRequestError as error:
        if error.param != "request_id" or request_id in scheduler.unfinished():
            raise
        raise not_running(request_id) from None


def params_of_fork(parent: SamplingParams, num_output_tokens: int) -> SamplingParams:
    """The parent's parameters for one branch that goes on from its first `num_output_tokens` outputs: the same limits
    for both together, and no seed, because the parent's would sample the parent's own tokens again.

    Raises `InvalidRequestError` where the output must match something, which no half of it does."""
    if parent.structured_output is not None:
        raise InvalidRequestError(
            "a request with structured output can be forked only with params that say what comes after the fork",
            param="params",
        )
    left = None if parent.max_tokens is None else max(1, parent.max_tokens - num_output_tokens)
    return replace(
        parent,
        n=1,
        best_of=None,
        seed=None,
        max_tokens=left,
        min_tokens=max(0, parent.min_tokens - num_output_tokens),
    )


def fork_context(request: Request, forked_at: int) -> list[int]:
    """The last output tokens before a fork, as many as one character may have begun in: its text begins with the end
    of that character."""
    count = min(UNFINISHED_CHARS_MAX, forked_at)
    return request.prompt_token_ids[request.num_prompt_tokens - count :].tolist()
