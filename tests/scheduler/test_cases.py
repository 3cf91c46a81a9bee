"""Public bug reports of engines like this one, D01 to D06 and D08 to D10, in each preemption mode.

The worker's pool holds token ids, and every answer must equal that of a request that runs alone (`Harness.check_idle`).
The same cases run over HTTP with the real model in tests/e2e.
"""

from __future__ import annotations

import random

import pytest

from octavo.protos.errors import RequestTooLargeError
from octavo.scheduler.events import Admitted, Preempted

from .support import Harness, make_request

MODES = pytest.mark.parametrize("mode", ["swap", "recompute", "auto"])


def pool(mode: str, num_blocks: int, **options) -> Harness:
    h = Harness(
        num_blocks=num_blocks,
        num_host_blocks=200,
        kv_bytes_per_block=1000,
        host_link_bytes_per_second=1e6,
        preemption=mode,
        **options,
    )
    # Admission without foresight, or the reserve would see to it that nobody has to give way.
    h.scheduler._life.reserve._min = h.scheduler._life.reserve.horizon = 0
    return h


def cached(h: Harness, name: str) -> int:
    (event,) = [e for e in h.events if isinstance(e, Admitted) and e.request_id == name]
    return event.cached_tokens


def preempted(h: Harness) -> dict[str, int]:
    counts: dict[str, int] = {}
    for event in h.events:
        if isinstance(event, Preempted):
            counts[event.request_id] = counts.get(event.request_id, 0) + 1
            assert event.recompute_seconds >= 0
    return counts


@MODES
def test_d01_pressure_is_invisible(mode):
    h = pool(mode, 24)
    for number in range(8):
        h.add(make_request(f"r{number}", range(100 * number, 100 * number + 40), max_tokens=100))
    h.run()
    assert all(len(h.tokens[f"r{number}", 0]) == 100 for number in range(8))
    assert 0 < max(preempted(h).values()) <= 10
    by_kind = h.scheduler.snapshot()["preemptions"]
    assert mode == "auto" or by_kind[mode] == sum(by_kind.values())


@MODES
@pytest.mark.parametrize("num_blocks", [24, 100])
def test_d02_twins_in_one_batch(mode, num_blocks):
    """Nobody hits what has not been computed; sharing under pressure changes nothing."""
    h = pool(mode, num_blocks)
    for number in range(8):
        h.add(make_request(f"same{number}", range(81), max_tokens=32))
    for number in range(8):
        h.add(make_request(f"stem{number}", [*range(64), *range(900, 917)], max_tokens=32, seed=number))
    h.run()
    assert (sum(preempted(h).values()) > 0) == (num_blocks == 24)


@MODES
@pytest.mark.parametrize("block_size", [8, 16, 24])
def test_d03_a_prompt_that_is_wholly_cached_runs_one_token(mode, block_size):
    h = pool(mode, 40, block_size=block_size)
    for length in (15, 16, 17, 31, 32, 33, 48, 64):
        for turn in range(3):
            name = f"{length}/{turn}"
            h.add(make_request(name, range(1000 * length, 1000 * length + length), max_tokens=16))
            h.run()
            assert cached(h, name) <= length - 1
            whole = length // block_size * block_size
            assert turn == 0 or cached(h, name) >= min(whole, length - 1) - (block_size // 4)


@MODES
def test_d04_salts_and_adapters_are_never_joined(mode):
    h = pool(mode, 100)
    for name, salt in (("1", "a"), ("2", "b"), ("3", ""), ("4", "a")):
        h.add(make_request(name, range(64), max_tokens=8, salt=salt))
        h.run()
    assert [cached(h, name) for name in "1234"] == [0, 0, 0, 63]


@MODES
def test_d05_recycled_blocks_are_never_taken_for_what_they_were(mode):
    h = pool(mode, 64)
    for turn in range(5):
        for name, blocks in (("a", 40), ("b", 60)):
            h.add(make_request(f"{name}{turn}", range(1000 * blocks, 1016 * blocks), max_tokens=16))
            h.run()
    assert len({tuple(h.tokens[f"a{turn}", 0]) for turn in range(5)}) == 1
    assert len({tuple(h.tokens[f"b{turn}", 0]) for turn in range(5)}) == 1


@MODES
def test_d06_what_can_never_fit_is_refused_and_holds_nobody_up(mode):
    h = pool(mode, 10)
    for name, length, options in (
        ("one", 200, {"max_tokens": 4}),
        ("two", 100, {"max_tokens": 200}),
        ("four", 40, {"max_tokens": 16, "n": 8}),
        ("five", 40, {"max_tokens": 64, "beam_width": 8}),
    ):
        with pytest.raises(RequestTooLargeError, match="pool has 10"):
            h.add(make_request(name, range(length), **options))
    h.add(make_request("three", range(20), max_tokens=10))
    h.run()
    assert len(h.tokens["three", 0]) == 10


@MODES
def test_d08_a_seed_does_not_depend_on_the_neighbours(mode):
    answers = set()
    for turn in range(10):
        h = pool(mode, 12)
        rng = random.Random(turn)
        others = [
            make_request(f"o{i}", range(100 * i, 100 * i + 30), seed=rng.randrange(99), max_tokens=40)
            for i in range(3)
        ]
        others.insert(rng.randrange(4), make_request("it", range(6), seed=42, max_tokens=32, n=2))
        for request in others:
            h.add(request)
        h.run()
        assert h.tokens["it", 0] != h.tokens["it", 1]
        answers.add((tuple(h.tokens["it", 0]), tuple(h.tokens["it", 1])))
    assert len(answers) == 1


@MODES
@pytest.mark.parametrize("depth", [1, 2])
def test_d09_branches_write_into_blocks_of_their_own(mode, depth):
    h = pool(mode, 18, depth=depth)
    h.add(make_request("choices", range(21), n=4, seed=1, max_tokens=40))
    h.add(make_request("stem a", [*range(21), 7], max_tokens=40))
    h.add(make_request("stem b", [*range(21), 8], max_tokens=40))
    h.run()
    assert sorted(end.branch for end in h.ends["choices"]) == [0, 1, 2, 3]
    assert preempted(h)


@MODES
@pytest.mark.parametrize("budget", [32, 512])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_d10_the_same_answer_in_any_company(mode, budget, prefix_cache):
    for order in (1, -1):
        h = pool(mode, 30, budget=budget, prefix_cache=prefix_cache)
        for number in list(range(16))[::order]:
            h.add(make_request(f"r{number}", range(number * 50, number * 50 + 20 + number), max_tokens=64))
        h.run()
        assert preempted(h)
