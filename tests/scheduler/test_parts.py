"""The scheduler's parts alone: free queue, pool, prefix tree, step-time model, router."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.protos.errors import ConfigError, OverloadedError, RequestTooLargeError, UnavailableError
from octavo.scheduler.admission import peak_blocks
from octavo.scheduler.block_pool import BlockPool, FreeBlockQueue
from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.events import Queued
from octavo.scheduler.prefix_tree import PrefixTree
from octavo.scheduler.router import Routed, Router
from octavo.scheduler.scheduler import Scheduler
from octavo.scheduler.step_time import StepTimeModel

from .support import make_request


@given(
    st.lists(
        st.tuples(st.sampled_from(["pop", "append", "appendleft", "remove"]), st.integers(0, 19)), max_size=80
    )
)
def test_free_queue_behaves_like_a_list(moves):
    queue, model = FreeBlockQueue(20), list(range(20))
    for move, block in moves:
        if move == "pop" and model:
            assert queue.pop() == model.pop(0)
        elif move == "remove" and block in model:
            queue.remove(block)
            model.remove(block)
        elif move == "append" and block not in model:
            queue.append(block)
            model.append(block)
        elif move == "appendleft" and block not in model:
            queue.appendleft(block)
            model.insert(0, block)
        assert list(queue) == model
        assert len(queue) == len(model)


def test_pool_refuses_double_release_and_counts_references():
    pool = BlockPool(4, is_cached=lambda block: False, on_evict=lambda block: None)
    block = pool.allocate()
    pool.acquire(block)
    assert pool.release([block]) == 0
    assert pool.release([block]) == 1
    with pytest.raises(AssertionError, match="released more often"):
        pool.release([block])
    pool.check_integrity([])


@settings(max_examples=200)
@given(st.integers(0, 2**32), st.sampled_from([1, 2, 4]))
def test_prefix_tree_equals_a_dictionary_of_prefixes(seed, block_size):
    """Random sequences over two tokens (so that they share much), random evictions of leaves."""
    rng = random.Random(seed)
    tree = PrefixTree(200, block_size)
    known: dict[tuple[str, tuple[int, ...]], int] = {}
    free = list(range(200))

    def blocks_of(tokens):
        return [tuple(tokens[: (i + 1) * block_size]) for i in range(len(tokens) // block_size)]

    for _ in range(30):
        salt = rng.choice(["", "s"])
        tokens = [rng.randrange(2) for _ in range(rng.randint(0, 12))]
        data = np.asarray(tokens, np.int32).tobytes()
        want = []
        for prefix in blocks_of(tokens):
            if (salt, prefix) not in known:
                break
            want.append(known[salt, prefix])
        found = tree.match((salt, ""), data, 100)
        assert found == want
        assert tree.match((salt, ""), data, 1) == want[:1]
        paths = blocks_of(tokens)
        # Extend from a random known point, offering fresh blocks even where the tree has some.
        start = rng.randint(0, len(found))
        offered = [free.pop() for _ in paths[start:]]
        chunk = data[start * block_size * 4 : len(paths) * block_size * 4]
        kept = tree.extend((salt, ""), found[start - 1] if start else None, chunk, offered)
        for prefix, mine, got in zip(paths[start:], offered, kept, strict=True):
            assert got == known.setdefault((salt, prefix), mine)
            if got != mine:
                free.append(mine)
        tree.check_integrity()
        leaves = [
            key
            for key in known
            if not any(
                k[0] == key[0] and len(k[1]) > len(key[1]) and k[1][: len(key[1])] == key[1] for k in known
            )
        ]
        for key in rng.sample(sorted(leaves), min(2, len(leaves))):
            tree.evict(known[key])
            free.append(known.pop(key))
        tree.check_integrity()
        assert tree.num_blocks == len(known)


def test_a_salt_is_not_an_adapter():
    tree = PrefixTree(4, 2)
    data = np.asarray([1, 2], np.int32).tobytes()
    tree.extend(("a", ""), None, data, [0])
    assert tree.match(("", "a"), data, 1) == []
    assert tree.match(("a", ""), data, 1) == [0]


def test_d05_equal_hashes_do_not_confuse_the_tree():
    """Keys are the tokens themselves: Python compares them in full after any hash."""
    tree = PrefixTree(400, 1)
    for token in range(400):
        tree.extend(("", ""), None, np.asarray([token], np.int32).tobytes(), [token])
    assert all(tree.match(("", ""), np.asarray([t], np.int32).tobytes(), 1) == [t] for t in range(400))


@given(st.integers(1, 200), st.integers(1, 200), st.integers(1, 5), st.sampled_from([8, 16]))
def test_peak_blocks_bounds_what_branches_can_hold(prompt, output, n, block_size):
    blocks = peak_blocks(prompt, output, n, block_size)
    last_slot = prompt + output - 1
    assert blocks <= n * -(-last_slot // block_size)
    assert blocks >= -(-last_slot // block_size)


def test_step_time_learns_a_linear_law():
    model = StepTimeModel()
    rng = random.Random(1)
    law = lambda tokens, rows, context: 0.01 + 0.0005 * tokens + 0.0002 * rows + 1e-6 * context  # noqa: E731
    for _ in range(400):
        tokens, rows, context = rng.randint(1, 512), rng.randint(1, 64), rng.randint(1, 50_000)
        model.observe(
            num_tokens=tokens, num_rows=rows, context_tokens=context, seconds=law(tokens, rows, context)
        )
    for tokens, rows, context in ((1, 1, 100), (512, 1, 512), (64, 64, 40_000)):
        predicted = model.step_seconds(num_tokens=tokens, num_rows=rows, context_tokens=context)
        assert predicted == pytest.approx(law(tokens, rows, context), rel=0.05)
    within = model.tokens_within(0.1, num_rows=10, context_tokens=1000)
    assert law(within, 10, 1000) == pytest.approx(0.1, rel=0.05)


def test_step_time_starts_from_calibration():
    model = StepTimeModel(prefill_tokens_per_second=1000, decode_step_seconds=0.03)
    assert model.prefill_seconds(1000, chunk_tokens=500) == pytest.approx(1.058, rel=0.01)
    assert StepTimeModel().tokens_within(1.0, num_rows=1, context_tokens=1) is None


def workers(n=2, **config):
    return {
        f"w{i}": Scheduler(
            SchedulerConfig(num_blocks=100, **config),
            StepTimeModel(prefill_tokens_per_second=1000, decode_step_seconds=0.02),
        )
        for i in range(n)
    }


def test_router_spreads_a_burst_since_it_reserves_as_it_chooses():
    router, fleet = Router(), workers(4)
    chosen = [router.route(make_request(f"r{i}", range(i, i + 30)), fleet, 0.0)[0] for i in range(8)]
    assert sorted(chosen) == ["w0", "w0", "w1", "w1", "w2", "w2", "w3", "w3"]


def test_router_goes_where_the_prefix_is_unless_waiting_costs_more():
    from .fake_worker import FakeWorker

    router, fleet = Router(), workers(2)
    warm, first = router.route(make_request("a", range(400), max_tokens=2), fleet, 0.0)
    assert isinstance(first[0], Routed)
    assert isinstance(first[1], Queued)
    worker = FakeWorker(100, 16, 256, 512)
    while (plan := fleet[warm].plan(0.0)) is not None:
        fleet[warm].commit(worker.execute(plan), 0.0)
    chosen, events = router.route(make_request("b", range(400), max_tokens=2), fleet, 0.0)
    assert chosen == warm
    scores = {score.worker_id: score.cached_tokens for score in events[0].scores}
    assert scores[warm] == 399, "all but the token that must run"
    for i in range(3):
        router.route(
            make_request(f"busy{i}", range(1000 + i, 1600 + i), max_tokens=2), {warm: fleet[warm]}, 0.0
        )
    chosen, _ = router.route(make_request("c", range(400), max_tokens=2), fleet, 0.0)
    assert chosen != warm


def test_router_does_not_herd_on_a_hair_of_a_prediction():
    fleet = workers(2)
    for index, scheduler in enumerate(fleet.values()):
        for _ in range(200):
            scheduler.step_time.observe(
                num_tokens=9, num_rows=9, context_tokens=99, seconds=0.05 + index * 1e-4
            )
    router = Router()
    chosen = [router.route(make_request(f"r{i}", range(i, i + 5)), fleet, 0.0)[0] for i in range(8)]
    assert sorted(chosen) == ["w0"] * 4 + ["w1"] * 4


def test_router_refuses_with_the_reason_that_helps():
    with pytest.raises(UnavailableError):
        Router().route(make_request("a", range(4)), {}, 0.0)
    fleet = workers(2, max_waiting=1)
    with pytest.raises(RequestTooLargeError):
        Router().route(make_request("a", range(4000)), fleet, 0.0)
    for i in range(2):
        Router().route(make_request(f"r{i}", range(4)), fleet, 0.0)
    with pytest.raises(OverloadedError):
        Router().route(make_request("c", range(4)), fleet, 0.0)


def test_router_choices_repeat_with_the_seed():
    def choices(seed):
        router, fleet = Router(seed), workers(5)
        return [router.route(make_request(f"r{i}", range(i, i + 9)), fleet, 0.0)[0] for i in range(10)]

    assert choices(1) == choices(1)
    assert any(choices(1) != choices(seed) for seed in range(2, 6))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_blocks", 0),
        ("block_size", True),
        ("max_num_seqs", 1.5),
        ("preemption", "swap"),
        ("itl_target", float("nan")),
    ],
)
def test_config_names_the_option(name, value):
    with pytest.raises(ConfigError, match=name) as caught:
        SchedulerConfig(**{"num_blocks": 10, name: value})
    assert caught.value.param == name
