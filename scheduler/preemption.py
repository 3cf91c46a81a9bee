"""Who gives way when blocks run out.

Victims are chosen by rule (DESIGN §4): lowest priority, then least lost work per freed block, then youngest; the
oldest of the highest priority never, so the system always makes progress. How a victim is parked is priced by
the scheduler, which knows the ways.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from octavo.scheduler.kv_manager import KVManager
from octavo.scheduler.sequence import SequenceGroup

PROTECTED_STEPS = 32
"""Steps after a return in which a request is no victim, while there is any other."""


@dataclass(frozen=True, slots=True)
class Loss:
    """What parking one group would free and cost."""

    freed_blocks: int
    lost_tokens: int
    """Tokens with KV in blocks that nobody else holds."""


def loss_of(group: SequenceGroup, kv: KVManager) -> Loss:
    freed = lost = 0
    for seq in group.live:
        exclusive = kv.num_exclusive(seq)
        spare = len(seq.block_table) * kv.block_size - seq.num_computed_tokens
        freed += exclusive
        lost += max(0, exclusive * kv.block_size - spare)
    return Loss(freed, lost)


def choose_victim(
    running: Iterable[SequenceGroup], kv: KVManager, step_id: int
) -> tuple[SequenceGroup, Loss] | None:
    """The group to park, of `running` in order of service; None when only the one that never gives way is left."""
    candidates = [(group, loss_of(group, kv)) for group in list(running)[1:]]
    # Groups that share all their blocks free none alone, but all of them together may: they come last.
    candidates = [pair for pair in candidates if pair[1].freed_blocks] or candidates
    open_ones = [pair for pair in candidates if pair[0].protected_until_step <= step_id]

    def key(pair: tuple[SequenceGroup, Loss]) -> tuple[int, float, int]:
        group, loss = pair
        return (-group.request.priority, loss.lost_tokens / max(1, loss.freed_blocks), -group.arrival_number)

    return min(open_ones or candidates, key=key, default=None)
