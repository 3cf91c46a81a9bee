"""Every plan that the worker must refuse, and that refusing leaves no trace."""

from __future__ import annotations

import copy
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.protos.errors import IntegrityError, PlanRejectedError
from octavo.protos.types import MASKED_TOKEN, finish_reason
from octavo.worker.input_batch import InputBatch

from .executor_support import (
    BLOCK,
    VOCAB,
    Steps,
    expected_tokens,
    make_executor,
    make_plan,
    new,
    request_of,
    with_arrays,
)

PROMPT = [5, 9, 11, 3, 7, 1, 8, 20, 33, 41]


def snapshot(batch: InputBatch) -> list:
    """All state that a plan may change; table entries beyond a table's length mean nothing."""
    progress = [getattr(batch.progress, field.name).tolist() for field in fields(batch.progress)]
    tables = [batch.ledger.table(row).tolist() for row in range(batch.limits.max_num_seqs)]
    tokens = [batch.tokens(row).tolist() for row in range(batch.limits.max_num_seqs)]
    ledger = [batch.ledger.num_holders.tolist(), batch.ledger.host_written.tolist()]
    others = [batch.epoch, batch.last_step_id, list(batch._requests), sorted(batch._rules)]
    arrays = [v.tolist() for k, v in vars(batch).items() if isinstance(v, np.ndarray) and k != "_tokens"]
    return copy.copy([progress, tables, tokens, ledger, others, arrays])


@pytest.fixture
def steps():
    """Row 0 decodes at 11 tokens, row 1 shares two blocks with it, row 2 is in mid-prefill, row 3 has ended.

    Host block 3 holds a copy of block 0.
    """
    executor, _ = make_executor()
    steps = Steps(executor)
    steps(
        new=[new(0, request_of(PROMPT)), new(3, request_of([4], max_tokens=1))],
        updates=[(0, 0, 0), (0, 1, 1), (0, 2, 2), (3, 0, 12)],
        run=[(0, 0, 10), (3, 0, 1)],
    )
    steps(
        swaps_out=[(0, 3)],
        new=[
            new(1, request_of([*PROMPT[:8], 4], frequency_penalty=1.0), computed=8),
            new(2, request_of(PROMPT)),
        ],
        updates=[(1, 0, 0), (1, 1, 1), (1, 2, 5), (2, 0, 7), (2, 1, 8)],
        run=[(1, 8, 1), (2, 0, 5)],
        sample=[(1, 0)],
    )
    return steps


@pytest.fixture
def batch(steps):
    return steps.executor._input_batch


WRONG = {
    "step again": (lambda s: make_plan(2), "step 2 of epoch 1 where step 3 was due"),
    "step skipped": (lambda s: make_plan(4), "step 4 of epoch 1 where step 3 was due"),
    "old epoch": (lambda s: make_plan(3, epoch=0), "epoch 0; epoch 1 has taken over"),
    "new epoch, late step": (lambda s: make_plan(3, epoch=2), "step 3 of epoch 2 where step 1 was due"),
    "release out of range": (lambda s: s.plan(released=[8]), "released_rows names row 8; there are 8"),
    "release below range": (lambda s: s.plan(released=[-1]), "released_rows names row -1"),
    "release twice": (lambda s: s.plan(released=[0, 0]), "released_rows names a row twice"),
    "release of a free row": (lambda s: s.plan(released=[4]), "row 4, which is not in use"),
    "new in a used row": (lambda s: s.plan(new=[new(0, request_of(PROMPT))]), "row 0: the row is in use"),
    "new twice": (lambda s: s.plan(new=[new(4, request_of(PROMPT))] * 2), "row 4: the row is in use"),
    "new out of range": (lambda s: s.plan(new=[new(8, request_of(PROMPT))]), "row 8: there are 8 rows"),
    "new of another prompt": (
        lambda s: s.plan(new=[replace(new(4, request_of(PROMPT)), token_ids=np.array([1, 2], np.int32))]),
        "do not begin with its prompt",
    ),
    "new with ids out of range": (
        lambda s: s.plan(new=[new(4, request_of([VOCAB]))]),
        r"a token id is outside \[0, 63\]",
    ),
    "new with an output out of range": (
        lambda s: s.plan(new=[new(4, request_of(PROMPT), outputs=[MASKED_TOKEN])]),
        "a token id is outside",
    ),
    "new too long": (
        lambda s: s.plan(new=[new(4, request_of(PROMPT, max_tokens=55))]),
        "prompt 10 plus max_tokens 55 exceed 64",
    ),
    "new that is done": (
        lambda s: s.plan(new=[new(4, request_of(PROMPT, max_tokens=1), outputs=[3])]),
        "has 1 outputs already",
    ),
    "new wholly computed": (
        lambda s: s.plan(new=[new(4, request_of(PROMPT), computed=10)]),
        "10 of its 10 tokens computed",
    ),
    "new with a missing prefix": (
        lambda s: s.plan(new=[new(4, request_of(PROMPT), computed=8)], updates=[(4, 0, 20)]),
        "starts with 8 computed tokens, but its table has 1 blocks",
    ),
    "new of a negative branch": (
        lambda s: s.plan(new=[new(4, request_of(PROMPT), branch=-1)]),
        "branch -1",
    ),
    "new with a bias out of the vocabulary": (
        lambda s: s.plan(new=[new(4, request_of(PROMPT, logit_bias={VOCAB: 1.0}))]),
        "logit_bias must be in",
    ),
    "update of no row": (lambda s: s.plan(updates=[(9, 0, 0)]), "block_updates names row 9"),
    "update of a free row": (lambda s: s.plan(updates=[(4, 0, 20)]), "row 4, which is not in use"),
    "update of a released row": (lambda s: s.plan(released=[0], updates=[(0, 3, 20)]), "row 0, which is not"),
    "update past the table": (lambda s: s.plan(updates=[(0, 16, 20)]), "at index 16; a table has 16 entries"),
    "update below the table": (lambda s: s.plan(updates=[(0, -1, 20)]), "at index -1"),
    "block out of range": (lambda s: s.plan(updates=[(0, 3, 32)]), "names block 32; the pool has 32"),
    "block below range": (lambda s: s.plan(updates=[(0, 3, -1)]), "names block -1"),
    "update with a gap": (
        lambda s: s.plan(updates=[(0, 4, 20)]),
        "row 0 at index 4 leaves a gap: the table has 3 entries",
    ),
    "new with a gap": (
        lambda s: s.plan(new=[new(4, request_of(PROMPT))], updates=[(4, 0, 20), (4, 2, 21)]),
        "row 4 at index 2 leaves a gap",
    ),
    "gap after a release": (
        lambda s: s.plan(released=[0], new=[new(0, request_of(PROMPT))], updates=[(0, 3, 20)]),
        "leaves a gap: the table has 0 entries",
    ),
    "write to a shared block": (
        lambda s: s.plan(updates=[(0, 2, 1)], run=[(0, 10, 1)]),
        "row 0 writes block 1, which stands in 3 tables",
    ),
    "two rows write one block": (
        lambda s: s.plan(updates=[(1, 2, 2)], run=[(0, 10, 1), (1, 9, 1)]),
        "writes block 2, which stands in 2 tables",
    ),
    "write to part of a block that a new row counts as computed": (
        lambda s: s.plan(
            new=[new(4, request_of(PROMPT), computed=8)],
            updates=[(4, 0, 7), (4, 1, 8), (4, 2, 20)],
            run=[(2, 5, 2), (4, 8, 2)],
            sample=[(4, 1)],
        ),
        "row 2 writes block 8, which stands in 2 tables",
    ),
    "write to a block that a new row begins in": (
        lambda s: s.plan(
            new=[new(4, request_of(PROMPT), computed=7)],
            updates=[(4, 0, 7), (4, 1, 8), (4, 2, 20)],
            run=[(2, 5, 3), (4, 7, 3)],
            sample=[(4, 1)],
        ),
        "row 2 writes block 8, which stands in 2 tables",
    ),
    "write to a full block that a row held before": (
        lambda s: s.plan(updates=[(0, 3, 8)], run=[(2, 5, 3)], sample=[]),
        "row 2 writes block 8, which stands in 2 tables",
    ),
    "write to a block of an ended row": (
        lambda s: s.plan(updates=[(2, 2, 12)], run=[(2, 5, 5)]),
        "row 2 writes block 12, which stands in 2 tables",
    ),
    "fork of no row": (lambda s: s.plan(forks=[(8, 4, 1)]), "a fork of row 8"),
    "fork of a free row": (lambda s: s.plan(forks=[(4, 5, 1)]), "a fork names row 4, which is not in use"),
    "fork into a used row": (
        lambda s: s.plan(forks=[(0, 1, 1)], run=[(0, 10, 1)], sample=[(1, 0)]),
        "a fork into row 1, which is in use",
    ),
    "two forks into one row": (lambda s: s.plan(forks=[(0, 4, 1), (0, 4, 2)]), "forks names a row twice"),
    "fork of a fork": (
        lambda s: s.plan(forks=[(0, 4, 1), (4, 5, 2)], run=[(0, 10, 1)], sample=[(4, 0), (5, 0)]),
        "a fork names row 4, which is not in use",
    ),
    "fork that samples nothing": (
        lambda s: s.plan(forks=[(0, 4, 1)], run=[(0, 10, 1)]),
        "a fork into row 4, which samples nothing",
    ),
    "fork of a negative branch": (
        lambda s: s.plan(forks=[(0, 4, -1)], run=[(0, 10, 1)], sample=[(4, 0)]),
        "as branch -1",
    ),
    "fork of a row that does not run": (
        lambda s: s.plan(forks=[(0, 4, 1)], run=[(1, 9, 1)], sample=[(4, 0)]),
        "row 4 samples from the logits of row 1",
    ),
    "fork that runs": (
        lambda s: s.plan(forks=[(0, 4, 1)], run=[(4, 10, 1), (0, 10, 1)], sample=[(4, 1)]),
        "rows names row 4, which is not in use",
    ),
    "beam out of no row": (lambda s: s.plan(moves=[(8, 4, 0, 1)]), "a beam goes on from row 8"),
    "beam out of a free row": (
        lambda s: s.plan(moves=[(4, 5, 0, 1)]),
        "a beam move names row 4, which is not",
    ),
    "beam out of a row that samples": (
        lambda s: s.plan(moves=[(0, 4, 0, 1)]),
        "a beam goes on from row 0, which is no running beam",
    ),
    "copy out of range": (lambda s: s.plan(copies=[(0, 32)]), "a copy names block 32; the pool has 32"),
    "copy below range": (lambda s: s.plan(copies=[(-1, 2)]), "a copy names block -1"),
    "two copies into one": (lambda s: s.plan(copies=[(0, 2), (1, 2)]), "two copies into one block"),
    "copy chain": (lambda s: s.plan(copies=[(0, 2), (2, 5)]), "block 2 is both source and destination"),
    "copy into a shared block": (
        lambda s: s.plan(copies=[(2, 1)]),
        "a copy into block 1, which stands in 2 tables",
    ),
    "copy into a block that a new row counts as computed": (
        lambda s: s.plan(
            new=[new(4, request_of(PROMPT), computed=8)],
            updates=[(4, 0, 7), (4, 1, 8), (4, 2, 20)],
            copies=[(2, 8)],
            run=[(4, 8, 2)],
        ),
        "a copy into block 8, which stands in 2 tables",
    ),
    "copy into nobody's block": (lambda s: s.plan(copies=[(2, 30)]), "block 30, which stands in 0 tables"),
    "swap out of no block": (
        lambda s: s.plan(swaps_out=[(32, 0)]),
        "swaps_out names block 32; the pool has 32",
    ),
    "swap out below range": (lambda s: s.plan(swaps_out=[(-1, 0)]), "swaps_out names block -1"),
    "swap out to no host block": (
        lambda s: s.plan(swaps_out=[(0, 16)]),
        "swaps_out names host block 16; there are 16",
    ),
    "swap out below the host": (lambda s: s.plan(swaps_out=[(0, -1)]), "swaps_out names host block -1"),
    "two swaps out to one": (
        lambda s: s.plan(swaps_out=[(0, 1), (2, 1)]),
        r"swaps_out writes a block twice: \[1, 1\]",
    ),
    "swap out of nobody's block": (
        lambda s: s.plan(swaps_out=[(30, 1)]),
        "swaps_out reads block 30, which no row ever held",
    ),
    "swap in from no host block": (
        lambda s: s.plan(updates=[(0, 3, 20)], swaps_in=[(16, 20)]),
        "swaps_in names host block 16",
    ),
    "swap in below the host": (
        lambda s: s.plan(updates=[(0, 3, 20)], swaps_in=[(-1, 20)]),
        "swaps_in names host block -1",
    ),
    "swap in to no block": (lambda s: s.plan(swaps_in=[(3, 32)]), "swaps_in names block 32"),
    "swap in below range": (lambda s: s.plan(swaps_in=[(3, -1)]), "swaps_in names block -1"),
    "two swaps in to one": (
        lambda s: s.plan(updates=[(0, 3, 20)], swaps_in=[(3, 20), (3, 20)]),
        r"swaps_in writes a block twice: \[20, 20\]",
    ),
    "swap in from an empty host block": (
        lambda s: s.plan(updates=[(0, 3, 20)], swaps_in=[(4, 20)]),
        "swaps_in reads host block 4, which nothing was swapped into",
    ),
    "host block read and written": (
        lambda s: s.plan(swaps_out=[(2, 3)], updates=[(0, 3, 20)], swaps_in=[(3, 20)]),
        "host block 3 is both read and written",
    ),
    "swap in to nobody's block": (
        lambda s: s.plan(swaps_in=[(3, 20)]),
        "swaps_in fills block 20, which stands in no table",
    ),
    "swap in to a released block": (
        lambda s: s.plan(released=[2], swaps_in=[(3, 7)]),
        "swaps_in fills block 7, which stands in no table",
    ),
    "swap in to a neighbour's block": (
        lambda s: s.plan(swaps_in=[(3, 7)]),
        "swaps_in fills block 7, which a row held before this plan",
    ),
    "swap in to a block that a neighbour shares": (
        lambda s: s.plan(updates=[(0, 3, 8)], swaps_in=[(3, 8)]),
        "swaps_in fills block 8, which a row held before this plan",
    ),
    "swap and copy into one block": (
        lambda s: s.plan(updates=[(0, 3, 20)], swaps_in=[(3, 20)], copies=[(1, 20)]),
        "both a swap and a copy fill block 20",
    ),
    "flat swaps": (lambda s: with_arrays(s.plan(), swaps_out=[0, 3]), "swaps_out must be"),
    "wide swaps": (lambda s: with_arrays(s.plan(), swaps_in=[[0, 3, 1]]), "swaps_in must be"),
    "row out of range": (lambda s: s.plan(run=[(8, 0, 1)]), "rows names row 8"),
    "row twice": (lambda s: s.plan(run=[(0, 10, 1), (0, 10, 1)]), "rows names a row twice"),
    "free row": (lambda s: s.plan(run=[(4, 0, 1)]), "rows names row 4, which is not in use"),
    "released row": (lambda s: s.plan(released=[0], run=[(0, 10, 1)]), "row 0, which is not in use"),
    "no tokens": (lambda s: s.plan(run=[(0, 10, 0)]), "row 0 runs 0 tokens"),
    "start behind": (lambda s: s.plan(run=[(0, 9, 1)]), "row 0 is planned from position 9; 10 of its tokens"),
    "start ahead": (lambda s: s.plan(run=[(2, 8, 2)]), "row 2 is planned from position 8; 5 of its tokens"),
    "beyond known tokens": (
        lambda s: s.plan(updates=[(0, 3, 20)], run=[(0, 10, 2)]),
        "row 0 is planned 2 tokens from 10; it has 11",
    ),
    "overflow": (lambda s: s.plan(run=[(0, 10, 2**31 - 1)]), "tokens scheduled|planned 2147483647 tokens"),
    "beyond the budget": (
        lambda s: s.plan(
            new=[new(4 + k, request_of([1] * 30)) for k in range(3)],
            updates=[],
            run=[(4 + k, 0, 30) for k in range(3)],
            sample=[],
        ),
        "90 tokens scheduled; max_num_batched_tokens is 64",
    ),
    "table too short": (
        lambda s: s.plan(run=[(2, 5, 5)]),
        "row 2 runs to position 10, but its table has 2 blocks of 4",
    ),
    "sample out of range": (lambda s: s.plan(run=[(0, 10, 1)], sample=[(0, 1)]), "samples from index 1 of 1"),
    "sample of nothing": (lambda s: s.plan(sample=[(0, 0)]), "samples from index 0 of 0"),
    "sample twice": (
        lambda s: s.plan(run=[(0, 10, 1)], sample=[(0, 0), (0, 0)]),
        "sample_rows names a row twice",
    ),
    "sample of a stranger": (
        lambda s: s.plan(run=[(0, 10, 1), (1, 9, 1)], sample=[(0, 1)]),
        "row 0 samples from the logits of row 1",
    ),
    "sample in mid-prefill": (
        lambda s: s.plan(run=[(2, 5, 2)]),
        "row 2 samples with 3 of its tokens not yet computed",
    ),
    "ragged rows": (lambda s: with_arrays(s.plan(run=[(0, 10, 1)]), num_tokens=[1, 1]), "differ in length"),
    "ragged samples": (
        lambda s: with_arrays(s.plan(run=[(0, 10, 1)]), sample_indices=[]),
        "sample_rows and sample_indices differ in length",
    ),
    "flat updates": (lambda s: with_arrays(s.plan(), block_updates=[0, 3, 20]), "block_updates must be"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_bad_plan_is_refused_and_leaves_no_trace(steps, batch, wrong):
    make, message = WRONG[wrong]
    plan = make(steps)
    before = snapshot(batch)
    with pytest.raises(PlanRejectedError, match=message):
        steps.executor.execute(plan)
    assert snapshot(batch) == before
    steps.executor.check_integrity()
    # R3: the right plan still runs, and runs right.
    assert steps(run=[(0, 10, 1)]) == expected_tokens(request_of(PROMPT), 0, 30)[1:2]


def test_a_refusal_found_late_undoes_releases_and_updates(steps, batch):
    before = snapshot(batch)
    plan = steps.plan(
        released=[1, 3],
        new=[new(1, request_of(PROMPT))],
        updates=[(1, 0, 12), (1, 1, 5), (0, 2, 20), (0, 0, 21), (2, 2, 12)],
        copies=[(2, 20)],
        run=[(0, 10, 1), (2, 5, 5)],
    )
    with pytest.raises(PlanRejectedError, match="row 2 writes block 12"):
        steps.executor.execute(plan)
    assert snapshot(batch) == before


def test_a_block_may_change_hands_within_one_plan(steps):
    """Released, handed to a new row and written in one step; and the last sharer may write without a copy."""
    request = request_of(PROMPT[:3], seed=4)
    tokens = steps(released=[0], new=[new(5, request)], updates=[(5, 0, 2)], run=[(5, 0, 3), (1, 9, 1)])
    assert tokens[0] == expected_tokens(request, 0, 30)[0]


def test_a_new_row_may_begin_behind_blocks_that_the_plan_fills(steps):
    request = request_of([*PROMPT[:8], 6], seed=4)
    tokens = steps(
        new=[new(4, request, computed=8)],
        updates=[(4, 0, 7), (4, 1, 8), (4, 2, 20)],
        run=[(4, 8, 1), (2, 5, 3)],
        sample=[(4, 0)],
    )
    assert tokens == expected_tokens(request, 0, 30)[:1]


def test_of_several_updates_of_one_entry_the_last_counts(steps, batch):
    """A branch returns on a shared prefix that ends inside a block, and copies that block as it writes."""
    request = request_of([*PROMPT[:10], 6], seed=4)
    tokens = steps(
        new=[new(5, request, computed=10)],
        updates=[(5, 0, 0), (5, 1, 1), (5, 2, 2), (5, 2, 20)],
        copies=[(2, 20)],
        run=[(5, 10, 1), (0, 10, 1)],
    )
    assert batch.ledger.table(5).tolist() == [0, 1, 20]
    assert tokens == [
        expected_tokens(request, 0, 30)[0],
        expected_tokens(request_of(PROMPT), 0, 30)[1],
    ]


def test_a_newer_epoch_drops_all_rows(steps, batch):
    request = request_of(PROMPT)
    plan = make_plan(
        1, epoch=7, new=[new(0, request)], updates=[(0, 0, 0), (0, 1, 1), (0, 2, 2)], run=[(0, 0, 10)]
    )
    assert steps.executor.execute(plan).token_ids.tolist() == expected_tokens(request, 0, 30)[:1]
    assert batch.num_rows_in_use == 1
    steps.executor.check_integrity()
    with pytest.raises(PlanRejectedError, match="epoch 1; epoch 7 has taken over"):
        steps(run=[(0, 10, 1)])


def test_reset_forgets_rows_and_keeps_the_epoch(steps, batch):
    steps.executor.reset()
    steps.executor.check_integrity()
    assert batch.num_rows_in_use == 0
    with pytest.raises(PlanRejectedError, match="epoch 0"):
        steps.executor.execute(make_plan(1, epoch=0))
    steps.executor.execute(make_plan(1, epoch=1))


@pytest.mark.parametrize(
    "corrupt",
    [
        lambda b: b.ledger.num_holders.__setitem__(3, 1),
        lambda b: b.ledger.tables.__setitem__((0, 0), 99),
        lambda b: b.progress.num_computed.__setitem__(0, 12),
        lambda b: b.progress.in_use.__setitem__(0, False),
        lambda b: b.progress.in_use.__setitem__(6, True),
        lambda b: b._rules.clear(),
    ],
)
def test_r2_check_integrity_finds_broken_state(batch, corrupt):
    batch.check_integrity()
    corrupt(batch)
    with pytest.raises(IntegrityError):
        batch.check_integrity()


def test_many_stop_ids_widen_the_matrix_and_keep_the_old(steps, batch):
    greedy = expected_tokens(request_of(PROMPT[:3]), 0, 30)
    others = [token for token in range(VOCAB) if token not in greedy[:3]][:20]
    request = request_of(PROMPT[:3], stop_token_ids=(*others, greedy[2]))
    steps(released=[3], new=[new(4, request)], updates=[(4, 0, 20), (4, 1, 21)], run=[(4, 0, 3)])
    assert [steps(run=[(4, 3 + i, 1)])[0] for i in range(3)] == [*greedy[1:3], MASKED_TOKEN]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.integers(1, 6),
    st.integers(0, 4),
    st.lists(st.integers(0, 7), max_size=3),
    st.lists(st.integers(0, 7), min_size=6, max_size=6),
)
def test_a_row_ends_exactly_when_finish_reason_says_so(max_tokens, min_tokens, stops, tokens):
    request = request_of(
        [1], max_tokens=max_tokens, min_tokens=min(min_tokens, max_tokens), stop_token_ids=tuple(stops)
    )
    executor, _ = make_executor()
    batch = executor._input_batch
    plan = make_plan(1, new=[new(0, request)], updates=[(0, 0, 0), (0, 1, 1)], run=[(0, 0, 1)])
    for count, token in enumerate(tokens, 1):
        step = batch.prepare(plan)
        batch.finish(step, np.array([token], np.int32), np.zeros(1, np.bool_))
        ended = finish_reason(request, count, token, max_tokens) is not None
        assert bool(batch.progress.ended[0]) == ended
        if ended:
            break
        plan = make_plan(count + 1, run=[(0, count, 1)])


def test_memory_of_256_rows_of_8192_tokens_is_modest():
    executor, _ = make_executor(num_blocks=4, max_num_seqs=256, max_model_len=8192)
    batch = executor._input_batch
    arrays = [*vars(batch).values(), *vars(batch.ledger).values()]
    size = sum(array.nbytes for array in arrays if isinstance(array, np.ndarray))
    assert size <= 256 * 8192 * 4 * (1 + 1 / BLOCK) + 256 * 200
