"""Many decode steps at once, where the scheduler has nothing to decide: a simulator's short cut.

While nobody waits, nobody ends and no prompt is under way, every plan is the one before it with each branch one token
further. `Stretch.advance(k)` leaves the scheduler exactly as `k` pairs of `commit` and `plan` would have left it, block
for block; a test compares the two. Only whoever makes up the tokens can use it, so production never does.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.kv_manager import KVManager
from octavo.scheduler.lifecycle import Lifecycle
from octavo.scheduler.plan_builder import PlanRecord
from octavo.scheduler.sequence import Sequence
from octavo.scheduler.stats import SchedulerStats


class Stretch:
    """Branches that decode and the steps for which nothing else happens."""

    def __init__(
        self,
        decodes: list[Sequence],
        max_steps: int,
        kv: KVManager,
        records: Iterable[PlanRecord],
        stats: SchedulerStats,
    ) -> None:
        self.num_rows = len(decodes)
        self._decodes = decodes
        self._kv = kv
        self._records = records
        self._stats = stats
        self.max_steps = self._affordable(max_steps)

    def _affordable(self, max_steps: int) -> int:
        """Steps for which free blocks last. Blocks on their way to the host tier are planned: none may leave."""
        kv = self._kv
        free = kv.pool.num_free - (kv.pool.num_cached_free if kv.host.num_blocks else 0)
        while max_steps and len(self._allocations(max_steps)) > free:
            max_steps //= 2
        return max_steps

    def _allocations(self, num_steps: int) -> list[tuple[int, int]]:
        """(step, index of the branch) of every block that is needed, in the order in which plans take them."""
        size = self._kv.block_size
        return sorted(
            (step, index)
            for index, seq in enumerate(self._decodes)
            for step in range(-seq.num_computed_tokens % size, num_steps, size)
        )

    def advance(self, num_steps: int, token: int) -> int:
        """`num_steps` commits, each followed by a plan; every branch gets `token` at each. Returns the last step's id.

        `num_steps` is at most `max_steps` and `token` ends nobody.
        """
        assert 0 < num_steps <= self.max_steps
        decodes, pool, stats = self._decodes, self._kv.pool, self._stats
        allocations = self._allocations(num_steps)
        used = pool.num_used
        for _, index in allocations:
            decodes[index].block_table.append(pool.allocate())
        tokens = array("i", [token]) * num_steps
        for seq in decodes:
            seq.token_ids += tokens
            seq.num_total_tokens += num_steps
            seq.num_computed_tokens += num_steps
            seq.num_planned_outputs += num_steps
        count = len(decodes)
        step_id = 0
        for record in self._records:
            record.step_id += num_steps
            record.context_tokens += num_steps * count
            step_id = record.step_id
        stats.steps += num_steps
        stats.scheduled_tokens += num_steps * count
        stats.sampled_tokens += num_steps * count
        stats.block_steps += num_steps * used + sum(num_steps - step for step, _ in allocations)
        if allocations and pool.num_used > stats.peak_blocks:
            # Waste at the step that reached the peak: every step since then has filled a slot of each branch.
            stats.peak_blocks = pool.num_used
            since = num_steps - 1 - allocations[-1][0]
            stats.peak_wasted_slots = self._kv.num_wasted_slots(decodes) + since * count
        return step_id


def find_stretch(
    config: SchedulerConfig,
    life: Lifecycle,
    kv: KVManager,
    in_flight: Iterable[PlanRecord],
    stats: SchedulerStats,
) -> Stretch | None:
    """The stretch that begins now, between a plan and the next commit; None where there is something to decide."""
    if life.returning or life.moving or life.to_publish or life.released_rows or life.events:
        return None
    if life.swapped.head is not None or life.waiting.is_shared:
        return None
    decodes: list[Sequence] = []
    max_steps = 1 << 30
    for group in life.running:
        if not group.forked or group.beams is not None or group.first_token_at is None:
            return None
        for seq in group.live:
            left = group.max_tokens - seq.num_planned_outputs
            if left <= 0 or seq.row is None or seq.tail_shared:
                return None
            if seq.num_total_tokens - seq.num_computed_tokens != 1:
                return None
            max_steps = min(max_steps, left)
            decodes.append(seq)
        if group.request.stop_ids:
            return None
    head = life.waiting.head
    if head is not None and len(decodes) + head.num_branches <= min(
        config.max_num_seqs, config.max_num_batched_tokens
    ):
        return None
    records = list(in_flight)
    if not decodes or len(records) != config.pipeline_depth:
        return None
    if any(record.num_tokens != len(decodes) or record.samples != decodes for record in records):
        return None
    stretch = Stretch(decodes, max_steps, kv, records, stats)
    return stretch if stretch.max_steps > 0 else None
