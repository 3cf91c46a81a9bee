"""A step launched before the tokens of the one before it are known computes what it would have computed after it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.protos.errors import PlanRejectedError
from octavo.protos.structured_output import StructuredOutput
from octavo.protos.types import MASKED_TOKEN
from octavo.worker.sampler import Sampler
from octavo.worker.servicer import WorkerServicer, _Session

from .executor_support import EOS, expected_tokens, make_executor, make_plan, new, request_of

PROMPT = [5, 9, 4, 7, 5, 11]


class Device(Sampler):
    """Draws at once, as a device would, and notes when the host asks for what it drew."""

    def __init__(self):
        super().__init__()
        self.log = []

    def start(self, logits, batch, masks=None):
        pending = super().start(logits, batch, masks)
        self.log.append("start")
        device = self

        class Pending:
            tokens = pending.tokens

            def result(self):
                device.log.append("result")
                return pending.result()

        return Pending()


def run_all(executor, plans):
    """Each plan with the one behind it at hand, as on a stream with two in flight."""
    results = []
    for plan, following in zip(plans, [*plans[1:], None], strict=True):
        results.append(executor.execute(plan, following))
        executor.check_integrity()
    return results


def prompt_and_decodes(requests, count):
    """One plan of all prompts, then `count` of decodes, all blocks given at the start."""
    blocks = [(row, index, 6 * row + index) for row in range(len(requests)) for index in range(6)]
    lens = [len(request.prompt_token_ids) for request in requests]
    first = make_plan(
        1,
        new=[new(row, request) for row, request in enumerate(requests)],
        updates=blocks,
        run=[(row, 0, n) for row, n in enumerate(lens)],
    )
    return [first] + [
        make_plan(2 + step, run=[(row, n + step, 1) for row, n in enumerate(lens)]) for step in range(count)
    ]


def tokens_of(results, row):
    found = [int(result.token_ids[row]) for result in results]
    return [token for token in found if token != MASKED_TOKEN]


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    seeds=st.lists(st.integers(0, 2**32), min_size=1, max_size=4),
    temperature=st.sampled_from([0.0, 0.9]),
    eos=st.booleans(),
    ahead=st.booleans(),
)
def test_tokens_are_the_same(seeds, temperature, eos, ahead):
    executor, _ = make_executor(num_blocks=32, run_ahead=ahead)
    requests = [
        request_of([*PROMPT[: 3 + row], seed % 50 + 3], seed=seed, temperature=temperature, eos=eos)
        for row, seed in enumerate(seeds)
    ]
    results = run_all(executor, prompt_and_decodes(requests, 9))
    for row, request in enumerate(requests):
        assert tokens_of(results, row) == expected_tokens(request, 0, 30)[:10]


def test_the_host_asks_for_tokens_once_the_next_step_is_launched():
    device = Device()
    executor, runner = make_executor(sampler=device, run_ahead=True)
    run_all(executor, prompt_and_decodes([request_of(PROMPT)], 2))
    assert device.log == ["start", "start", "result", "start", "result", "result"]
    assert runner.num_forwards == 3


@pytest.mark.parametrize(
    "params",
    [
        {"logprobs": 2},
        {"presence_penalty": 1.0},
        {"structured_output": StructuredOutput.json_object(), "eos": True},
    ],
)
def test_what_the_host_must_see_first_waits(params):
    device = Device()
    executor, _ = make_executor(sampler=device, run_ahead=True)
    request = request_of(PROMPT, **params)
    results = run_all(executor, prompt_and_decodes([request], 2))
    assert device.log == ["start", "result"] * 3
    assert tokens_of(results, 0) == expected_tokens(request, 0, 30)[:3]


def test_rows_of_others_may_change_hands_meanwhile():
    device = Device()
    executor, _ = make_executor(sampler=device, run_ahead=True)
    stays, leaves, comes = request_of(PROMPT), request_of(PROMPT[:4]), request_of(PROMPT[::-1], n=2)
    plans = prompt_and_decodes([stays, leaves], 1)
    # The second one stops for a reason of its planner's; what it was to sample is then known.
    plans.append(make_plan(3, run=[(0, 7, 1)]))
    plans.append(
        make_plan(
            4,
            released=[1],
            new=[new(1, comes)],
            updates=[(1, 0, 20), (1, 1, 21)],
            forks=[(1, 2, 1)],
            run=[(0, 8, 1), (1, 0, 6)],
            sample=[(0, 0), (1, 1), (2, 1)],
        )
    )
    results = run_all(executor, plans)
    assert device.log == ["start"] + ["start", "result"] * 3 + ["result"]
    assert [int(result.token_ids[0]) for result in results] == expected_tokens(stays, 0, 30)[:4]
    assert results[3].token_ids[1:].tolist() == [expected_tokens(comes, branch, 30)[0] for branch in range(2)]


def test_rows_that_change_hands_wait():
    device = Device()
    executor, _ = make_executor(sampler=device, run_ahead=True)
    first, second = request_of(PROMPT), request_of(PROMPT[::-1])
    plans = prompt_and_decodes([first], 1)
    plans.append(
        make_plan(3, released=[0], new=[new(0, second)], updates=[(0, 0, 3), (0, 1, 2)], run=[(0, 0, 6)])
    )
    plans.append(make_plan(4, run=[(0, 6, 1)]))
    results = run_all(executor, plans)
    assert [int(result.token_ids[0]) for result in results] == [
        *expected_tokens(first, 0, 30)[:2],
        *expected_tokens(second, 0, 30)[:2],
    ]
    assert device.log == ["start", "start", "result", "result", "start", "start", "result", "result"]


def test_a_sequence_that_failed_runs_on_for_nothing_and_counts_for_nothing():
    executor, runner = make_executor(run_ahead=True)
    runner.poison[len(PROMPT) + 1] = np.nan
    requests = [request_of(PROMPT), request_of(PROMPT[:2])]
    results = run_all(executor, prompt_and_decodes(requests, 4))
    assert [len(result.row_errors) for result in results] == [0, 1, 0, 0, 0]
    assert tokens_of(results, 0) == expected_tokens(requests[0], 0, 30)[:1]
    assert tokens_of(results, 1) == expected_tokens(requests[1], 0, 30)[:5]


def request_of_two_tokens():
    """One whose second token ends it."""
    for seed in range(9999):
        request = request_of([7, seed % 60 + 3], seed=seed, temperature=1.5, eos=True)
        if expected_tokens(request, 0, 30)[1:] == [EOS]:
            return request
    raise AssertionError("none found")


def test_a_sequence_that_has_ended_runs_on_for_nothing_and_counts_for_nothing():
    request = request_of_two_tokens()
    executor, runner = make_executor(run_ahead=True)
    results = run_all(executor, prompt_and_decodes([request], 4))
    assert tokens_of(results, 0) == expected_tokens(request, 0, 30)
    # The third step ran for nothing, the fourth and fifth not at all.
    assert runner.num_forwards == 3


def test_a_plan_that_is_refused_is_refused_in_its_turn():
    executor, _ = make_executor(run_ahead=True)
    request = request_of(PROMPT)
    good, bad = prompt_and_decodes([request], 1)
    wrong = make_plan(2, run=[(0, 40, 1)])
    assert executor.execute(good, wrong).token_ids.tolist() == expected_tokens(request, 0, 30)[:1]
    with pytest.raises(PlanRejectedError):
        executor.execute(wrong, bad)
    assert executor.execute(bad).token_ids.tolist() == expected_tokens(request, 0, 30)[1:2]
    executor.check_integrity()


def test_times_of_steps_do_not_overlap():
    executor, _ = make_executor(run_ahead=True)
    plans = prompt_and_decodes([request_of(PROMPT)], 5)
    results = run_all(executor, plans)
    for result in results:
        assert sum(result.parts_seconds.values()) == pytest.approx(result.step_seconds)
        assert min(result.parts_seconds.values()) >= 0


def test_a_reset_forgets_what_was_launched_ahead():
    executor, _ = make_executor(run_ahead=True)
    request = request_of(PROMPT)
    plans = prompt_and_decodes([request], 1)
    executor.execute(*plans)
    executor.reset()
    again = [make_plan(1, epoch=2, new=[new(0, request)], updates=[(0, 0, 0), (0, 1, 1)], run=[(0, 0, 6)])]
    assert run_all(executor, again)[0].token_ids.tolist() == expected_tokens(request, 0, 30)[:1]


def test_the_servicer_hands_over_the_plan_that_waits():
    given = []

    class Executor:
        info = None
        runs_ahead = True

        def execute(self, plan, following=None):
            given.append((plan, following))

    servicer = WorkerServicer(Executor(), on_fatal=given.append)
    session = _Session(1)
    first, second = make_plan(1), make_plan(2)
    session.waiting.extend([first, second])
    servicer._run(session, first)
    servicer._run(session, second)
    Executor.runs_ahead = False
    session.waiting.extend([first, second])
    servicer._run(session, first)
    assert given == [(first, second), (second, None), (first, None)]
