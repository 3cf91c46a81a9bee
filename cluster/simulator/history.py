"""How servers of language models came to be what they are, one step at a time, on the same trace.

Each system is the one before it and one thing more. All but the first are the production scheduler, told less than it
can do: a contiguous reservation is a block as long as the longest request, a prompt is whole where the budget has no
end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from octavo.protos.errors import ConfigError

BOUNDLESS = 2**30
"""Tokens: a budget that never cuts a prompt."""


@dataclass(frozen=True, slots=True)
class System:
    """`scheduler` are fields of `SchedulerConfig` in place of what is configured."""

    adds: str
    """What it has that the one before has not."""
    scheduler: dict[str, Any]
    policy: str | None = "least_loaded"
    """Of the router; None: as configured."""
    static: bool = False
    reserves: bool = False
    """Each request holds room for the longest one from its start to its end."""


_WHOLE = {"max_num_batched_tokens": BOUNDLESS}
_PLAIN = {"prefix_cache": False, "host_tier": False, "preemption": "recompute", "victims": "youngest"}

SYSTEMS: dict[str, System] = {
    "static": System(
        "batches that wait for their longest member, as of FasterTransformer", {}, static=True, reserves=True
    ),
    "continuous": System(
        "a batch made anew at every step (Orca, OSDI 2022)", {**_PLAIN, **_WHOLE}, reserves=True
    ),
    "paged": System("blocks instead of reservations (PagedAttention, SOSP 2023)", {**_PLAIN, **_WHOLE}),
    "chunked": System("prompts cut to one token budget (Sarathi-Serve, OSDI 2024)", _PLAIN),
    "cached": System(
        "prefixes found again (RadixAttention, 2023), and requests sent to where they are",
        {"preemption": "recompute", "victims": "youngest", "host_tier": False},
        policy="prefix",
    ),
    "octavo": System(
        "requests sent to where they start soonest; victims and their way chosen by price", {}, policy=None
    ),
}


def system(name: str) -> System:
    """Raises `ConfigError` for one that is unknown."""
    if name not in SYSTEMS:
        raise ConfigError(f"system must be one of {', '.join(SYSTEMS)}, got {name!r}", param="system")
    return SYSTEMS[name]
