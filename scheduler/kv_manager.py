"""The scheduler's only door to blocks: block tables grow, fork, share prefixes and shrink here.

Ties BlockPool (who may use a block) and PrefixTree (what a block holds) together and writes what the worker
must know into the plan under construction. Knows nothing of queues, budgets or victims.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from octavo.protos.errors import IntegrityError
from octavo.protos.types import Request
from octavo.scheduler.block_pool import BlockPool
from octavo.scheduler.plan_builder import PlanBuilder
from octavo.scheduler.prefix_tree import TOKEN_BYTES, PrefixTree, RootKey, common_tokens
from octavo.scheduler.sequence import Sequence, SequenceGroup


def blocks_for(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """A prefix whose KV is there: whole blocks to share, and perhaps the beginning of one to copy."""

    blocks: list[int]
    tail_block: int | None = None
    num_tokens: int = 0
    num_published_blocks: int | None = None
    """Leading `blocks` that stand in the tree; None: all."""


class KVManager:
    """Block tables of all sequences of one worker."""

    def __init__(self, num_blocks: int, block_size: int, *, prefix_cache: bool) -> None:
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self.min_tail_tokens = max(1, block_size // 4)
        """A part of a block is worth a copy from here on; every chat template shares its first token or two."""
        self.tree = PrefixTree(num_blocks, block_size)
        self.pool = BlockPool(num_blocks, is_cached=self.tree.__contains__, on_evict=self.tree.evict)

    @property
    def num_free(self) -> int:
        return self.pool.num_free

    def caches(self, request: Request) -> bool:
        return self.prefix_cache and request.use_prefix_cache

    def find_prefix(self, group: SequenceGroup, tokens: bytes) -> PrefixHit:
        """The longest known prefix of `tokens` (int32), one token short of all: that one gives the logits."""
        if not self.caches(group.request):
            return PrefixHit([])
        return self.find(group.root_key, tokens)

    def find(self, root_key: RootKey, tokens: bytes) -> PrefixHit:
        """As `find_prefix`, for a key and tokens. Changes nothing."""
        limit = len(tokens) // TOKEN_BYTES - 1
        blocks = self.tree.match(root_key, tokens, limit // self.block_size)
        start = len(blocks) * self.block_size
        rest = tokens[start * TOKEN_BYTES : min(limit, start + self.block_size - 1) * TOKEN_BYTES]
        inside = self.tree.match_inside(root_key, blocks[-1] if blocks else None, rest)
        if inside is None or inside[1] < self.min_tail_tokens:
            return PrefixHit(blocks, num_tokens=start)
        return PrefixHit(blocks, tail_block=inside[0], num_tokens=start + inside[1])

    def find_in(self, source: Sequence, num_computed_tokens: int, tokens: bytes) -> PrefixHit:
        """As `find_prefix`, in the table of a running branch of which plans before this one have computed so many
        tokens: what it has that the tree has not, its last block above all, is shared too."""
        have = source.token_ids[:num_computed_tokens].tobytes()
        limit = len(tokens) // TOKEN_BYTES - 1
        shared = min(limit, common_tokens(have, tokens))
        full, rest = divmod(shared, self.block_size)
        return PrefixHit(
            source.block_table[:full],
            tail_block=source.block_table[full] if rest else None,
            num_tokens=shared,
            num_published_blocks=source.num_published_blocks,
        )

    def without_tail(self, hit: PrefixHit) -> PrefixHit:
        """Only its whole blocks."""
        return replace(hit, tail_block=None, num_tokens=len(hit.blocks) * self.block_size)

    def num_blocks_to_admit(self, seq: Sequence, hit: PrefixHit) -> int:
        """Free blocks that starting `seq` on `hit` takes: those to compute, and cached free ones to revive."""
        revived = hit.blocks if hit.tail_block is None else [*hit.blocks, hit.tail_block]
        return (
            blocks_for(len(seq.token_ids), self.block_size)
            - len(hit.blocks)
            + sum(self.pool.ref_count(block) == 0 for block in revived)
        )

    def attach_prefix(self, seq: Sequence, hit: PrefixHit, plan: PlanBuilder) -> None:
        """Start an empty table with the tree's blocks, whose KV is computed; a part of a block is copied."""
        self.attach_blocks(seq, hit.blocks)
        if hit.num_published_blocks is not None:
            seq.num_published_blocks = min(seq.num_published_blocks, hit.num_published_blocks)
        seq.num_computed_tokens = hit.num_tokens
        if hit.tail_block is not None:
            # Held until the plan is complete: nobody may be given, and write, the source of a copy in it.
            self.pool.acquire(hit.tail_block)
            plan.held_blocks.append(hit.tail_block)
            seq.block_table.append(self.pool.allocate())
            plan.copy_block(hit.tail_block, seq.block_table[-1])

    def attach_blocks(self, seq: Sequence, blocks: list[int]) -> None:
        """Start an empty table with whole blocks of the tree."""
        assert not seq.block_table
        for block in blocks:
            self.pool.acquire(block)
        seq.block_table = list(blocks)
        seq.num_published_blocks = len(blocks)
        seq.num_computed_tokens = len(blocks) * self.block_size

    def finish_plan(self, plan: PlanBuilder) -> None:
        """Let go of what was held for the plan's copies."""
        self.pool.release(plan.held_blocks)
        plan.held_blocks.clear()

    def share_prefix(self, source: Sequence, seq: Sequence, num_tokens: int) -> None:
        """Start an empty table with `source`'s blocks of its first `num_tokens` tokens, which are computed."""
        assert not seq.block_table
        assert source.num_computed_tokens >= num_tokens
        seq.block_table = source.block_table[: blocks_for(num_tokens, self.block_size)]
        for block in seq.block_table:
            self.pool.acquire(block)
        seq.num_published_blocks = min(source.num_published_blocks, num_tokens // self.block_size)
        seq.num_computed_tokens = num_tokens
        if num_tokens % self.block_size:
            # The block is shared beyond `num_tokens` as well: whoever writes into it first takes a copy.
            seq.tail_shared = source.tail_shared = True

    def num_new_blocks_for_decodes(self, sequences: Iterable[Sequence]) -> int:
        """Blocks that growing each of `sequences` by one token would take, one after the other."""
        need = 0
        writers: dict[int, int] = {}
        for seq in sequences:
            index, offset = divmod(seq.num_computed_tokens, self.block_size)
            if offset == 0:
                need += 1
            elif seq.tail_shared:
                block = seq.block_table[index]
                writers[block] = writers.get(block, 0) + 1
        # Each writer takes a copy, but whoever is the last to hold the block writes in place.
        return need + sum(min(count, self.pool.ref_count(block) - 1) for block, count in writers.items())

    def max_growth(self, seq: Sequence, num_blocks: int) -> int:
        """Most tokens for which `grow` takes at most `num_blocks` blocks."""
        room = len(seq.block_table) + num_blocks - self._must_copy(seq)
        return max(0, room * self.block_size - seq.num_computed_tokens)

    def _must_copy(self, seq: Sequence) -> bool:
        if not seq.tail_shared:
            return False
        index = seq.num_computed_tokens // self.block_size
        return index < len(seq.block_table) and self.pool.ref_count(seq.block_table[index]) > 1

    def grow(self, seq: Sequence, num_tokens: int, plan: PlanBuilder) -> None:
        """Make room for the next `num_tokens` tokens; a shared block that they fall into is copied first.

        The caller has checked that the pool has them (`max_growth`, `num_new_blocks_for_decodes`).
        """
        table = seq.block_table
        row = seq.row
        assert row is not None
        if seq.tail_shared:
            if self._must_copy(seq):
                index = seq.num_computed_tokens // self.block_size
                shared = table[index]
                table[index] = self.pool.allocate()
                self.pool.release((shared,))
                plan.update_block(row, index, table[index])
                plan.copy_block(shared, table[index])
            seq.tail_shared = False
        for index in range(len(table), blocks_for(seq.num_computed_tokens + num_tokens, self.block_size)):
            block = self.pool.allocate()
            table.append(block)
            plan.update_block(row, index, block)

    def publish(self, seq: Sequence, num_tokens: int) -> list[tuple[int, int]]:
        """Enter the full blocks of the first `num_tokens` tokens, known and planned, into the tree.

        Returns (index, block) for each block of the table that gave way to one with the same content: two
        requests that computed the same prefix at the same time end up sharing it.
        """
        have, want = seq.num_published_blocks, num_tokens // self.block_size
        if want <= have or not self.caches(seq.group.request):
            return []
        table, size = seq.block_table, self.block_size
        tokens = seq.token_ids[have * size : want * size].tobytes()
        assert len(tokens) == (want - have) * size * TOKEN_BYTES
        after = table[have - 1] if have else None
        replaced = []
        for index, block in enumerate(
            self.tree.extend(seq.group.root_key, after, tokens, table[have:want]), have
        ):
            if block != table[index]:
                self.pool.acquire(block)
                self.pool.release((table[index],))
                table[index] = block
                replaced.append((index, block))
        seq.num_published_blocks = want
        return replaced

    def release(self, seq: Sequence) -> int:
        """Give up all blocks; returns how many became free."""
        freed = self.pool.release(reversed(seq.block_table))
        seq.block_table = []
        seq.num_published_blocks = 0
        seq.tail_shared = False
        return freed

    def num_wasted_slots(self, sequences: Iterable[Sequence]) -> int:
        """Allocated slots that hold no computed token. Only a last block can have some; shared ones count once."""
        tails: dict[int, int] = {}
        for seq in sequences:
            if seq.block_table:
                spare = len(seq.block_table) * self.block_size - seq.num_computed_tokens
                last = seq.block_table[-1]
                tails[last] = min(spare, tails.get(last, spare))
        return sum(tails.values())

    def check_integrity(self, sequences: list[Sequence]) -> None:
        """Raise `IntegrityError` on any block leaked, doubly owned or miscounted (rule R2)."""
        self.pool.check_integrity(block for seq in sequences for block in seq.block_table)
        self.tree.check_integrity()
        for before, block in self.tree.paths():
            if before is not None and self.pool.ref_count(before) < self.pool.ref_count(block):
                raise IntegrityError(f"block {block} is held by someone who does not hold {before} before it")
        for seq in sequences:
            capacity = len(seq.block_table) * self.block_size
            if not 0 <= capacity - seq.num_computed_tokens < self.block_size:
                raise IntegrityError(
                    f"{seq.group.request.request_id}: table of {capacity} slots for its tokens"
                )
            if any(block not in self.tree for block in seq.block_table[: seq.num_published_blocks]):
                raise IntegrityError(f"{seq.group.request.request_id}: a published block left the tree")
