"""Beam search in the scheduler: the plain search's answer, whatever happens on the way, and blocks shared."""

from __future__ import annotations

import itertools

import pytest

from octavo.protos.errors import InvalidRequestError, RequestTooLargeError
from octavo.protos.types import FinishReason, SamplingParams
from octavo.scheduler.events import Preempted, PreemptionKind

from .support import Harness, make_request

EOS = tuple(range(0, 1000, 9))


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0, -1.0])
@pytest.mark.parametrize("depth", [1, 2])
def test_equals_the_plain_search(early_stopping, length_penalty, depth):
    h = Harness(num_blocks=200, depth=depth)
    for number, eos in enumerate([(), EOS, EOS[::7]]):
        h.add(
            make_request(
                f"r{number}",
                range(10 + number, 50),
                n=2,
                beam_width=4,
                max_tokens=24,
                min_tokens=3,
                eos=eos,
                early_stopping=early_stopping,
                length_penalty=length_penalty,
            )
        )
    h.run()
    assert all(end.reason is FinishReason.LENGTH for end in h.ends["r0"])


@pytest.mark.parametrize("width", [1, 2, 7])
@pytest.mark.parametrize("chunk", [8, 512])
def test_widths_beside_plain_requests_in_chunks(width, chunk):
    h = Harness(num_blocks=100, budget=chunk, block_size=8)
    h.add(make_request("plain", range(60), max_tokens=30))
    h.add(make_request("beams", range(61), beam_width=width, max_tokens=20, eos=EOS))
    h.add(make_request("many", range(40), n=3, max_tokens=10))
    h.run()


def test_planned_every_second_step_and_holds_nobody_up():
    h = Harness(num_blocks=100)
    h.add(make_request("plain", range(20), max_tokens=30))
    h.add(make_request("beams", range(20, 40), beam_width=3, max_tokens=12))
    h.run()
    with_beams = [len(plan.beam_moves) > 0 for plan in h.plans]
    assert sum(with_beams) == 11, "one step a token after the first"
    assert not any(a and b for a, b in itertools.pairwise(with_beams))
    assert len(h.plans) <= 2 + 30 + 1, "the plain request ran in every step"


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_parked_as_a_unit_and_back(preemption, prefix_cache):
    h = Harness(
        num_blocks=15,
        block_size=8,
        num_host_blocks=64,
        kv_bytes_per_block=1,
        host_link_bytes_per_second=1.0,
        preemption=preemption,
        prefix_cache=prefix_cache,
    )
    h.scheduler._life.reserve._min = h.scheduler._life.reserve.horizon = 0
    h.add(make_request("old", range(30), max_tokens=60))
    h.add(make_request("beams", range(100, 120), beam_width=3, max_tokens=28))
    h.run()
    parked = [event for event in h.events if isinstance(event, Preempted)]
    assert {event.request_id for event in parked} == {"beams"}
    assert {event.kind for event in parked} == {PreemptionKind(preemption)}


def test_shared_blocks_beat_separate_requests():
    """Beams of one prompt against as many requests without sharing: block-steps, the area under blocks used."""

    def block_steps(**params):
        h = Harness(num_blocks=400)
        count = params.pop("requests")
        for number in range(count):
            h.add(make_request(f"r{number}", range(200), cache=False, max_tokens=40, seed=number, **params))
        h.run()
        return h.scheduler.snapshot()["block_steps"]

    assert block_steps(requests=1, beam_width=4) <= 0.5 * block_steps(requests=4)


def test_abort_and_failed_row_end_a_search_once():
    h = Harness(num_blocks=100)
    h.add(make_request("aborted", range(20), n=2, beam_width=4, max_tokens=20))
    h.add(make_request("failed", range(30, 50), n=2, beam_width=4, max_tokens=20))
    for _ in range(6):
        h.step()
    h.take(h.scheduler.abort("aborted", h.now))
    assert [end.reason for end in h.ends["aborted"]] == [FinishReason.ABORT] * 2
    while not h.pending:
        h.plan()
    h.commit(frozenset({1}))
    h.run()
    assert [end.reason for end in h.ends["failed"]] == [FinishReason.ERROR] * 2


def test_too_wide_is_refused_with_the_name_of_the_field():
    h = Harness(num_blocks=20, max_num_seqs=3)
    with pytest.raises(RequestTooLargeError, match="beam_width is 4") as caught:
        h.add(make_request("a", range(4), max_tokens=1, beam_width=4))
    assert caught.value.param == "beam_width"
    for wrong in (
        {"beam_width": 2, "n": 3},
        {"beam_width": 0},
        {"beam_width": 2, "temperature": 0.7},
        {"beam_width": 2, "stop": ("x",)},
        {"beam_width": 2, "best_of": 2},
        {"length_penalty": 2.0},
        {"early_stopping": True},
        {"beam_width": 2, "early_stopping": "sometimes"},
    ):
        with pytest.raises(InvalidRequestError) as refused:
            SamplingParams(**wrong)
        assert refused.value.param in wrong
