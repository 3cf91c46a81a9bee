"""Which nodes of the Ray cluster are about to go: drained by hand, by its autoscaler, or by a notice of preemption.

Ray says so through one call that has no public name in 2.60; its own Train and Serve use the same one. A node that is
drained takes no new actors. Those that run there are not told, and at the deadline whoever gave the notice takes the
machine away.
"""

from __future__ import annotations

import time

NO_DEADLINE_SECONDS = 30.0
"""To leave a node that goes at no said time."""
MARGIN_SECONDS = 2.0
"""A node must be empty so long before its deadline: what is left goes on elsewhere while it still can."""


def leaving_nodes() -> dict[str, float]:
    """Ids (hex) of the nodes that are drained, each with the seconds left to leave it. Blocks while it asks.

    Raises Ray's errors when the cluster's store does not answer.
    """
    from ray._private.state import state

    return {
        node_id: seconds_left(deadline_ms, time.time())
        for node_id, deadline_ms in state.get_draining_nodes().items()
    }


def seconds_left(deadline_ms: int, now: float) -> float:
    """Until a node must be empty. `deadline_ms`: Unix time in ms, 0 for none; `now`: Unix time in seconds."""
    if deadline_ms == 0:
        return NO_DEADLINE_SECONDS
    return max(0.0, deadline_ms / 1000 - now - MARGIN_SECONDS)
