"""The scheduler against a worker that would show any wrong block: batching, chunks, sharing, preemption."""

from __future__ import annotations

import pytest

from octavo.protos.errors import IntegrityError, InvalidRequestError, OverloadedError, RequestTooLargeError
from octavo.protos.types import FinishReason
from octavo.scheduler.events import Admitted, ChunkPlanned, Finished, Forked, Preempted, Resumed

from .support import Harness, make_request


def test_one_request_runs_to_its_limit():
    h = Harness(num_blocks=8)
    h.add(make_request("a", range(20), max_tokens=5))
    h.run()
    assert len(h.tokens["a", 0]) == 5
    assert h.ends["a"][0].reason is FinishReason.LENGTH


def test_decode_first_and_no_step_over_the_budget():
    """8 streams decode while a 3,000-token prompt arrives: each gets a token in every step."""
    h = Harness(num_blocks=400, budget=64)
    for i in range(8):
        h.add(make_request(f"s{i}", range(i, i + 10), max_tokens=200))
    for _ in range(8):
        h.step()
    h.add(make_request("long", range(3000), max_tokens=4))
    while not h.ends["long"]:
        before = {i: len(h.tokens[f"s{i}", 0]) for i in range(8)}
        assert h.step()
        assert all(len(h.tokens[f"s{i}", 0]) == before[i] + 1 for i in range(8))
    assert max(plan.num_scheduled_tokens for plan in h.plans) == 64
    h.run()


def test_d07_a_late_short_prompt_does_not_wait_for_a_long_prefill_of_others_decodes():
    h = Harness(num_blocks=700, budget=256)
    for i in range(4):
        h.add(make_request(f"s{i}", range(i, i + 10), max_tokens=100))
    for _ in range(4):
        h.step()
    h.add(make_request("long", range(8000), max_tokens=4))
    h.step()
    h.add(make_request("short", range(500, 520), max_tokens=4))
    h.run()
    order = [e.request_id for e in h.events if isinstance(e, Admitted)]
    assert order[-2:] == ["long", "short"]


def test_continuous_batching_joins_and_leaves_at_once():
    h = Harness(num_blocks=100, max_num_seqs=2, depth=1)
    for name, tokens in (("a", 3), ("b", 6), ("c", 3)):
        h.add(make_request(name, range(5), max_tokens=tokens, seed=len(name)))
    for _ in range(3):
        h.step()
    assert h.ends["a"]
    assert not h.tokens["c", 0]
    h.step()
    assert h.tokens["c", 0], "a waiting request joins in the step after another has left"
    h.run()


def test_first_come_first_served_within_a_priority():
    h = Harness(num_blocks=100, max_num_seqs=1)
    for name, priority in (("a", 1), ("b", 1), ("c", 0), ("d", 1)):
        h.add(make_request(name, range(5), max_tokens=2, priority=priority))
    h.run()
    assert [e.request_id for e in h.events if isinstance(e, Finished)] == ["c", "a", "b", "d"]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_d01_preemption_is_invisible(depth):
    """24 blocks, 8 requests of 40 + 100 tokens."""
    h = Harness(num_blocks=24, depth=depth)
    for i in range(8):
        h.add(make_request(f"r{i}", range(40 * i, 40 * i + 40), max_tokens=100, seed=i))
    h.run()
    assert h.count(Preempted) > 0
    assert h.count(Preempted) == h.count(Resumed)
    assert all(len(h.tokens[f"r{i}", 0]) == 100 for i in range(8))
    worst = max(end[-1].metrics.num_preemptions for end in h.ends.values())
    assert worst <= 10


def test_the_oldest_is_never_parked():
    h = Harness(num_blocks=24)
    for i in range(8):
        h.add(make_request(f"r{i}", range(40 * i, 40 * i + 40), max_tokens=100))
    h.run()
    assert "r0" not in {e.request_id for e in h.events if isinstance(e, Preempted)}


def test_the_lowest_priority_is_parked_first():
    h = Harness(num_blocks=24)
    for i in range(8):
        h.add(make_request(f"r{i}", range(40 * i, 40 * i + 40), max_tokens=60, priority=i % 2))
    h.run()
    first = next(e for e in h.events if isinstance(e, Preempted))
    assert int(first.request_id[1:]) % 2 == 1


def test_storm_of_large_prompts_parks_at_most_two():
    """Five prompts of 60 % of the pool, arriving together: each finishes."""
    h = Harness(num_blocks=100)
    for i in range(5):
        h.add(make_request(f"r{i}", range(1000 * i, 1000 * i + 960), max_tokens=50))
    h.run()
    assert h.count(Preempted) <= 2


def prompt_tokens_computed(h):
    return sum(e.num_tokens for e in h.events if isinstance(e, ChunkPlanned))


def test_d02_twins_in_one_step_share_the_whole_blocks_that_it_computes():
    h = Harness(num_blocks=200)
    for i in range(8):
        h.add(make_request(f"twin{i}", range(81), max_tokens=32))
    for i in range(8):
        h.add(make_request(f"half{i}", [*range(64), *range(500 + i, 517 + i)], max_tokens=32))
    h.run()
    cached = [e.cached_tokens for e in h.events if isinstance(e, Admitted)]
    # All in the first step: the first computes, and the fake worker reads back what the others began behind.
    assert cached == [0, *[80] * 7, *[64] * 8]
    assert len({e.step_id for e in h.events if isinstance(e, ChunkPlanned)}) == 1


@pytest.mark.parametrize("depth", [1, 2])
def test_a_crowd_with_one_prefix_computes_it_once(depth):
    """24 prompts of a common 768 tokens and 32 of their own, over a budget of 512: chunks end where they will."""
    h = Harness(num_blocks=400, depth=depth)
    for i in range(24):
        h.add(make_request(f"r{i}", [*range(768), *range(1000 + 32 * i, 1032 + 32 * i)], max_tokens=16))
    h.run()
    assert prompt_tokens_computed(h) == 768 + 24 * 32
    assert [e.cached_tokens for e in h.events if isinstance(e, Admitted)] == [0, *[768] * 23]


def test_the_part_of_a_block_is_not_copied_from_one_that_the_same_step_computes():
    """Copies come before the step's writes; a block of an earlier step with less in common serves instead."""
    h = Harness(num_blocks=40)
    h.add(make_request("old", [*range(16), *range(16, 24), *range(100, 108)], max_tokens=1))
    h.run()
    h.add(make_request("first", range(32), max_tokens=1))
    h.add(make_request("second", [*range(28), 777, 778], max_tokens=1))
    h.run()
    h.add(make_request("third", [*range(28), 777, 778], max_tokens=1))
    h.run()
    cached = [e.cached_tokens for e in h.events if isinstance(e, Admitted)]
    assert cached == [0, 24, 24, 28]


def test_who_looks_for_no_prefix_computes_its_own_beside_one_that_shares():
    """Log-probabilities need every token of the prompt; its blocks give way in the next step, not in this one."""
    h = Harness(num_blocks=60)
    h.add(make_request("a", range(64), max_tokens=8))
    h.add(make_request("whole", range(64), max_tokens=8, prompt_logprobs=0))
    h.add(make_request("private", range(64), max_tokens=8, cache=False))
    h.add(make_request("salted", range(64), max_tokens=8, salt="x"))
    h.add(make_request("b", range(64), max_tokens=8))
    h.run()
    found = {e.request_id: e.cached_tokens for e in h.events if isinstance(e, Admitted)}
    assert found == {"a": 0, "whole": 0, "private": 0, "salted": 0, "b": 48}


@pytest.mark.parametrize("block_size", [8, 16, 24])
@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33, 48, 64])
def test_d03_full_hits_at_block_edges(block_size, length):
    h = Harness(num_blocks=40, block_size=block_size)
    for i in range(3):
        h.add(make_request(f"r{i}", range(length), max_tokens=16))
        h.run()
    cached = [e.cached_tokens for e in h.events if isinstance(e, Admitted)]
    assert cached[0] == 0
    # All but the last token, where the block that it falls into was full after the first run; the part of that
    # block is copied if it is worth it.
    whole, tail = divmod(length - 1, block_size)
    known = (length + 15) // block_size
    want = length - 1 if known > whole and tail >= block_size // 4 else whole * block_size
    assert cached[1] == cached[2] == want
    assert h.tokens["r0", 0] == h.tokens["r1", 0] == h.tokens["r2", 0]


def test_d04_salts_do_not_share():
    h = Harness(num_blocks=40)
    cached = []
    for i, salt in enumerate(["a", "b", "", "a"]):
        h.add(make_request(f"r{i}", range(64), max_tokens=4, salt=salt))
        h.run()
        cached.append(h.ends[f"r{i}"][0].metrics.cached_tokens)
    assert cached == [0, 0, 0, 63]


def test_d05_eviction_and_reuse():
    h = Harness(num_blocks=64)
    for i in range(5):
        h.add(make_request(f"a{i}", range(640), max_tokens=16))
        h.run()
        h.add(make_request(f"b{i}", range(1000, 1960), max_tokens=16))
        h.run()
    assert h.tokens["a0", 0] == h.tokens["a4", 0]
    assert h.tokens["b0", 0] == h.tokens["b4", 0]


def test_generated_tokens_are_found_again():
    h = Harness(num_blocks=64)
    h.add(make_request("turn1", range(40), max_tokens=60))
    h.run()
    h.add(make_request("turn2", [*range(40), *h.tokens["turn1", 0], *range(7)], max_tokens=4))
    h.run()
    assert h.ends["turn2"][0].metrics.cached_tokens == 96


def test_a_prefix_that_ends_inside_a_block_is_copied():
    h = Harness(num_blocks=64)
    h.add(make_request("a", range(100), max_tokens=4))
    h.run()
    for name, shared, cached in (("b", 90, 90), ("c", 66, 64), ("d", 3, 0)):
        h.add(make_request(name, [*range(shared), *range(500, 530)], max_tokens=4))
        h.run()
        assert h.ends[name][0].metrics.cached_tokens == cached
    assert sum(len(plan.block_copies) for plan in h.plans) == 1


def test_prefix_cache_can_be_switched_off():
    h = Harness(num_blocks=64, prefix_cache=False)
    for i in range(2):
        h.add(make_request(f"r{i}", range(64), max_tokens=4))
        h.run()
    assert h.ends["r1"][0].metrics.cached_tokens == 0
    assert h.scheduler.snapshot()["blocks_cached"] == 0


def test_d06_what_can_never_fit_is_refused_with_the_numbers():
    h = Harness(num_blocks=10)
    with pytest.raises(RequestTooLargeError, match=r"13 KV blocks.*pool has 10") as caught:
        h.add(make_request("one", range(200), max_tokens=4))
    assert caught.value.param == "prompt"
    with pytest.raises(RequestTooLargeError, match="pool has 10") as caught:
        h.add(make_request("two", range(100), max_tokens=200))
    assert caught.value.param == "max_tokens"
    h.add(make_request("three", range(20), max_tokens=10))
    with pytest.raises(RequestTooLargeError, match="n 8"):
        h.add(make_request("four", range(40), max_tokens=16, n=8))
    h.add(make_request("five", range(100), max_tokens=None))
    h.run()
    assert len(h.tokens["five", 0]) == 61, "no limit asked for: to the pool's end"


def test_a_request_that_fills_the_pool_starts_though_a_part_of_a_block_is_cached():
    """The source of that copy would be held beside it, one block more than there are."""
    h = Harness(num_blocks=4, block_size=8)
    h.add(make_request("before", [*range(12), *range(100, 120)], max_tokens=1))
    h.run()
    h.add(make_request("all", range(32), max_tokens=1))
    h.run(limit=50)


def test_limits_of_model_rows_and_queue():
    h = Harness(num_blocks=100, max_model_len=50, max_num_seqs=4, max_waiting=2)
    with pytest.raises(RequestTooLargeError, match="limit is 50"):
        h.add(make_request("a", range(50), max_tokens=1))
    with pytest.raises(RequestTooLargeError, match="limit is 50"):
        h.add(make_request("a", range(40), max_tokens=11))
    with pytest.raises(RequestTooLargeError, match="n is 5"):
        h.add(make_request("a", range(4), max_tokens=1, n=5))
    h.add(make_request("a", range(4), max_tokens=1))
    with pytest.raises(InvalidRequestError, match="in use"):
        h.add(make_request("a", range(4), max_tokens=1))
    h.add(make_request("b", range(4), max_tokens=1))
    with pytest.raises(OverloadedError, match="limit is 2"):
        h.add(make_request("c", range(4), max_tokens=1))
    h.run()


@pytest.mark.parametrize("prompt", [21, 32])
def test_d09_branches_share_until_they_write(prompt):
    h = Harness(num_blocks=64)
    h.add(make_request("r", range(prompt), max_tokens=40, n=4, seed=1))
    h.run()
    assert sorted(end.branch for end in h.ends["r"]) == [0, 1, 2, 3]
    copies = sum(len(plan.block_copies) for plan in h.plans)
    assert copies == (3 if prompt % 16 else 0), "one copy a diverging branch; the last holder writes in place"
    assert h.count(Forked) == 1


def test_a_last_chunk_of_one_token_forks_too():
    h = Harness(num_blocks=64, budget=16)
    h.add(make_request("r", range(33), max_tokens=5, n=3))
    h.run()
    assert h.count(Forked) == 1


def test_parallel_sampling_shares_the_prompt():
    h = Harness(num_blocks=200)
    h.add(make_request("r", range(512), max_tokens=48, n=8))
    h.run()
    own = 48 // 16
    assert h.scheduler.snapshot()["peak_blocks"] <= 512 // 16 + 8 * (own + 1)


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_groups_are_parked_and_return_as_a_unit(prefix_cache):
    h = Harness(num_blocks=30, prefix_cache=prefix_cache)
    for i in range(4):
        h.add(make_request(f"r{i}", range(50 * i, 50 * i + 45), max_tokens=60, n=3, seed=i))
    h.run()
    assert h.count(Preempted) > 0
    assert all(len(h.tokens[f"r{i}", b]) == 60 for i in range(4) for b in range(3))


def test_a_stop_token_ends_a_branch_and_masks_what_was_sent_ahead():
    probe = Harness(num_blocks=20)
    probe.add(make_request("r", range(10), max_tokens=30))
    probe.run()
    eos = probe.tokens["r", 0][12]
    first = probe.tokens["r", 0].index(eos)
    h = Harness(num_blocks=20)
    h.add(make_request("r", range(10), max_tokens=30, eos=(eos,)))
    h.run()
    assert h.tokens["r", 0] == probe.tokens["r", 0][: first + 1]
    assert h.ends["r"][0].reason is FinishReason.STOP


@pytest.mark.parametrize("steps", range(12))
@pytest.mark.parametrize("n", [1, 3])
def test_abort_at_every_stage(steps, n):
    h = Harness(num_blocks=40, budget=16)
    h.add(make_request("keep", range(200, 260), max_tokens=10))
    h.add(make_request("gone", range(50), max_tokens=8, n=n))
    for _ in range(steps):
        h.step()
    h.plan()
    h.take(h.scheduler.abort("gone", h.now))
    h.scheduler.check_integrity()
    h.run()
    assert h.ends["keep"][0].reason is FinishReason.LENGTH
    assert h.scheduler.abort("gone", h.now) == []


def test_abort_of_the_parked():
    h = Harness(num_blocks=24)
    for i in range(8):
        h.add(make_request(f"r{i}", range(40 * i, 40 * i + 40), max_tokens=100))
    while not h.count(Preempted):
        h.step()
    victim = next(e.request_id for e in h.events if isinstance(e, Preempted))
    h.take(h.scheduler.abort(victim, h.now))
    h.run()
    assert h.ends[victim][0].reason is FinishReason.ABORT


def test_a_stop_string_ends_one_branch_only():
    h = Harness(num_blocks=40)
    h.add(make_request("r", range(20), max_tokens=20, n=3))
    for _ in range(5):
        h.step()
    h.take(h.scheduler.abort_branch("r", 1, h.now))
    h.run()
    reasons = {end.branch: end.reason for end in h.ends["r"]}
    assert reasons == {0: FinishReason.LENGTH, 1: FinishReason.STOP, 2: FinishReason.LENGTH}
    assert len(h.tokens["r", 1]) < 20


def test_a_failed_row_fails_its_request_alone():
    h = Harness(num_blocks=40)
    for name in "abc":
        h.add(make_request(name, range(20), max_tokens=10, seed=ord(name)))
    h.step()
    h.plan()
    h.commit(fail=frozenset({1}))
    h.run()
    assert h.ends["b"][0].reason is FinishReason.ERROR
    assert h.ends["b"][0].error == "made to fail"
    assert h.ends["a"][0].reason is h.ends["c"][0].reason is FinishReason.LENGTH


def test_results_of_another_epoch_or_step_are_refused():
    h = Harness(num_blocks=40)
    h.add(make_request("a", range(20), max_tokens=10))
    h.plan()
    result = h.worker.execute(h.pending[0])
    from dataclasses import replace

    for wrong in (
        replace(result, epoch=9),
        replace(result, step_id=5),
        replace(result, token_ids=result.token_ids[:0]),
    ):
        with pytest.raises(IntegrityError, match="result of"):
            h.scheduler.commit(wrong, 0.0)
    h.take(h.scheduler.commit(result, 0.0))
    h.pending.clear()
    h.run()


def test_same_calls_same_plans():
    def bytes_of_plans() -> list[bytes]:
        h = Harness(num_blocks=30)
        for i in range(6):
            h.add(make_request(f"r{i}", range(30 * i, 30 * i + 45), max_tokens=40, n=1 + i % 2, seed=i))
        h.run()
        return [p.rows.tobytes() + p.block_updates.tobytes() + p.block_copies.tobytes() for p in h.plans]

    assert bytes_of_plans() == bytes_of_plans()


def test_steady_decode_plans_do_not_grow_with_context():
    h = Harness(num_blocks=600, max_model_len=9000)
    h.add(make_request("r", range(4000), max_tokens=1000))
    h.run()
    sizes = [
        sum(
            a.nbytes
            for a in (
                p.rows,
                p.num_tokens,
                p.start_positions,
                p.block_updates,
                p.sample_rows,
                p.sample_indices,
            )
        )
        for p in h.plans
        if p.num_scheduled_tokens == 1
    ]
    assert max(sizes) <= 32


def test_every_chunk_has_its_event():
    h = Harness(num_blocks=100, budget=100)
    h.add(make_request("r", range(450), max_tokens=2))
    h.run()
    chunks = [e for e in h.events if isinstance(e, ChunkPlanned)]
    assert [(e.start, e.num_tokens) for e in chunks] == [
        (0, 100),
        (100, 100),
        (200, 100),
        (300, 100),
        (400, 50),
    ]


def test_itl_target_shrinks_chunks_but_never_starves():
    h = Harness(num_blocks=400, budget=512, itl_target=0.001)
    for _ in range(50):
        h.scheduler.step_time.observe(num_tokens=512, num_rows=1, context_tokens=512, seconds=0.5)
        h.scheduler.step_time.observe(num_tokens=1, num_rows=1, context_tokens=512, seconds=0.01)
    h.add(make_request("r", range(400), max_tokens=4))
    h.run()
    assert max(p.num_scheduled_tokens for p in h.plans) < 100
