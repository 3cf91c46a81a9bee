"""Requests that go on elsewhere: from any step of any life, on a fresh worker, the outputs are the undisturbed ones."""

from __future__ import annotations

import random

import numpy as np
import pytest

from octavo.protos.errors import InvalidRequestError, OverloadedError
from octavo.protos.types import BranchSoFar, FinishReason, RequestMetrics, Resume
from octavo.scheduler.events import Finished, Resumed

from .support import Harness, make_request


def resume_of(harness: Harness, name: str) -> Resume:
    """Where the request stands by what the scheduler has told."""
    ends = {end.branch: end.reason for end in harness.ends[name]}
    count = harness.requests[name].params.num_branches
    branches = tuple(
        BranchSoFar(
            token_ids=np.array(harness.tokens[name, branch], np.int32), finish_reason=ends.get(branch)
        )
        for branch in range(count)
    )
    return Resume(branches=branches if any(len(branch.token_ids) for branch in branches) else ())


def move(old: Harness, new: Harness) -> None:
    """The worker of `old` is lost; what has not ended goes on in `new`."""
    for name in old.scheduler.unfinished():
        new.requests[name] = old.requests[name]
        new.limits[name] = old.limits[name]
        for branch in range(old.requests[name].params.num_branches):
            new.tokens[name, branch] = list(old.tokens[name, branch])
        new.ends[name] = list(old.ends[name])
        new.take(new.scheduler.add(old.requests[name], new.now, resume_of(old, name)))
        new.scheduler.check_integrity()


def lives(seed: int, count: int):
    rng = random.Random(seed)
    shared = [rng.randrange(1000) for _ in range(40)]
    for number in range(count):
        prompt = shared[: rng.choice((0, 20, 40))] + [rng.randrange(1000) for _ in range(rng.randint(1, 30))]
        beams = {"beam_width": 3, "n": 2, "temperature": 0.0} if number % 7 == 3 else {}
        params = {"n": rng.choice((1, 1, 2, 4)), **beams}
        if not beams and number % 5 == 4:
            params["best_of"] = params["n"] + 2
        yield make_request(
            f"r{number}",
            prompt,
            seed=number,
            eos=tuple(range(0, 1000, 37)) if number % 2 else (),
            max_tokens=rng.randint(1, 40),
            **params,
        )


@pytest.mark.parametrize("seed", range(12))
def test_whatever_the_step_it_is_lost_in_nothing_is_lost_doubled_or_changed(seed):
    """Under pressure too: the second pool is small, and parks what it took over."""
    rng = random.Random(seed)
    first = Harness(num_blocks=100, budget=64)
    for request in lives(seed, 10):
        first.add(request)
    for _ in range(rng.randint(0, 60)):
        first.step()
    second = Harness(num_blocks=30, budget=48)
    move(first, second)
    for _ in range(rng.randint(0, 60)):
        second.step()
    third = Harness(num_blocks=60, budget=32)
    move(second, third)
    third.run()
    second.requests = {name: value for name, value in second.requests.items() if name not in third.requests}


def test_branches_of_different_lengths_go_on_and_the_ended_one_does_not():
    request = make_request("a", range(20), seed=3, n=3, max_tokens=30)
    first = Harness(num_blocks=64)
    first.add(request)
    for _ in range(9):
        first.step()
    first.stop("a", 1)
    second = Harness(num_blocks=64)
    move(first, second)
    second.run()
    reasons = {end.branch: end.reason for end in second.ends["a"]}
    assert reasons == {0: FinishReason.LENGTH, 1: FinishReason.STOP, 2: FinishReason.LENGTH}
    assert second.count(Finished) == 2
    assert second.count(Resumed) == 1


def test_what_has_waited_elsewhere_goes_before_what_is_new_and_is_not_refused_for_load():
    harness = Harness(num_blocks=64, max_num_seqs=1, budget=64, max_waiting=2)
    for name in ("new 1", "new 2"):
        harness.add(make_request(name, range(8), max_tokens=2))
    with pytest.raises(OverloadedError):
        harness.add(make_request("new 3", range(8), max_tokens=2))
    for name in ("old 1", "old 2"):
        request = make_request(name, range(9), max_tokens=2)
        harness.requests[name], harness.limits[name] = request, 2
        harness.take(harness.scheduler.add(request, 0.0, Resume()))
    harness.run()
    order = [event.request_id for event in harness.events if isinstance(event, Finished)]
    assert order == ["old 1", "old 2", "new 1", "new 2"]


def test_its_metrics_count_on():
    harness = Harness(num_blocks=64)
    harness.now = 100.0
    request = make_request("a", range(8), max_tokens=3)
    so_far = RequestMetrics(
        cached_tokens=5, num_preemptions=2, queue_seconds=1.0, ttft_seconds=4.0, total_seconds=10.0
    )
    resume = Resume(branches=(BranchSoFar(token_ids=np.array([7, 8], np.int32)),), metrics=so_far)
    events = harness.scheduler.add(request, harness.now, resume)
    while harness.plan() or harness.pending:
        harness.now += 1.0
        if harness.pending:
            events += harness.scheduler.commit(harness.worker.execute(harness.pending.pop(0)), harness.now)
    (end,) = [event for event in events if isinstance(event, Finished)]
    metrics = end.metrics
    assert (metrics.cached_tokens, metrics.num_preemptions) == (5, 2)
    assert (metrics.queue_seconds, metrics.ttft_seconds) == (1.0, 4.0)
    assert metrics.total_seconds == pytest.approx(end.time - 90.0)
    assert metrics.recomputed_tokens == 9


@pytest.mark.parametrize(
    ("params", "outputs"),
    [
        ({"n": 2}, [[1]]),
        ({"n": 2}, [[1], []]),
        ({}, [[1, 2, 3, 4]]),
        ({"beam_width": 2, "temperature": 0.0}, [[1], [2]]),
    ],
    ids=["a branch is missing", "a branch has nothing", "it would have ended", "beams"],
)
def test_what_no_request_can_stand_at_is_refused_and_changes_nothing(params, outputs):
    harness = Harness(num_blocks=64)
    resume = Resume(branches=tuple(BranchSoFar(token_ids=np.array(ids, np.int32)) for ids in outputs))
    with pytest.raises(InvalidRequestError) as refusal:
        harness.scheduler.add(make_request("a", range(8), max_tokens=4, **params), 0.0, resume)
    assert refusal.value.param == "resume"
    assert not harness.scheduler.has_work
    ended = BranchSoFar(token_ids=np.array([1], np.int32), finish_reason=FinishReason.STOP)
    with pytest.raises(InvalidRequestError, match="has ended"):
        harness.scheduler.add(make_request("a", range(8), max_tokens=4), 0.0, Resume(branches=(ended,)))
