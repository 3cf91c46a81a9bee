"""Forks of running requests: ordinary requests that begin with another one's tokens and share its blocks."""

from __future__ import annotations

import dataclasses

import pytest

from octavo.protos.errors import InvalidRequestError
from octavo.scheduler.events import Admitted

from .support import Harness, make_request


def fork(h: Harness, parent: str, name: str, *, branch: int = 0, cache: bool = True, **params):
    request, tokens = h.scheduler.tokens_of(parent, branch)
    made = make_request(name, tokens, cache=cache, salt=request.cache_salt, **params)
    h.add(dataclasses.replace(made, fork_of=parent))
    return len(tokens)


def admitted(h: Harness, name: str) -> Admitted:
    (event,) = [e for e in h.events if isinstance(e, Admitted) and e.request_id == name]
    return event


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("steps", range(2, 22, 3))
@pytest.mark.parametrize("depth", [1, 2])
def test_computes_one_token_and_shares_the_rest(cache, steps, depth):
    """The partly filled last block too, which the prefix tree does not know; the parent writes on in it."""
    h = Harness(num_blocks=100, depth=depth, prefix_cache=cache)
    h.add(make_request("parent", range(21), max_tokens=60, salt="tenant"))
    for _ in range(steps):
        h.step()
    used = h.scheduler.snapshot()["blocks_used"]
    count = fork(h, "parent", "child", cache=cache, max_tokens=30, seed=5)
    assert h.scheduler.cached_tokens_of(h.requests["child"]) == count - 1
    h.step()
    assert admitted(h, "child").cached_tokens == count - 1
    # A copy of the last block, and one more for whoever comes to the end of its own.
    assert h.scheduler.snapshot()["blocks_used"] <= used + 3
    h.run()


def test_of_branches_of_waiting_and_of_parked_requests():
    h = Harness(num_blocks=60, block_size=8)
    h.add(make_request("parent", range(20), n=3, max_tokens=40))
    fork(h, "parent", "early", branch=2, max_tokens=4)
    for _ in range(6):
        h.step()
    fork(h, "parent", "from 1", branch=1, max_tokens=20, n=2)
    fork(h, "parent", "beams", branch=0, max_tokens=10, beam_width=2)
    fork(h, "from 1", "of a fork that waits", max_tokens=10)
    h.take(h.scheduler.abort("parent", h.now))
    h.run()
    assert admitted(h, "from 1").cached_tokens >= 16, "whole blocks are found though the parent is gone"


def test_never_shares_across_salts():
    h = Harness(num_blocks=60)
    h.add(make_request("parent", range(64), max_tokens=20, salt="a"))
    for _ in range(3):
        h.step()
    _, tokens = h.scheduler.tokens_of("parent")
    h.add(dataclasses.replace(make_request("thief", tokens, max_tokens=4, salt="b"), fork_of="parent"))
    h.run()
    assert admitted(h, "thief").cached_tokens == 0


def test_refusals():
    h = Harness(num_blocks=60)
    h.add(make_request("beams", range(8), beam_width=2, max_tokens=4))
    h.add(make_request("plain", range(8), max_tokens=4))
    h.step()
    for request_id, branch, param in (
        ("nobody", 0, "request_id"),
        ("beams", 0, "request_id"),
        ("plain", 1, "branch"),
    ):
        with pytest.raises(InvalidRequestError) as refused:
            h.scheduler.tokens_of(request_id, branch)
        assert refused.value.param == param
    h.run()
    with pytest.raises(InvalidRequestError):
        h.scheduler.tokens_of("plain", 0)
