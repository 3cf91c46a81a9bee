"""Whether a waiting group may start: its blocks must fit beside what those who run have been promised.

Knows nothing of plans or victims. Admission that leaves no room for growth is what makes preemption thrash.
"""

from __future__ import annotations

from collections.abc import Iterable

from octavo.scheduler.kv_manager import KVManager, PrefixHit, blocks_for
from octavo.scheduler.sequence import Sequence, SequenceGroup


class GrowthReserve:
    """Blocks that admission leaves free for those who run: room for `horizon` more tokens of each branch.

    The horizon doubles with every preemption and falls back slowly as requests finish (hysteresis), so a load
    that was admitted too eagerly is not admitted the same way again at once.
    """

    def __init__(self, block_size: int, max_model_len: int) -> None:
        self._block_size = block_size
        self._min = block_size
        self._max = max_model_len
        self.horizon = self._min

    def on_preemption(self) -> None:
        self.horizon = min(self._max, self.horizon * 2)

    def on_finish(self) -> None:
        self.horizon = max(self._min, self.horizon * 7 // 8)

    def fits(
        self, group: SequenceGroup, hit: PrefixHit, running: Iterable[SequenceGroup], kv: KVManager
    ) -> bool:
        """Whether `group`, its first branch starting on `hit`, can start and need not be parked again soon.

        Alone it needs only its present blocks: admission has seen to it that any one request can finish.
        """
        size = self._block_size
        prompt_blocks = group.request.num_prompt_tokens // size
        need = kv.num_blocks_to_admit(group.live[0], hit)
        need += sum(blocks_for(len(seq.token_ids), size) - prompt_blocks for seq in group.live[1:])
        return self.has_room(group, need, running, kv)

    def has_room(
        self, group: SequenceGroup, need: int, running: Iterable[SequenceGroup], kv: KVManager
    ) -> bool:
        """Whether `group`, which takes `need` blocks at once, fits beside those who run and their growth."""
        size = self._block_size
        promised = growth = 0
        alone = True
        for other in running:
            alone = False
            for seq in other.live:
                promised += max(0, blocks_for(seq.num_total_tokens, size) - len(seq.block_table))
                growth += self._growth(seq)
        if alone:
            return need <= kv.num_free
        growth += self._growth(group.live[0]) * group.num_branches
        return need + promised + growth <= kv.num_free

    def _growth(self, seq: Sequence) -> int:
        return blocks_for(min(self.horizon, seq.group.max_tokens - seq.num_planned_outputs), self._block_size)
