"""Progress (docs/preemption.md has the sketch of the proof): every load ends, and the first in line never gives way."""

from __future__ import annotations

import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.protos.errors import RequestTooLargeError
from octavo.scheduler.events import Preempted

from .support import Harness, make_request

loads = st.lists(
    st.fixed_dictionaries(
        {
            "prompt": st.integers(1, 60),
            "max_tokens": st.integers(1, 50),
            "priority": st.integers(0, 1),
            "branches": st.sampled_from([{}, {}, {"n": 2}, {"n": 3}, {"beam_width": 2}, {"beam_width": 3}]),
            "shared": st.booleans(),
        }
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=150, deadline=None, derandomize=True, print_blob=False)
@given(
    loads=loads,
    num_blocks=st.integers(6, 20),
    host_blocks=st.sampled_from([0, 4, 60]),
    preemption=st.sampled_from(["auto", "recompute"]),
    depth=st.integers(1, 3),
    foresight=st.booleans(),
)
def test_every_load_ends_and_the_first_in_line_never_gives_way(
    loads, num_blocks, host_blocks, preemption, depth, foresight
):
    h = Harness(
        num_blocks=num_blocks,
        block_size=8,
        budget=32,
        depth=depth,
        num_host_blocks=host_blocks,
        kv_bytes_per_block=1,
        host_link_bytes_per_second=1e3,
        preemption=preemption,
    )
    if not foresight:
        h.scheduler._life.reserve._min = h.scheduler._life.reserve.horizon = 0
    park = h.scheduler._life.park
    firsts = []

    def watched(group, *args):
        firsts.append(group is h.scheduler._life.running.head)
        park(group, *args)

    h.scheduler._life.park = watched
    work = 0
    for number, load in enumerate(loads):
        start = 0 if load["shared"] else 100 * number
        request = make_request(
            f"r{number}",
            range(start, start + load["prompt"]),
            max_tokens=load["max_tokens"],
            priority=load["priority"],
            **load["branches"],
        )
        try:
            h.add(dataclasses.replace(request))
        except RequestTooLargeError:
            continue
        work += (load["prompt"] + load["max_tokens"]) * request.params.num_branches
    # Each token computed once, or as often as its request has been parked; a step computes one at least.
    h.run(limit=50 + 10 * work)
    assert not any(firsts)
    assert h.count(Preempted) == len(firsts)
