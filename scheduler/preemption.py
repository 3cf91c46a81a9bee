"""Who gives way when blocks run out.

Victims are chosen by rule (DESIGN §4): lowest priority, then least lost work per freed block, then youngest; the
oldest of the highest priority never, so the system always makes progress. What a victim loses is priced by
`parking`, which knows both ways.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from octavo.scheduler.parking import Prices
from octavo.scheduler.sequence import SequenceGroup

PROTECTED_STEPS = 32
"""Steps after a return in which a request is no victim, while there is any other."""


def choose_victim(
    running: Iterable[SequenceGroup], price: Callable[[SequenceGroup], Prices], rule: str, step_id: int
) -> tuple[SequenceGroup, Prices] | None:
    """The group to park, of `running` in order of service; None when only the one that never gives way is left.

    `rule`: "least_lost" or "youngest".
    """
    candidates = [(group, price(group)) for group in list(running)[1:]]
    # Groups that share all their blocks free none alone, but all of them together may: they come last.
    candidates = [pair for pair in candidates if pair[1].freed_blocks] or candidates
    open_ones = [pair for pair in candidates if pair[0].protected_until_step <= step_id]

    def key(pair: tuple[SequenceGroup, Prices]) -> tuple[int, float, float, int]:
        group, prices = pair
        freed = max(1, prices.freed_blocks)
        seconds, tokens = prices.seconds / freed, prices.lost_tokens / freed
        if rule == "youngest":
            seconds = tokens = 0.0
        return (-group.request.priority, seconds, tokens, -group.arrival_number)

    return min(open_ones or candidates, key=key, default=None)
