"""Whole steps: the real rows, ledger, sampler and pool around a model that reads its context from the blocks."""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.protos.errors import RequestTooLargeError, UnavailableError
from octavo.protos.structured_output import StructuredOutput
from octavo.protos.types import MASKED_TOKEN
from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.events import PromptLogprobsOut, TokensOut
from octavo.scheduler.scheduler import Scheduler
from octavo.worker.sampler import NOT_FINITE

from .executor_support import (
    BLOCK,
    VOCAB,
    Steps,
    expected_tokens,
    make_executor,
    new,
    next_logits,
    request_of,
)

PROMPT = [5, 9, 11, 3, 7, 1, 8, 20, 33, 41]  # two full blocks and half of one


def blocks(row, first_index, ids):
    return [(row, first_index + i, block) for i, block in enumerate(ids)]


def decode(steps, row, context, count):
    """`count` tokens of one row whose blocks suffice, `context` tokens being known and one not computed."""
    return [steps(run=[(row, context - 1 + i, 1)])[0] for i in range(count)]


def test_what_the_rows_had_is_told_and_a_new_epoch_goes_on_in_it():
    executor, _ = make_executor()
    steps = Steps(executor)
    request = request_of(PROMPT)
    steps(
        new=[new(0, request), new(1, request_of([1, 2, 3]))],
        updates=blocks(0, 0, [7, 2, 30]),
        run=[(0, 0, 9)],
        sample=[],
    )
    (cached,) = executor.cached_prefixes()  # whole blocks that were computed; the other row has none
    assert cached.token_ids.tolist() == PROMPT[: 2 * BLOCK]
    assert cached.blocks.tolist() == [7, 2]
    executor.reset()
    assert executor.cached_prefixes() == []
    steps = Steps(executor, epoch=2)
    start = 2 * BLOCK
    first = steps(new=[new(0, request, computed=start)], updates=blocks(0, 0, [7, 2, 5]), run=[(0, start, 2)])
    assert first == expected_tokens(request, 0, 1)


def test_chunks_then_decode():
    executor, runner = make_executor()
    steps = Steps(executor)
    request = request_of(PROMPT)
    assert steps(new=[new(0, request)], updates=blocks(0, 0, [7]), run=[(0, 0, 3)], sample=[]) == []
    assert runner.batch.logit_rows.tolist() == []
    assert steps(updates=blocks(0, 1, [2]), run=[(0, 3, 4)], sample=[]) == []
    first = steps(updates=blocks(0, 2, [30, 31]), run=[(0, 7, 3)])
    rest = decode(steps, 0, len(PROMPT) + 1, 5)
    assert first + rest == expected_tokens(request, 0, 30)[:6]
    assert runner.batch.logit_rows.tolist() == [0]
    steps(released=[0])
    assert executor.num_rows_in_use == 0


def test_d10_rows_do_not_see_each_other():
    executor, _ = make_executor()
    steps = Steps(executor)
    requests = [request_of(PROMPT[: 3 + k], seed=k, temperature=0.9 * (k % 2)) for k in range(4)]
    got = {k: [] for k in range(4)}
    lengths = [len(request.prompt_token_ids) for request in requests]
    tokens = steps(
        new=[new(k, request) for k, request in enumerate(requests)],
        updates=[update for k in range(4) for update in blocks(k, 0, range(8 * k, 8 * k + 4))],
        run=[(k, 0, lengths[k]) for k in (2, 0, 3, 1)],
    )
    for k, token in zip((2, 0, 3, 1), tokens, strict=True):
        got[k].append(token)
    for step in range(6):
        order = [(step + k) % 4 for k in range(4)]
        tokens = steps(run=[(k, lengths[k] + step, 1) for k in order])
        for k, token in zip(order, tokens, strict=True):
            got[k].append(token)
    assert got == {k: expected_tokens(request, 0, 30)[:7] for k, request in enumerate(requests)}


def test_a_chunk_and_a_decode_share_a_step():
    executor, runner = make_executor()
    steps = Steps(executor)
    first, second = request_of(PROMPT[:4]), request_of(PROMPT)
    got = steps(new=[new(0, first)], updates=blocks(0, 0, [0, 1]), run=[(0, 0, 4)])
    got += steps(
        new=[new(5, second)], updates=blocks(5, 0, [9, 8]), run=[(0, 4, 1), (5, 0, 8)], sample=[(0, 0)]
    )
    assert runner.batch.logit_rows.tolist() == [0]
    both = steps(updates=blocks(5, 2, [10]), run=[(0, 5, 1), (5, 8, 2)])
    assert got + both[:1] == expected_tokens(first, 0, 30)[:3]
    assert both[1:] == expected_tokens(second, 0, 30)[:1]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_d09_forks_sample_the_same_logits_and_part_by_copy_on_write(temperature):
    executor, runner = make_executor()
    steps = Steps(executor)
    request = request_of(PROMPT, n=4, temperature=temperature, seed=1)
    first = steps(
        new=[new(0, request)],
        updates=blocks(0, 0, [0, 1, 2]),
        forks=[(0, 1, 1), (0, 2, 2), (0, 3, 3)],
        run=[(0, 0, 10)],
        sample=[(0, 0), (1, 0), (2, 0), (3, 0)],
    )
    assert len(runner.batch.logit_rows) == 1
    got = {row: [token] for row, token in enumerate(first)}
    # The last block, half full, is copied by all but one, who writes to it in the same step.
    tokens = steps(
        updates=[(1, 2, 11), (2, 2, 12), (3, 2, 13)],
        copies=[(2, 11), (2, 12), (2, 13)],
        run=[(row, 10, 1) for row in range(4)],
    )
    for row, token in enumerate(tokens):
        got[row].append(token)
    for row, token in enumerate(steps(run=[(row, 11, 1) for row in range(4)])):
        got[row].append(token)
    tokens = steps(updates=[(row, 3, 20 + row) for row in range(4)], run=[(row, 12, 1) for row in range(4)])
    for row, token in enumerate(tokens):
        got[row].append(token)
    assert got == {row: expected_tokens(request, row, 30)[:4] for row in range(4)}
    if temperature:
        assert len({tuple(tokens) for tokens in got.values()}) > 1


def test_forked_penalties_are_counted_apart():
    executor, _ = make_executor()
    steps = Steps(executor)
    request = request_of(
        PROMPT[:4], n=2, temperature=1.0, frequency_penalty=2.0, repetition_penalty=1.3, seed=3
    )
    got = [
        steps(
            new=[new(0, request)],
            updates=blocks(0, 0, [0, 1, 2]),
            forks=[(0, 1, 1)],
            run=[(0, 0, 4)],
            sample=[(0, 0), (1, 0)],
        )
    ]
    got.append(steps(updates=[(1, 1, 5), (1, 2, 6)], run=[(0, 4, 1), (1, 4, 1)]))
    got += [steps(run=[(0, 5 + i, 1), (1, 5 + i, 1)]) for i in range(6)]
    assert [list(tokens) for tokens in zip(*got, strict=True)] == [
        expected_tokens(request, branch, 30)[:8] for branch in range(2)
    ]


def test_d01_return_after_recompute_goes_on_where_it_was():
    executor, _ = make_executor()
    steps = Steps(executor)
    request = request_of(PROMPT, temperature=0.8, seed=9, presence_penalty=1.0, logit_bias={4: 2.0})
    got = steps(new=[new(0, request)], updates=blocks(0, 0, [0, 1, 2, 3]), run=[(0, 0, 10)])
    got += decode(steps, 0, 11, 4)
    # Parked: another request takes row and blocks for a while.
    other = request_of(PROMPT[:6])
    assert (
        steps(released=[0], new=[new(0, other)], updates=blocks(0, 0, [3, 1]), run=[(0, 0, 6)])
        == expected_tokens(other, 0, 30)[:1]
    )
    steps(
        released=[0],
        new=[new(6, request, outputs=got)],
        updates=blocks(6, 0, [1, 4, 0, 9]),
        run=[(6, 0, 7)],
        sample=[],
    )
    got += steps(run=[(6, 7, 8)])
    got += decode(steps, 6, 16, 1)
    assert got == expected_tokens(request, 0, 30)[:7]


def test_d03_a_prefix_hit_starts_behind_shared_blocks():
    executor, runner = make_executor()
    steps = Steps(executor)
    one, two = request_of(PROMPT), request_of([*PROMPT[:8], 50, 51])
    got = steps(new=[new(0, one)], updates=blocks(0, 0, [0, 1, 2]), run=[(0, 0, 10)])
    both = steps(new=[new(1, two, computed=8)], updates=blocks(1, 0, [0, 1, 3]), run=[(0, 10, 1), (1, 8, 2)])
    assert len(runner.batch.input_ids) == 3
    assert got + both[:1] == expected_tokens(one, 0, 30)[:2]
    assert both[1:] == expected_tokens(two, 0, 30)[:1]
    # The first goes; the shared blocks live on with the second.
    assert steps(released=[0], run=[(1, 10, 1)]) == expected_tokens(two, 0, 30)[1:2]


def test_a_block_replaced_by_one_of_the_same_content():
    executor, _ = make_executor()
    steps = Steps(executor)
    one, two = request_of(PROMPT), request_of(PROMPT, seed=2)
    got = steps(
        new=[new(0, one), new(1, two)],
        updates=blocks(0, 0, [0, 1, 2]) + blocks(1, 0, [3, 4, 5]),
        run=[(0, 0, 10), (1, 0, 10)],
    )
    assert got[0] == got[1]
    got += steps(updates=[(1, 0, 0), (1, 1, 1)], run=[(1, 10, 1)])
    # The freed blocks belong to someone else at once.
    third = request_of([60, 61, 62, 63, 59])
    steps(new=[new(2, third)], updates=blocks(2, 0, [3, 4]), run=[(2, 0, 5)])
    got += steps(run=[(1, 11, 1)])
    assert got[1:] == expected_tokens(two, 0, 30)[:3]


@pytest.mark.parametrize("ending", ["length", "stop"])
def test_rows_that_ended_are_masked_in_plans_sent_ahead(ending):
    executor, runner = make_executor()
    steps = Steps(executor)
    tokens = expected_tokens(request_of(PROMPT[:4]), 0, 30)
    options = {"max_tokens": 3} if ending == "length" else {"stop_token_ids": (tokens[2],)}
    short, long = request_of(PROMPT[:4], **options), request_of(PROMPT[:4], seed=5)
    got = [
        steps(
            new=[new(0, short), new(1, long)],
            updates=blocks(0, 0, [0, 1]) + blocks(1, 0, [2, 3]),
            run=[(0, 0, 4), (1, 0, 4)],
        )
    ]
    got += [steps(run=[(0, 4 + i, 1), (1, 4 + i, 1)]) for i in range(4)]
    assert [pair[0] for pair in got] == [*tokens[:3], MASKED_TOKEN, MASKED_TOKEN]
    assert [pair[1] for pair in got] == tokens[:5]
    assert len(runner.batch.input_ids) == 1
    # All that is left is masked: no forward pass at all. Growing its table is still booked.
    forwards = runner.num_forwards
    assert steps(updates=[(0, 2, 9)], run=[(0, 8, 1)]) == [MASKED_TOKEN]
    assert runner.num_forwards == forwards
    assert steps(released=[0], run=[(1, 8, 1)], updates=[(1, 2, 9)]) == tokens[5:6]


def test_a_fork_of_a_row_that_ended_is_masked_too():
    executor, _ = make_executor()
    steps = Steps(executor)
    request = request_of(PROMPT[:4], max_tokens=1)
    steps(new=[new(0, request)], updates=blocks(0, 0, [0, 1]), run=[(0, 0, 4)])
    assert steps(forks=[(0, 1, 1)], run=[(0, 4, 1)], sample=[(0, 0), (1, 0)]) == [MASKED_TOKEN] * 2
    assert steps(run=[(1, 5, 1)]) == [MASKED_TOKEN]
    steps(released=[0, 1])


def test_min_tokens_and_eos():
    executor, _ = make_executor()
    steps = Steps(executor)
    bias = {2: 100.0}
    plain, patient = (
        request_of(PROMPT[:4], eos=True, logit_bias=bias),
        request_of(PROMPT[:4], eos=True, logit_bias=bias, min_tokens=3),
    )
    got = [
        steps(
            new=[new(0, plain), new(1, patient)],
            updates=blocks(0, 0, [0, 1, 4]) + blocks(1, 0, [2, 3, 5]),
            run=[(0, 0, 4), (1, 0, 4)],
        )
    ]
    got += [steps(run=[(0, 4 + i, 1), (1, 4 + i, 1)]) for i in range(4)]
    assert [pair[0] for pair in got] == [2] + [MASKED_TOKEN] * 4
    assert [pair[1] for pair in got] == [*expected_tokens(patient, 0, 30), MASKED_TOKEN]
    assert len(expected_tokens(patient, 0, 30)) == 4


def test_one_row_with_bad_logits_fails_alone():
    executor, runner = make_executor()
    steps = Steps(executor)
    bad, good = request_of(PROMPT, n=2), request_of(PROMPT[:6], logprobs=1)
    runner.poison[10] = math.nan
    plan = steps.plan(
        new=[new(0, good), new(1, bad)],
        updates=blocks(0, 0, [0, 1]) + blocks(1, 0, [2, 3, 4]),
        forks=[(1, 2, 1)],
        run=[(0, 0, 6), (1, 0, 10)],
        sample=[(1, 1), (0, 0), (2, 1)],
    )
    result = steps.run_plan(plan)
    expected = expected_tokens(good, 0, 30)
    assert result.token_ids.tolist() == [MASKED_TOKEN, expected[0], MASKED_TOKEN]
    assert result.row_errors == ((0, NOT_FINITE), (2, NOT_FINITE))
    assert [entry is None for entry in result.logprobs] == [True, False, True]
    result = steps.run_plan(steps.plan(run=[(1, 10, 1), (0, 6, 1), (2, 10, 1)]))
    assert result.token_ids.tolist() == [MASKED_TOKEN, expected[1], MASKED_TOKEN]
    assert result.row_errors == ()
    assert [entry is None for entry in result.logprobs] == [True, False, True]
    assert steps(released=[1, 2], run=[(0, 7, 1)]) == expected[2:3]


def test_an_empty_plan_and_a_plan_of_releases_only():
    executor, runner = make_executor()
    steps = Steps(executor)
    assert steps() == []
    steps(new=[new(3, request_of(PROMPT))], updates=blocks(3, 0, [0]), run=[(3, 0, 4)], sample=[])
    assert steps(released=[3]) == []
    assert executor.num_rows_in_use == 0
    assert runner.num_forwards == 1


def test_timings_add_up():
    executor, _ = make_executor()
    steps = Steps(executor)
    result = steps.run_plan(
        steps.plan(new=[new(0, request_of(PROMPT))], updates=blocks(0, 0, [0, 1, 2]), run=[(0, 0, 10)])
    )
    assert set(result.parts_seconds) == {"prepare", "forward", "sample"}
    assert sum(result.parts_seconds.values()) == pytest.approx(result.step_seconds)
    assert min(result.parts_seconds.values()) > 0


def test_a_failed_forward_breaks_the_worker_for_good():
    executor, runner = make_executor()
    steps = Steps(executor)

    def fail(batch):
        raise RuntimeError("device lost")

    runner.forward = fail
    with pytest.raises(RuntimeError, match="device lost"):
        steps(new=[new(0, request_of(PROMPT))], updates=blocks(0, 0, [0, 1, 2]), run=[(0, 0, 10)])
    with pytest.raises(UnavailableError, match="device lost"):
        steps(released=[0])


def test_d01_return_after_swap_goes_on_where_it_was():
    """Out, overwritten by others, and in elsewhere: nothing is computed twice and nothing is lost."""
    executor, runner = make_executor()
    steps = Steps(executor)
    request = request_of(PROMPT, temperature=0.8, seed=9, presence_penalty=1.0, logit_bias={4: 2.0})
    got = steps(new=[new(0, request)], updates=blocks(0, 0, [0, 1, 2, 3]), run=[(0, 0, 10)])
    got += decode(steps, 0, 11, 3)
    # Row and blocks go to another request in the very plan that parks the first.
    other = request_of(PROMPT[::-1])
    result = steps.run_plan(
        steps.plan(
            released=[0],
            swaps_out=[(0, 9), (1, 3), (2, 4), (3, 0)],
            new=[new(0, other)],
            updates=blocks(0, 0, [3, 2, 1, 0]),
            run=[(0, 0, 10)],
        )
    )
    assert result.token_ids.tolist() == expected_tokens(other, 0, 30)[:1]
    assert sum(result.parts_seconds.values()) == pytest.approx(result.step_seconds)
    assert "swap" in result.parts_seconds
    assert decode(steps, 0, 11, 3) == expected_tokens(other, 0, 30)[1:4]
    # Back beside the other, and another one leaves in the same plan through the block that it frees.
    back = steps(
        released=[0],
        swaps_out=[(3, 5), (2, 6), (1, 7), (0, 8)],
        swaps_in=[(9, 20), (3, 2), (4, 31), (0, 7)],
        new=[new(6, request, outputs=got, computed=13)],
        updates=blocks(6, 0, [20, 2, 31, 7]),
        run=[(6, 13, 1)],
    )
    assert len(runner.batch.input_ids) == 1
    got += back
    assert got == expected_tokens(request, 0, 30)[:5]
    outputs = expected_tokens(other, 0, 30)
    assert (
        steps(
            swaps_in=[(5, 0), (6, 1), (7, 3), (8, 4)],
            new=[new(1, other, outputs=outputs[:4], computed=13)],
            updates=blocks(1, 0, [0, 1, 3, 4]),
            run=[(1, 13, 1)],
        )
        == outputs[4:5]
    )


def test_d09_branches_return_sharing_what_they_shared():
    """One host block a shared block; the shared last one is copied in the plan that brings it back."""
    executor, _ = make_executor()
    steps = Steps(executor)
    request = request_of(PROMPT, n=2, temperature=0.9, seed=1)
    first = steps(
        new=[new(0, request)],
        updates=blocks(0, 0, [0, 1, 2]),
        forks=[(0, 1, 1)],
        run=[(0, 0, 10)],
        sample=[(0, 0), (1, 0)],
    )
    filler = request_of(PROMPT[::-1])
    steps(
        released=[0, 1],
        swaps_out=[(0, 0), (1, 1), (2, 2)],
        new=[new(5, filler)],
        updates=blocks(5, 0, [2, 1, 0]),
        run=[(5, 0, 10)],
    )
    second = steps(
        swaps_in=[(0, 10), (1, 11), (2, 12)],
        new=[new(k, request, branch=k, outputs=[first[k]], computed=10) for k in range(2)],
        updates=[*blocks(0, 0, [10, 11, 12]), *blocks(1, 0, [10, 11, 12]), (1, 2, 13)],
        copies=[(12, 13)],
        run=[(0, 10, 1), (1, 10, 1)],
    )
    assert [list(pair) for pair in zip(first, second, strict=True)] == [
        expected_tokens(request, branch, 30)[:2] for branch in range(2)
    ]


@pytest.mark.parametrize("preemption", ["recompute", "swap", "auto"])
@settings(max_examples=25, deadline=None, derandomize=True)
@given(data=st.data())
def test_d01_scheduler_and_executor_together_under_pressure(preemption, data):
    """The real planner, two plans ahead, in a pool too small: every branch gets the tokens of its solo run."""
    num_blocks = data.draw(st.integers(9, 20), label="num_blocks")
    budget = data.draw(st.sampled_from([6, 16, 64]), label="budget")
    num_host_blocks = data.draw(st.sampled_from([1, 6, 40]), label="num_host_blocks")
    executor, _ = make_executor(
        num_blocks=num_blocks,
        num_host_blocks=num_host_blocks,
        max_num_seqs=6,
        max_num_batched_tokens=budget,
        run_ahead=data.draw(st.booleans(), label="run_ahead"),
    )
    scheduler = Scheduler(
        SchedulerConfig(
            num_blocks=num_blocks,
            block_size=BLOCK,
            max_num_seqs=6,
            max_num_batched_tokens=budget,
            max_model_len=64,
            pipeline_depth=data.draw(st.sampled_from([1, 2]), label="depth"),
            prefix_cache=data.draw(st.booleans(), label="prefix_cache"),
            preemption=preemption,
            victims=data.draw(st.sampled_from(["least_lost", "youngest"]), label="victims"),
            num_host_blocks=num_host_blocks,
            kv_bytes_per_block=executor.info.kv_bytes_per_block,
            # A step of the fake model takes about a millisecond: some prices come out either way.
            host_link_bytes_per_second=data.draw(st.sampled_from([1e4, 1e5, 1e9]), label="bandwidth"),
        )
    )
    ids = st.integers(0, VOCAB - 1)
    shared = data.draw(st.lists(ids, min_size=9, max_size=9))
    requests = {}
    for number in range(data.draw(st.integers(2, 6), label="requests")):
        held = data.draw(st.booleans())
        request = request_of(
            shared[: data.draw(st.integers(1, 9))] + data.draw(st.lists(ids, max_size=4)),
            seed=number,
            eos=held or data.draw(st.booleans()),
            n=data.draw(st.sampled_from([1, 1, 2, 3])),
            temperature=data.draw(st.sampled_from([0.0, 0.9])),
            max_tokens=data.draw(st.integers(1, 20)),
            frequency_penalty=data.draw(st.sampled_from([0.0, 0.5])),
            top_p=data.draw(st.sampled_from([1.0, 0.8])),
            logprobs=data.draw(st.sampled_from([None, 1])),
            prompt_logprobs=data.draw(st.sampled_from([None, None, 2])),
            structured_output=StructuredOutput.json_object() if held else None,
        )
        requests[f"r{number}"] = type(request)(
            **{
                **{name: getattr(request, name) for name in request.__dataclass_fields__},
                "request_id": f"r{number}",
            }
        )
    outputs, prompts = defaultdict(list), defaultdict(list)
    waiting, sent = list(requests.values()), []
    for now in range(2000):
        if waiting and (now % 2 == 0 or not scheduler.has_work):
            request = waiting.pop()
            try:
                scheduler.add(request, float(now))
            except RequestTooLargeError:
                del requests[request.request_id]
        while (plan := scheduler.plan(float(now))) is not None:
            sent.append(plan)
        if not sent:
            if not waiting and not scheduler.has_work:
                break
            continue
        plan, *sent = sent
        result = executor.execute(plan, sent[0] if sent else None)
        executor.check_integrity()
        for event in scheduler.commit(result, float(now)):
            if isinstance(event, TokensOut):
                tokens = outputs[event.request_id, event.branch]
                assert event.offset == len(tokens)
                tokens.extend(event.token_ids)
                asked = requests[event.request_id].params.prompt_logprobs is not None
                assert len(prompts[event.request_id]) == asked * (
                    requests[event.request_id].num_prompt_tokens - 1
                )
            elif isinstance(event, PromptLogprobsOut):
                assert event.logprobs.start == len(prompts[event.request_id]) + 1
                prompts[event.request_id] += event.logprobs.entries
    for name, found in prompts.items():
        prompt = requests[name].prompt_token_ids.tolist()
        for place, entry in enumerate(found, 1):
            row = next_logits(prompt[:place]).astype(np.float64)
            logprobs = row - row.max() - np.log(np.exp(row - row.max()).sum())
            assert entry.logprob == pytest.approx(logprobs[prompt[place]])
            assert entry.top_logprobs == pytest.approx(np.sort(logprobs)[:-3:-1])
    assert outputs == {
        (name, branch): expected_tokens(request, branch, request.params.max_tokens)
        for name, request in requests.items()
        for branch in range(request.params.n)
    }
    scheduler.check_integrity()
    assert scheduler.snapshot()["host_blocks_used"] == 0
    assert executor.num_rows_in_use == 0
    assert not np.any(executor._input_batch.ledger.num_holders)
