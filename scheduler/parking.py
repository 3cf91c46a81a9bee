"""Where a request that gives way leaves its KV: nowhere (recompute) or in the host pool (swap), by price.

Owns the prices and the ways out and in (DESIGN §4). Swapping costs two trips of the blocks that nobody else holds over
the host link; recomputing costs the prefill of their tokens. Blocks that others hold too are neither charged nor
moved: the prefix tree finds them again, and where it does not, what is missing is computed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.events import PreemptionKind
from octavo.scheduler.kv_manager import KVManager, blocks_for
from octavo.scheduler.plan_builder import PlanBuilder
from octavo.scheduler.sequence import ParkedBlocks, Sequence, SequenceGroup
from octavo.scheduler.step_time import StepTimeModel


@dataclass(frozen=True, slots=True)
class Prices:
    """What parking one group frees, and what either way costs in seconds until it is where it was."""

    freed_blocks: int
    lost_tokens: int
    """Tokens with KV in the freed blocks."""
    recompute_seconds: float
    swap_seconds: float | None
    """None where swapping is impossible: no host pool, no room in it, or no known bandwidth."""

    @property
    def seconds(self) -> float:
        return (
            self.recompute_seconds
            if self.swap_seconds is None
            else min(self.recompute_seconds, self.swap_seconds)
        )


def loading_pays(config: SchedulerConfig, step_time: StepTimeModel) -> bool:
    """Whether the KV of a prefix comes from the host sooner than it is computed again."""
    if not config.host_tier or not config.num_host_blocks:
        return False
    bandwidth = config.host_link_bytes_per_second
    if bandwidth <= 0:
        return config.preemption == "swap"
    chunk = config.max_num_batched_tokens
    compute = step_time.prefill_seconds(chunk, chunk_tokens=chunk) / chunk * config.block_size
    return config.kv_bytes_per_block / bandwidth < compute


class Parking:
    """The host pool of one worker, and the choice between it and computing again."""

    def __init__(self, config: SchedulerConfig, kv: KVManager, step_time: StepTimeModel) -> None:
        self._config = config
        self._kv = kv
        self._step_time = step_time
        self.host = kv.host

    def own_blocks(self, group: SequenceGroup) -> list[int]:
        """Blocks that only this group's branches hold, each once, in order of the tables."""
        held = Counter(block for seq in group.live for block in seq.block_table)
        return [block for block, count in held.items() if self._kv.pool.ref_count(block) == count]

    def price(self, group: SequenceGroup) -> Prices:
        own = self.own_blocks(group)
        size = self._kv.block_size
        owned = set(own)
        tails = {
            seq.block_table[-1]: len(seq.block_table) * size - seq.num_computed_tokens
            for seq in group.live
            if seq.block_table and seq.block_table[-1] in owned
        }
        tokens = len(own) * size - sum(tails.values())
        recompute = self._step_time.prefill_seconds(tokens, chunk_tokens=self._config.max_num_batched_tokens)
        swap = None
        bandwidth = self._config.host_link_bytes_per_second
        if len(own) <= self.host.num_free and (bandwidth > 0 or self._config.preemption == "swap"):
            swap = 2 * len(own) * self._config.kv_bytes_per_block / bandwidth if bandwidth > 0 else 0.0
        return Prices(len(own), tokens, recompute, swap)

    def choose(self, prices: Prices) -> PreemptionKind:
        """The cheaper way, or the one that is configured while it is possible."""
        if prices.swap_seconds is None or self._config.preemption == "recompute":
            return PreemptionKind.RECOMPUTE
        if self._config.preemption == "swap" or prices.swap_seconds < prices.recompute_seconds:
            return PreemptionKind.SWAP
        return PreemptionKind.RECOMPUTE

    def move_out(self, group: SequenceGroup, plan: PlanBuilder) -> None:
        """Give every own block a host block; the worker copies before anything else of this step."""
        moved: dict[int, int] = {}
        for block in self.own_blocks(group):
            moved[block] = self.host.allocate()
            plan.swap_out(block, moved[block])
        free_reference = set(moved)
        for seq in group.live:
            if not seq.block_table:
                continue
            # Whoever shares a block shares all before it, so what is moved is the end of each table.
            kept = sum(block not in moved for block in seq.block_table)
            host_blocks = [moved[block] for block in seq.block_table[kept:]]
            for block, host_block in zip(seq.block_table[kept:], host_blocks, strict=True):
                if block in free_reference:
                    free_reference.remove(block)
                else:
                    self.host.acquire(host_block)
            seq.parked = ParkedBlocks(kept, host_blocks, seq.num_computed_tokens)

    def share(self, source: Sequence, seq: Sequence) -> None:
        """`seq` has been forked from a parked branch and holds the same host blocks."""
        if source.parked is not None:
            for host_block in source.parked.host_blocks:
                self.host.acquire(host_block)
            seq.parked = source.parked

    def forget(self, seq: Sequence) -> None:
        """The branch ended, or will be computed again: its host blocks are free."""
        if seq.parked is not None:
            self.host.release(seq.parked.host_blocks)
            seq.parked = None

    def num_blocks_to_return(self, group: SequenceGroup) -> int:
        """Free device blocks that `move_in` of all branches takes, and the next token of each after it.

        Exact: with one block less a returned branch could not run, with one more asked for a request that fills
        the pool would never return.
        """
        size = self._kv.block_size
        need: set[tuple[str, int]] = set()
        next_tokens = 0
        last_blocks: Counter[int] = Counter()
        for seq in group.live:
            found, parked = self._found(seq), seq.parked
            need |= {("revived", block) for block in found if self._kv.pool.ref_count(block) == 0}
            if parked is None or len(found) < parked.num_kept_blocks:
                missing = blocks_for(len(seq.token_ids), size) - len(found)
                need |= {(f"computed {seq.branch}", index) for index in range(missing)}
                continue
            need |= {("host", block) for block in parked.host_blocks[len(found) - parked.num_kept_blocks :]}
            if parked.num_computed_tokens % size == 0:
                next_tokens += 1
            elif parked.host_blocks:
                last_blocks[parked.host_blocks[-1]] += 1
        # A last block that branches share is copied by all of them but one.
        next_tokens += sum(count - 1 for count in last_blocks.values())
        return len(need) + next_tokens

    def move_in(self, group: SequenceGroup, plan: PlanBuilder) -> int:
        """Rebuild the tables of all branches; returns the tokens whose KV is there again.

        What is still cached on the device is shared and not copied. Where the shared beginning is gone, the host
        blocks behind it are no use: the branch starts from what was found.
        """
        tokens = 0
        arrived: dict[int, int] = {}
        for seq in group.live:
            parked = seq.parked
            blocks = self._found(seq)
            self._kv.attach_blocks(seq, blocks)
            if parked is not None and len(blocks) >= parked.num_kept_blocks:
                for host_block in parked.host_blocks[len(blocks) - parked.num_kept_blocks :]:
                    if host_block in arrived:
                        self._kv.pool.acquire(arrived[host_block])
                    else:
                        arrived[host_block] = self._kv.pool.allocate()
                        plan.swap_in(host_block, arrived[host_block])
                    seq.block_table.append(arrived[host_block])
                seq.num_computed_tokens = parked.num_computed_tokens
            if parked is not None:
                # Free once the plan is complete: a swap-out of this plan must not land on what it reads.
                plan.held_host_blocks += parked.host_blocks
                seq.parked = None
            tokens += seq.num_computed_tokens
        holders = Counter(seq.block_table[-1] for seq in group.live if seq.block_table)
        for seq in group.live:
            if seq.block_table and holders[seq.block_table[-1]] > 1:
                seq.tail_shared = seq.num_computed_tokens % self._kv.block_size != 0
        return tokens

    def _found(self, seq: Sequence) -> list[int]:
        """Whole blocks of the branch's computed tokens that the device still holds."""
        if not self._kv.caches(seq.group.request):
            return []
        computed = seq.parked.num_computed_tokens if seq.parked is not None else 0
        limit = min(max(computed, 0), len(seq.token_ids) - 1) // self._kv.block_size
        return self._kv.match(seq.group.root_key, seq.token_ids.tobytes(), limit)

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raise `IntegrityError` on a leaked or doubly owned host block."""
        self.host.check_integrity(
            block for seq in sequences if seq.parked is not None for block in seq.parked.host_blocks
        )
