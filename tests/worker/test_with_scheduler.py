"""The real scheduler drives the real executor over a model that reads its context back: both keep one contract.

What the worker's own ledger would refuse, a model-free simulation cannot see; here every plan passes it.
"""

from __future__ import annotations

import dataclasses
import random
from collections import defaultdict

import numpy as np
import pytest

from octavo.protos.errors import InvalidRequestError, RequestTooLargeError
from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.events import ChunkPlanned, Finished, TokensOut
from octavo.scheduler.scheduler import Scheduler
from octavo.worker.build import build_executor
from octavo.worker.config import WorkerConfig

from ..scheduler.fake_worker import expected_beams
from .executor_support import BLOCK, VOCAB, expected_tokens, make_executor, next_logits, request_of

MAX_TOKENS = 14


def logprobs_of(context):
    logits = next_logits(context).astype(np.float64)
    found = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
    return [(float(found[token]), token) for token in np.argsort(-found, kind="stable").tolist()]


@pytest.mark.parametrize("seed", range(12))
def test_every_plan_passes_and_no_token_changes(seed):
    rng = random.Random(seed)
    num_blocks, num_host_blocks = rng.choice([(24, 16), (30, 5), (24, 0)])
    executor, _ = make_executor(num_blocks=num_blocks, num_host_blocks=num_host_blocks)
    config = SchedulerConfig(
        num_blocks=num_blocks,
        block_size=BLOCK,
        max_num_seqs=8,
        max_num_batched_tokens=rng.choice([8, 24, 64]),
        max_model_len=64,
        pipeline_depth=1,
        num_host_blocks=num_host_blocks,
        kv_bytes_per_block=1,
        host_link_bytes_per_second=1.0 if num_host_blocks else 0.0,
        preemption=rng.choice(["auto", "recompute", *(["swap"] * bool(num_host_blocks))]),
    )
    scheduler = Scheduler(config)
    scheduler._life.reserve._min = scheduler._life.reserve.horizon = 0
    stems = [[rng.randrange(3, VOCAB) for _ in range(20)] for _ in range(2)]
    requests, tokens, ends = {}, defaultdict(list), defaultdict(list)

    def take(events):
        for event in events:
            if isinstance(event, TokensOut):
                tokens[event.request_id, event.branch] += event.token_ids
            elif isinstance(event, Finished):
                ends[event.request_id].append(event)

    def add(number):
        kind = rng.choice(["plain", "plain", "sampled", "branches", "beams", "fork"])
        prompt = rng.choice(stems)[: rng.randint(1, 20)] + [rng.randrange(3, VOCAB)] * rng.randint(0, 3)
        options = {
            "plain": {},
            "fork": {},
            "sampled": {"temperature": 0.9},
            "branches": {"temperature": 0.9, "n": 3},
            "beams": {"beam_width": 3, "n": 2},
        }[kind]
        parent = ""
        if kind == "fork" and requests:
            parent = rng.choice(list(requests))
            try:
                prompt = scheduler.tokens_of(parent, 0)[1].tolist()
            except InvalidRequestError:
                parent = ""
        request = request_of(prompt, seed=rng.randrange(9), eos=True, max_tokens=MAX_TOKENS, **options)
        request = dataclasses.replace(request, request_id=f"r{number}", fork_of=parent)
        try:
            take(scheduler.add(request, 0.0))
        except RequestTooLargeError:
            return
        requests[request.request_id] = request

    left = 16
    for step in range(2000):
        if left and rng.random() < 0.4:
            left -= 1
            add(left)
        elif rng.random() < 0.02 and requests:
            take(scheduler.abort(rng.choice(list(requests)), 0.0))
        plan = scheduler.plan(float(step))
        if plan is not None:
            take(scheduler.commit(executor.execute(plan), float(step)))
        executor.check_integrity()
        scheduler.check_integrity()
        if not (left or scheduler.has_work):
            break
    assert not scheduler.has_work
    assert executor.num_rows_in_use == 0
    for name, request in requests.items():
        assert [end.request_finished for end in ends[name]].count(True) == 1
        if request.params.beam_width:
            if ends[name][0].score is None:
                continue
            want = expected_beams(request, MAX_TOKENS, logprobs_of)
            got = [tokens[name, end.branch] for end in ends[name]]
            assert got == [entry[0] for entry in want]
            assert [end.score for end in ends[name]] == pytest.approx([entry[1] for entry in want], abs=1e-6)
            continue
        for end in ends[name]:
            want = expected_tokens(request, end.branch, MAX_TOKENS)
            got = tokens[name, end.branch]
            assert got == (want[: len(got)] if end.reason.value == "abort" else want), name


def test_a_crowd_on_a_model_gets_the_tokens_that_nobody_shared(tiny_model_dir):
    """Prompts with one beginning, all at once among others: most start behind blocks that their own step fills."""
    executor = build_executor(
        WorkerConfig(
            worker_id="w",
            model=str(tiny_model_dir("llama")),
            device="cpu",
            num_blocks=120,
            block_size=8,
            max_num_seqs=16,
            max_num_batched_tokens=96,
            max_model_len=128,
            num_threads=1,
        )
    )
    rng = random.Random(3)
    stem = [rng.randrange(3, 128) for _ in range(50)]
    crowd = [
        request_of(
            stem[: rng.choice([50, 50, 33])] + [rng.randrange(3, 128) for _ in range(rng.randint(1, 12))],
            max_tokens=8,
            seed=number,
            **({"temperature": 0.9, "n": 2} if number % 4 == 3 else {}),
        )
        for number in range(12)
    ]

    def run(epoch, requests, prefix_cache):
        scheduler = Scheduler(
            SchedulerConfig(
                num_blocks=120,
                block_size=8,
                max_num_seqs=16,
                max_num_batched_tokens=96,
                max_model_len=128,
                pipeline_depth=1,
                prefix_cache=prefix_cache,
                epoch=epoch,
            )
        )
        tokens, computed = defaultdict(list), 0
        for number, request in enumerate(requests):
            scheduler.add(dataclasses.replace(request, request_id=f"r{number}"), 0.0)
        while scheduler.has_work:
            plan = scheduler.plan(0.0)
            for event in scheduler.commit(executor.execute(plan), 0.0):
                if isinstance(event, TokensOut):
                    tokens[event.request_id, event.branch] += event.token_ids
                elif isinstance(event, ChunkPlanned):
                    computed += event.num_tokens
        executor.check_integrity()
        return tokens, computed

    alone, all_tokens = run(1, crowd, False)
    shared, few_tokens = run(2, crowd, True)
    assert shared == alone
    assert all_tokens == sum(request.num_prompt_tokens for request in crowd)
    assert few_tokens < all_tokens / 2
