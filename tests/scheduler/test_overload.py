"""Who waits, for how long, and who is refused: priorities that age, tenants that share, deadlines, a full queue."""

from __future__ import annotations

import dataclasses

import pytest

from octavo.protos.errors import OverloadedError
from octavo.protos.types import FinishReason
from octavo.scheduler.events import Admitted, Finished
from octavo.scheduler.step_time import StepTimeModel

from .support import Harness, make_request


def one_at_a_time(**options) -> Harness:
    return Harness(num_blocks=200, max_num_seqs=1, budget=64, **options)


def ask(h: Harness, name: str, *, tenant: str = "", timeout: float | None = None, prompt: int = 20, **params):
    request = make_request(name, range(prompt), cache=False, **{"max_tokens": 4, **params})
    h.add(dataclasses.replace(request, tenant=tenant, timeout_seconds=timeout))


def admitted(h: Harness) -> list[str]:
    return [event.request_id for event in h.events if isinstance(event, Admitted)]


def test_waiting_lifts_a_low_priority_past_later_ones():
    h = one_at_a_time(priority_aging_seconds=5.0)
    ask(h, "running", max_tokens=40)
    h.step()
    ask(h, "batch", priority=1)
    h.now += 4.0
    ask(h, "soon", priority=0)
    h.now += 2.0
    ask(h, "late", priority=0)
    h.run()
    assert admitted(h) == ["running", "soon", "batch", "late"]


def test_without_aging_priority_is_strict():
    h = one_at_a_time(priority_aging_seconds=float("inf"))
    ask(h, "running", max_tokens=40)
    h.step()
    ask(h, "batch", priority=1)
    h.now += 1e6
    ask(h, "late", priority=0)
    h.run()
    assert admitted(h) == ["running", "late", "batch"]


def test_tenants_share_however_many_requests_one_sends():
    h = one_at_a_time()
    for number in range(12):
        ask(h, f"flood {number}", tenant="a")
    for number in range(4):
        ask(h, f"drop {number}", tenant="b")
    h.run()
    order = [name.split()[0] for name in admitted(h)]
    assert order[:8].count("drop") == 4, order
    assert [name for name in admitted(h) if name.startswith("flood")] == [f"flood {n}" for n in range(12)]


def test_share_is_of_tokens_not_of_requests():
    h = one_at_a_time()
    for number in range(6):
        ask(h, f"long {number}", tenant="a", prompt=400)
        ask(h, f"short {number}", tenant="b", prompt=40)
    for number in range(6, 40):
        ask(h, f"short {number}", tenant="b", prompt=40)
    h.run()
    names = admitted(h)
    before = names[: names.index("long 3")]
    assert 18 <= sum(name.startswith("short") for name in before) <= 36


def test_nobody_saves_up_while_away():
    h = one_at_a_time()
    for number in range(6):
        ask(h, f"a{number}", tenant="a")
        ask(h, f"c{number}", tenant="c")
    for _ in range(30):
        h.step()
    for number in range(6):
        ask(h, f"b{number}", tenant="b")
    h.run()
    tail = admitted(h)[admitted(h).index("b0") :]
    assert tail[:6].count("b0") + tail[:6].count("b1") + tail[:6].count("b2") <= 3


def test_priority_goes_before_fairness_and_waiting_lifts_across_tenants():
    h = one_at_a_time(priority_aging_seconds=5.0)
    ask(h, "running", max_tokens=60)
    h.step()
    ask(h, "batch", tenant="a", priority=1)
    for number in range(3):
        ask(h, f"chat {number}", tenant="b")
    h.now += 1.0
    for _ in range(70):
        h.step()
        if len(admitted(h)) > 1:
            break
    assert admitted(h)[1] == "chat 0"
    h.now += 5.0
    h.run()
    assert admitted(h).index("batch") == 2, "it has waited for a step of priority and has been served nothing"


@pytest.mark.parametrize("state", ["waiting", "running", "beams"])
def test_a_deadline_ends_work_that_nobody_waits_for(state):
    h = one_at_a_time()
    ask(
        h,
        "running",
        max_tokens=60,
        timeout=None if state == "waiting" else 1.0,
        **({"beam_width": 1} if state == "beams" else {}),
    )
    ask(h, "queued", timeout=1.0)
    for _ in range(3):
        h.step()
    assert h.scheduler.expire(h.now) == []
    h.now += 1.0
    events = h.scheduler.expire(h.now)
    h.take(events)
    ended = {event.request_id: event for event in events if isinstance(event, Finished)}
    assert set(ended) == ({"queued"} if state == "waiting" else {"running", "queued"})
    for event in ended.values():
        assert event.reason is FinishReason.ERROR
        assert event.error_name == "DeadlineExceededError"
        assert "timeout of 1 s" in event.error
        assert event.request_finished
    h.scheduler.check_integrity()
    assert h.scheduler.expire(h.now) == []
    h.run()


def test_a_deadline_in_time_changes_nothing():
    h = one_at_a_time()
    ask(h, "r", timeout=100.0)
    h.run()
    h.now += 1000.0
    assert h.scheduler.expire(h.now) == []


def test_the_queue_is_bounded_in_tokens_and_says_when_to_come_back():
    h = one_at_a_time(max_waiting_tokens=1000)
    h.scheduler.step_time.__init__(prefill_tokens_per_second=100.0)
    ask(h, "running", prompt=3000, max_tokens=4)
    h.step()
    ask(h, "a", prompt=900)
    with pytest.raises(OverloadedError, match=r"900 prompt tokens wait.*limit is 1000") as refused:
        ask(h, "b", prompt=200)
    assert refused.value.retry_after_seconds == pytest.approx(
        StepTimeModel(prefill_tokens_per_second=100.0).prefill_seconds(1100, chunk_tokens=64) / 8,
        rel=0.1,
    )
    ask(h, "c", prompt=100)
    h.run()
