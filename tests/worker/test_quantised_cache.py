"""A worker whose KV cache has a byte a number: what it computes, and that scales go wherever their blocks go."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octavo.worker.build import build_executor
from octavo.worker.config import WorkerConfig

from .executor_support import Steps, new, request_of

PROMPT = list(range(3, 24))
"""21 tokens, in blocks of 8: the last block is begun and filled by decodes."""


@pytest.fixture(params=["int8", "fp8"])
def make_worker(request, tiny_model_dir):
    threads = torch.get_num_threads()

    def make(kv_cache_dtype=request.param, family="llama"):
        config = WorkerConfig(
            worker_id="w",
            model=str(tiny_model_dir(family)),
            device="cpu",
            kv_cache_dtype=kv_cache_dtype,
            num_blocks=20,
            num_host_blocks=8,
            block_size=8,
            max_num_seqs=6,
            max_num_batched_tokens=64,
            max_model_len=100,
            num_threads=1,
        )
        return build_executor(config)

    yield make
    torch.set_num_threads(threads)


def blocks(row, start, ids):
    return [(row, start + index, block) for index, block in enumerate(ids)]


class Session:
    """Steps whose samples are kept by row, with log-probabilities, bit for bit."""

    def __init__(self, executor):
        self.steps = Steps(executor)
        self.found = {}

    def __call__(self, *, sample=None, **fields):
        result = self.steps.run_plan(self.steps.plan(sample=sample, **fields))
        rows = [row for row, _, _ in fields["run"]] if sample is None else [row for row, _ in sample]
        for row, token, logprobs in zip(rows, result.token_ids.tolist(), result.logprobs, strict=True):
            self.found.setdefault(row, []).append((token, logprobs.logprob, *logprobs.top_logprobs))

    def decode(self, starts, count):
        for step in range(count):
            self(run=[(row, start + step, 1) for row, start in starts.items()])


def start(executor, request):
    session = Session(executor)
    session(new=[new(0, request)], updates=blocks(0, 0, [0, 1, 2, 3]), run=[(0, 0, len(PROMPT))])
    session.decode({0: len(PROMPT)}, 4)
    return session


def test_blocks_away_in_other_hands_and_back_keep_their_scales(make_worker):
    request = request_of(PROMPT, logprobs=3)
    undisturbed = start(make_worker(), request)
    undisturbed.decode({0: len(PROMPT) + 4}, 5)
    session = start(make_worker(), request)
    tokens = [token for token, *_ in session.found[0]]
    session(
        released=[0],
        swaps_out=[(0, 5), (1, 3), (2, 4), (3, 0)],
        new=[new(0, request_of(PROMPT[::-1], logprobs=3))],
        updates=blocks(0, 0, [3, 2, 1, 0]),
        run=[(0, 0, len(PROMPT))],
    )
    session(
        swaps_in=[(5, 9), (3, 7), (4, 11), (0, 8)],
        new=[new(2, request, outputs=tokens, computed=len(PROMPT) + 4)],
        updates=blocks(2, 0, [9, 7, 11, 8]),
        run=[(2, len(PROMPT) + 4, 1)],
    )
    session.decode({2: len(PROMPT) + 5}, 4)
    assert session.found[2] == undisturbed.found[0][5:]


def test_a_block_begun_by_another_is_copied_with_its_scales(make_worker):
    request = request_of(PROMPT, logprobs=3)
    undisturbed = start(make_worker(), request)
    undisturbed.decode({0: len(PROMPT) + 4}, 5)
    session = start(make_worker(), request)
    # The next token of each branch goes to a block of its own; what stands before it was written by the first.
    tokens = [token for token, *_ in session.found[0]]
    session(
        new=[new(1, request, outputs=tokens, computed=len(PROMPT) + 4)],
        updates=blocks(1, 0, [0, 1, 2, 14]),
        copies=[(3, 14)],
        run=[(0, len(PROMPT) + 4, 1), (1, len(PROMPT) + 4, 1)],
    )
    session.decode({0: len(PROMPT) + 5, 1: len(PROMPT) + 5}, 4)
    assert session.found[0] == undisturbed.found[0]
    assert session.found[1] == undisturbed.found[0][5:]


def test_neighbours_change_nothing(make_worker):
    request = request_of(PROMPT, logprobs=3)
    alone = start(make_worker(), request)
    session = Session(make_worker())
    session(
        new=[new(4, request_of(PROMPT[:9], logprobs=3)), new(0, request)],
        updates=[*blocks(4, 0, [9, 8]), *blocks(0, 0, [0, 1, 2, 3])],
        run=[(4, 0, 9), (0, 0, len(PROMPT))],
    )
    session.decode({0: len(PROMPT), 4: 9}, 4)
    assert session.found[0] == alone.found[0]


FAMILIES = ["llama", "gemma2"]
"""Fused; the module graph, with windows and soft caps."""


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("make_worker", ["int8", "fp8", "auto"], indirect=True)
def test_blocks_are_shared_in_the_very_step_that_fills_them(make_worker, family):
    """Each layer writes the step's keys and values, new scales included, before anything attends to them."""
    request = request_of(PROMPT, logprobs=3)
    alone = start(make_worker(family=family), request)
    session = Session(make_worker(family=family))
    session(new=[new(0, request)], updates=blocks(0, 0, [4, 5]), run=[(0, 0, 11)], sample=[])
    # The second block is half written, of a quantised cache with the scale of that half.
    session(
        new=[new(1, request, computed=16)],
        updates=[*blocks(0, 2, [6, 7]), *blocks(1, 0, [4, 5, 9, 10])],
        run=[(1, 16, len(PROMPT) - 16), (0, 11, len(PROMPT) - 11)],
    )
    session.decode({0: len(PROMPT), 1: len(PROMPT)}, 4)
    for row in (0, 1):
        assert [entry[0] for entry in session.found[row]] == [entry[0] for entry in alone.found[0]]
        np.testing.assert_allclose(
            [entry[1] for entry in session.found[row]], [entry[1] for entry in alone.found[0]], atol=2e-2
        )
    np.testing.assert_allclose(np.array(session.found[0]), np.array(session.found[1]), atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_near_the_plain_caches(make_worker, family):
    request = request_of(PROMPT, logprobs=3)
    quantised = start(make_worker(family=family), request)
    plain = start(make_worker("auto", family), request)
    # Until the first token that differs, answers read the same context.
    same = next(
        (i for i, (a, b) in enumerate(zip(quantised.found[0], plain.found[0], strict=True)) if a[0] != b[0]),
        5,
    )
    assert same >= 1
    found = np.array([entry[1] for entry in quantised.found[0][:same]])
    np.testing.assert_allclose(found, [entry[1] for entry in plain.found[0][:same]], atol=0.05)


def test_blocks_are_smaller_and_more(make_worker):
    quantised, plain = make_worker().info, make_worker("auto").info
    assert plain.kv_bytes_per_block == 3 * 2 * 2 * 8 * 16 * 4
    assert quantised.kv_bytes_per_block == 3 * 2 * (2 * 8 * 16 + 16)
