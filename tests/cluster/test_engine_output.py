"""What the in-process engine gives of a request: streams over the fake worker, and outputs of deltas made by hand."""

from __future__ import annotations

import gc
import time

import numpy as np
import pytest

from octavo.cluster.detokenizer import BranchText
from octavo.cluster.engine_loop import EngineLoop
from octavo.cluster.engine_output import Collector, EngineStream
from octavo.cluster.forking import fork_context, params_of_fork
from octavo.cluster.tokenizer import Tokenizer
from octavo.protos.errors import InvalidRequestError, NotFoundError
from octavo.protos.types import FinishReason, OutputDelta, Request, SamplingParams, TokenLogprobs
from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.scheduler import Scheduler

from .support import FakeExecutor, expected, make_request, worker_info


@pytest.fixture(scope="module")
def tokenizer(default_model_dir):
    made = Tokenizer(default_model_dir)
    yield made
    made.close()


@pytest.fixture
def executor():
    return FakeExecutor(worker_info(num_blocks=64), step_seconds=0.001)


@pytest.fixture
def loop(executor):
    config = SchedulerConfig(num_blocks=64, max_num_seqs=64, max_num_batched_tokens=512, pipeline_depth=1)
    made = EngineLoop(Scheduler(config), executor)
    yield made
    made.close()


def tokens_of(stream, num_branches=1):
    found = [[] for _ in range(num_branches)]
    for delta in stream:
        found[delta.index] += delta.token_ids
    return found


def test_a_stream_gives_every_branch_and_ends(loop, tokenizer):
    request = make_request("a", n=3, max_tokens=20)
    stream = EngineStream(loop, tokenizer, request)
    assert (stream.request_id, stream.num_prompt_tokens, stream.forked_at) == ("a", 5, None)
    assert tokens_of(stream, 3) == [expected(request, branch) for branch in range(3)]
    assert next(stream, None) is None
    stream.close()


@pytest.mark.parametrize("how", ["close", "drop", "unread"])
def test_leaving_a_stream_aborts_its_request(loop, tokenizer, how):
    stream = EngineStream(loop, tokenizer, make_request("a", max_tokens=900))
    if how != "unread":
        next(stream)
    if how == "close":
        stream.close()
        assert next(stream, None) is None
    else:
        del stream
        gc.collect()
        deadline = time.monotonic() + 20
        while loop.snapshot()["running"] or loop.snapshot()["waiting"]:
            assert time.monotonic() < deadline
    assert loop.snapshot()["blocks_used"] == 0


def test_a_fork_goes_on_beside_its_parent(loop, tokenizer):
    request = make_request("parent", max_tokens=200, n=2)
    parent = EngineStream(loop, tokenizer, request)
    seen = [[], []]
    while len(seen[1]) < 5:
        delta = next(parent)
        seen[delta.index] += delta.token_ids
    found, token_ids = loop.parent_of("parent", 1)
    at = len(token_ids) - found.num_prompt_tokens
    assert token_ids.tolist() == [*request.prompt_token_ids, *expected(request, 1)[:at]]
    fork = make_request("fork", token_ids.tolist(), max_tokens=10)
    stream = EngineStream(loop, tokenizer, fork, forked_at=at)
    assert (stream.forked_at, stream.num_prompt_tokens) == (at, len(token_ids))
    assert tokens_of(stream) == [expected(fork)]
    for delta in parent:
        seen[delta.index] += delta.token_ids
    assert seen == [expected(request, 0), expected(request, 1)]
    with pytest.raises(NotFoundError) as caught:
        loop.parent_of("parent", 0)
    assert caught.value.param == "request_id"


def test_an_ended_branch_cannot_be_forked(loop, tokenizer):
    parent = EngineStream(loop, tokenizer, make_request("parent", max_tokens=400, n=2))
    next(parent)
    loop.stop_branch("parent", 0)
    for branch in (0, 2):
        with pytest.raises(InvalidRequestError) as caught:
            loop.parent_of("parent", branch)
        assert caught.value.param == "branch"
    parent.close()


def test_parameters_of_a_fork_are_what_its_parent_has_left():
    parent = SamplingParams(n=3, best_of=4, seed=5, temperature=0.5, max_tokens=20, min_tokens=12, stop="x")
    assert params_of_fork(parent, 7) == SamplingParams(temperature=0.5, max_tokens=13, min_tokens=5, stop="x")
    assert params_of_fork(SamplingParams(max_tokens=None), 7).max_tokens is None


def test_a_fork_inside_a_character_begins_with_its_end(tokenizer):
    ids = tokenizer.encode("a\U0001f9ceb")
    for at in range(len(ids) + 1):
        request = make_request("a", [5, *ids[:at]])
        before = BranchText(tokenizer, request.params).push(ids[:at])[0]
        text = BranchText(tokenizer, request.params, fork_context(request, at))
        assert before + text.push(ids[at:], finished=True)[0] == "a\U0001f9ceb"


class _Loop:
    """Takes note of what is stopped."""

    def __init__(self):
        self.stopped = []

    def stop_branch(self, request_id, branch):
        self.stopped.append((request_id, branch))


def delta(branch, token_ids, logprob=-1.0, *, reason=FinishReason.LENGTH, last=False, score=None):
    return OutputDelta(
        request_id="a",
        branch=branch,
        offset=0,
        token_ids=tuple(token_ids),
        logprobs=(TokenLogprobs(logprob),) * len(token_ids),
        finish_reason=reason,
        request_finished=last,
        score=score,
    )


def collect(tokenizer, params, deltas):
    done, loop = [], _Loop()
    request = Request(request_id="a", prompt_token_ids=np.array([5], np.int32), params=params, seed=0)
    collector = Collector(loop, tokenizer, request, None, done.append)
    for one in deltas:
        collector.take(one)
    assert done == [collector]
    return collector.output().outputs, loop.stopped


def test_the_best_of_many_come_first_without_logprobs_that_nobody_asked_for(tokenizer):
    deltas = [
        delta(0, [100], -1.0),
        delta(2, [102, 102, 102], -0.75),
        delta(3, [103], -2.0),
        delta(1, [101], -0.5, last=True),
    ]
    outputs, _ = collect(tokenizer, SamplingParams(n=2, best_of=4), deltas)
    assert [(output.index, output.token_ids[0]) for output in outputs] == [(0, 101), (1, 102)]
    assert all(output.logprobs is None and output.cumulative_logprob is None for output in outputs)
    outputs, _ = collect(tokenizer, SamplingParams(best_of=4, logprobs=0), deltas)
    assert [output.cumulative_logprob for output in outputs] == [-0.5]


def test_a_branch_is_ranked_by_what_its_stop_string_left(tokenizer):
    hello, world = 19556, 905
    half = delta(0, [hello, world], -0.25, reason=None)
    deltas = [half, delta(1, [hello], -0.5), delta(0, [hello], -9.0, last=True)]
    outputs, stopped = collect(tokenizer, SamplingParams(best_of=2, stop=" world"), deltas)
    assert [(output.text, output.finish_reason) for output in outputs] == [("Hello", "stop")]
    assert stopped == [("a", 0)]


def test_beams_keep_the_order_of_the_search(tokenizer):
    deltas = [delta(0, [100, 2], score=-0.5), delta(1, [101], score=-0.75, last=True)]
    outputs, _ = collect(tokenizer, SamplingParams(n=2, beam_width=3), deltas)
    assert [(output.token_ids[0], output.score) for output in outputs] == [(100, -0.5), (101, -0.75)]
