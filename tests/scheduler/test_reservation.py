"""A waiting request's prediction of cached tokens follows the tree, and says why it changed."""

from __future__ import annotations

from octavo.scheduler.events import Admitted, Queued, Repredicted, RepredictionCause

from .support import Harness, make_request

BLOCK = 4


def harness(**config) -> Harness:
    """One row only, so that whoever comes second waits."""
    h = Harness(num_blocks=12, block_size=BLOCK, max_num_seqs=1, budget=64, **config)
    h.scheduler.step_time.observe(num_tokens=10, num_rows=1, context_tokens=10, seconds=1.0)
    return h


def told(h: Harness, name: str) -> tuple[int, list[Repredicted], int]:
    """(predicted when it was queued, what was told of changes, found at its admission)"""
    events = [event for event in h.events if event.request_id == name]
    queued = next(event for event in events if isinstance(event, Queued))
    admitted = next(event for event in events if isinstance(event, Admitted))
    return (
        queued.cached_tokens,
        [event for event in events if isinstance(event, Repredicted)],
        admitted.cached_tokens,
    )


def test_a_prediction_that_nothing_touches_is_kept_without_a_word():
    h = harness()
    h.add(make_request("before", range(20), max_tokens=2))
    h.run()
    h.add(make_request("running", [50, 51], max_tokens=8))
    h.step()
    h.add(make_request("waits", range(20), max_tokens=2))
    assert h.scheduler.predicted_tokens("waits") == 19
    h.run()
    assert told(h, "waits") == (19, [], 19)


def test_what_others_compute_meanwhile_is_added():
    h = harness()
    h.add(make_request("running", range(16), max_tokens=6))
    h.add(make_request("waits", range(17), max_tokens=2))
    assert h.scheduler.predicted_tokens("waits") == 0
    h.step()
    h.step()
    assert h.scheduler.predicted_tokens("waits") == 16
    h.run()
    predicted, (change,), found = told(h, "waits")
    assert (predicted, found) == (0, 16)
    assert (change.predicted_tokens, change.found_tokens) == (0, 16)
    assert change.causes == (RepredictionCause.COMPUTED,)


def test_what_is_evicted_meanwhile_is_taken_off():
    h = harness()
    h.add(make_request("before", range(20), max_tokens=2))
    h.run()
    # Takes most of the pool before the waiting one's turn comes.
    h.add(make_request("running", range(100, 130), max_tokens=12))
    h.step()
    h.add(make_request("waits", range(20), max_tokens=2))
    told_first = h.scheduler.predicted_tokens("waits")
    h.run()
    predicted, (change,), found = told(h, "waits")
    assert predicted == told_first > found
    assert RepredictionCause.EVICTED in change.causes


def test_what_moves_to_the_host_is_followed_there():
    """It is cached as before; what has no room there, or leaves it, is not. The harness compares at every step."""
    for num_host_blocks in (2, 8):
        h = harness(num_host_blocks=num_host_blocks, kv_bytes_per_block=1, host_link_bytes_per_second=1e9)
        h.add(make_request("before", range(20), max_tokens=2))
        h.run()
        h.add(make_request("running", range(100, 136), max_tokens=12))
        h.add(make_request("waits", range(20), max_tokens=2))
        h.run()
        assert h.scheduler.kv.num_blocks_demoted >= num_host_blocks // 2
        predicted, changes, found = told(h, "waits")
        assert predicted == 19
        if num_host_blocks == 8:
            assert found >= 4 * BLOCK, "it came back from the host"
        else:
            assert found < predicted
            assert changes[0].causes


def test_one_that_leaves_while_it_waits_leaves_nothing_behind():
    h = harness()
    h.add(make_request("running", range(16), max_tokens=6))
    h.add(make_request("waits", range(17), max_tokens=2))
    h.abort("waits")
    h.run()
    kept = vars(h.scheduler._life.reservations)
    assert [name for name in ("_held", "_at", "_stale", "_meets_host") if kept[name]] == []
