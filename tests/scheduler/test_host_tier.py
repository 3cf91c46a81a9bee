"""Prefixes in host memory: blocks that leave the device are found again, and one budget serves both its uses."""

from __future__ import annotations

import pytest

from octavo.scheduler.events import Admitted, Preempted, PreemptionKind

from .support import Harness, make_request


def harness(*, host: int = 40, link: float = 1e9, **options) -> Harness:
    return Harness(
        num_blocks=20,
        num_host_blocks=host,
        kv_bytes_per_block=1000,
        host_link_bytes_per_second=link,
        **options,
    )


def fill(h: Harness, name: str = "filler", blocks: int = 20) -> None:
    """Take the whole pool once."""
    h.add(make_request(name, (500 + i % 400 for i in range(blocks * 16 - 1)), max_tokens=1, cache=False))
    h.run()


def cached(h: Harness, name: str) -> int:
    (event,) = [e for e in h.events if isinstance(e, Admitted) and e.request_id == name]
    return event.cached_tokens


def warm(h: Harness, num_tokens: int = 100) -> None:
    h.add(make_request("before", range(num_tokens), max_tokens=1))
    h.run()


@pytest.mark.parametrize("depth", [1, 2])
def test_found_again_whole_blocks_and_a_part_of_one(depth):
    h = harness(depth=depth)
    warm(h)
    fill(h)
    assert h.scheduler.snapshot()["blocks_demoted"] == 6
    assert h.scheduler.snapshot()["host_blocks_cached"] == 6
    request = make_request("again", [*range(90), *range(200, 210)], max_tokens=3)
    assert h.scheduler.cached_tokens_of(request) == 90
    h.add(request)
    h.run()
    assert cached(h, "again") == 90
    assert h.scheduler.snapshot()["blocks_promoted"] == 5
    # The block of which only a part was wanted stays where it is.
    assert h.scheduler.snapshot()["host_blocks_cached"] == 1


def test_off_or_not_worth_it():
    for h in (harness(host_tier=False), harness(host=0), harness(link=0.0), harness(link=1.0)):
        # A step costs 10 ms here, so a block that takes 1,000 s to load is computed sooner.
        warm(h)
        fill(h)
        snapshot = h.scheduler.snapshot()
        assert (snapshot["blocks_demoted"], snapshot["host_blocks_cached"]) == (0, 0)
        h.add(make_request("again", range(100), max_tokens=1))
        h.run()
        assert cached(h, "again") == 0


def test_the_longest_unused_gives_way_leaves_first():
    h = harness(host=8)
    warm(h)
    fill(h)
    h.add(make_request("other", range(300, 400), max_tokens=1))
    h.run()
    fill(h, "filler 2")
    assert h.scheduler.snapshot()["host_blocks_cached"] == 8
    for name, prompt, tokens in (("old", range(100), 32), ("new", range(300, 400), 96)):
        assert h.scheduler.cached_tokens_of(make_request(name, prompt, max_tokens=1)) == tokens
    h.scheduler.check_integrity()


def test_parked_requests_come_first():
    """Swapping takes the room of cached prefixes, and none that parked requests hold is taken for a prefix."""
    h = harness(host=12, preemption="swap", block_size=16)
    h.scheduler._life.reserve._min = h.scheduler._life.reserve.horizon = 0
    warm(h, 160)
    fill(h)
    assert h.scheduler.snapshot()["host_blocks_cached"] == 10
    for number in range(3):
        h.add(
            make_request(f"r{number}", range(1000 * number, 1000 * number + 90), max_tokens=60, cache=False)
        )
    h.run()
    assert any(isinstance(e, Preempted) and e.kind is PreemptionKind.SWAP for e in h.events)
    assert h.scheduler.snapshot()["host_blocks_cached"] < 10


def test_computed_again_takes_the_place_of_the_host_copy():
    h = harness()
    warm(h)
    fill(h)
    h.scheduler.kv._loading_pays = lambda: False
    h.add(make_request("again", range(100), max_tokens=1))
    h.run()
    assert cached(h, "again") == 0
    snapshot = h.scheduler.snapshot()
    assert (snapshot["host_blocks_cached"], snapshot["host_blocks_used"]) == (0, 0)
    assert h.scheduler.cached_tokens_of(make_request("x", range(100), max_tokens=1)) == 96


def test_salts_stay_apart_on_the_host_too():
    h = harness()
    h.add(make_request("before", range(100), max_tokens=1, salt="a"))
    h.run()
    fill(h)
    assert h.scheduler.cached_tokens_of(make_request("x", range(100), max_tokens=1, salt="b")) == 0
    assert h.scheduler.cached_tokens_of(make_request("x", range(100), max_tokens=1, salt="a")) == 96
