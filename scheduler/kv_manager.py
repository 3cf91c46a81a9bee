"""The scheduler's only door to blocks: block tables grow, fork, share prefixes and shrink here.

Ties BlockPool (who may use a block) and PrefixTree (what a block holds) together and writes what the worker
must know into the plan under construction. Knows nothing of queues, budgets or victims.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
    host_blocks: tuple[int, ...] = ()
    """Behind `blocks`: whole blocks of the prefix that are in host memory and would be loaded."""
    tail_host_block: int | None = None
    """Instead of `tail_block`: a block in host memory, loaded for its beginning."""
    meets_host: bool = False
    """Blocks of the prefix are in host memory, whether they would be loaded or not."""


class KVManager:
    """Block tables of all sequences of one worker."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        prefix_cache: bool,
        num_host_blocks: int = 0,
        loading_pays: Callable[[], bool] = lambda: True,
    ) -> None:
        """`loading_pays()`: whether a block is loaded from the host sooner than computed; else none is kept there."""
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self.num_blocks_demoted = 0
        """Evicted blocks of prefixes that moved to the host."""
        self.num_blocks_promoted = 0
        """Of these, loaded again."""
        self.tree = PrefixTree(num_blocks, block_size, num_host_blocks=num_host_blocks)
        self.pool = BlockPool(num_blocks, is_cached=self.tree.__contains__, on_evict=self._leave_device)
        self.host = BlockPool(
            num_host_blocks,
            is_cached=lambda block: num_blocks + block in self.tree,
            on_evict=lambda blocks: self.tree.evict_many([num_blocks + block for block in blocks]),
        )
        """Host blocks: of parked requests, referenced; of prefixes, free and cached, so that they give way."""
        self._loading_pays = loading_pays
        self._plan: PlanBuilder | None = None
        self._arriving: set[int] = set()
        """Host blocks that the plan under construction writes; only a later one can read them."""
        self._planned: set[int] = set()
        """Blocks of the tree that the plan under construction computes. It may share them: a worker writes a step's KV,
        layer by layer, before anything attends to it. It cannot copy them, for copies come before the step."""

    @property
    def num_free(self) -> int:
        return self.pool.num_free

    @property
    def loads_from_host(self) -> bool:
        """Whether a prefix in host blocks would be loaded now, and not computed again."""
        return self._loading_pays()

    def caches(self, request: Request) -> bool:
        return self.prefix_cache and request.use_prefix_cache

    def reads(self, request: Request) -> bool:
        return self.prefix_cache and request.reads_prefix_cache

    def find_prefix(self, group: SequenceGroup, tokens: bytes) -> PrefixHit:
        """The longest known prefix of `tokens` (int32), one token short of all: that one gives the logits."""
        if not self.reads(group.request):
            return PrefixHit([])
        return self.find(group.root_key, tokens)

    def find(self, root_key: RootKey, tokens: bytes) -> PrefixHit:
        """As `find_prefix`, for a key and tokens. Changes nothing."""
        limit = len(tokens) // TOKEN_BYTES - 1
        matched = self.tree.match(root_key, tokens, limit // self.block_size)
        blocks, host_blocks = self._by_tier(matched)
        start = (len(blocks) + len(host_blocks)) * self.block_size
        meets_host = len(matched) > len(blocks)
        hit = PrefixHit(blocks, num_tokens=start, host_blocks=host_blocks, meets_host=meets_host)
        if start < len(matched) * self.block_size:
            return hit
        rest = tokens[start * TOKEN_BYTES : min(limit, start + self.block_size - 1) * TOKEN_BYTES]
        inside = self.tree.match_inside(root_key, matched[-1] if matched else None, rest, skip=self._planned)
        if inside is None:
            return hit
        block, host_block = self._by_tier([inside[0]])
        if block:
            return replace(hit, tail_block=block[0], num_tokens=start + inside[1])
        if host_block:
            return replace(hit, tail_host_block=host_block[0], num_tokens=start + inside[1], meets_host=True)
        return hit

    def match(self, root_key: RootKey, tokens: bytes, max_blocks: int) -> list[int]:
        """Whole blocks of a known prefix that are on the device."""
        return self._by_tier(self.tree.match(root_key, tokens, max_blocks))[0]

    def _by_tier(self, matched: list[int]) -> tuple[list[int], tuple[int, ...]]:
        """A path's blocks on the device, and the host blocks behind them that a plan can load."""
        first_host = self.pool.num_blocks
        if not matched or matched[-1] < first_host:
            return matched, ()
        on_device = [block for block in matched if block < first_host]
        host_blocks: list[int] = []
        for block in matched[len(on_device) :]:
            if block - first_host in self._arriving:
                break
            host_blocks.append(block - first_host)
        return on_device, tuple(host_blocks) if self._loading_pays() else ()

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
        whole = (len(hit.blocks) + len(hit.host_blocks)) * self.block_size
        return replace(hit, tail_block=None, tail_host_block=None, num_tokens=whole)

    def num_blocks_to_admit(self, seq: Sequence, hit: PrefixHit) -> int:
        """Free blocks that starting `seq` on `hit` takes: those to compute, and cached free ones to revive."""
        revived = hit.blocks if hit.tail_block is None else [*hit.blocks, hit.tail_block]
        return (
            blocks_for(len(seq.token_ids), self.block_size)
            - len(hit.blocks)
            + sum(self.pool.ref_count(block) == 0 for block in revived)
        )

    def attach_prefix(self, seq: Sequence, hit: PrefixHit, plan: PlanBuilder) -> None:
        """Start an empty table with the tree's blocks, whose KV is there when the step attends; a part of a block is
        copied.

        What is in host memory is loaded before anything of the step that the plan is for."""
        for host_block in (*hit.host_blocks, hit.tail_host_block):
            if host_block is not None:
                # Held until the plan is complete: nothing may be swapped out over it.
                self.host.acquire(host_block)
                plan.held_host_blocks.append(host_block)
        self.attach_blocks(seq, hit.blocks)
        if hit.num_published_blocks is not None:
            seq.num_published_blocks = min(seq.num_published_blocks, hit.num_published_blocks)
        seq.num_computed_tokens = hit.num_tokens
        if hit.tail_block is not None:
            # Held until the plan is complete: nobody may be given, and write, the source of a copy in it.
            self.pool.acquire(hit.tail_block)
            plan.held_blocks.append(hit.tail_block)
        for host_block in hit.host_blocks:
            seq.block_table.append(self._load(host_block, plan))
            self.tree.replace(self.pool.num_blocks + host_block, seq.block_table[-1])
            seq.num_published_blocks += 1
            self.num_blocks_promoted += 1
        if hit.tail_host_block is not None:
            seq.block_table.append(self._load(hit.tail_host_block, plan))
        elif hit.tail_block is not None:
            seq.block_table.append(self.pool.allocate())
            plan.copy_block(hit.tail_block, seq.block_table[-1])

    def _load(self, host_block: int, plan: PlanBuilder) -> int:
        block = self.pool.allocate()
        plan.swap_in(host_block, block)
        return block

    def _leave_device(self, blocks: list[int]) -> None:
        """Cached blocks are given to somebody else: what they hold moves to the host if that has room, or is lost."""
        if not self.host.num_blocks:
            self.tree.evict_many(blocks)
            return
        plan = self._plan if self._loading_pays() else None
        for block in blocks:
            if plan is not None and self.host.num_free:
                self._demote(block, plan)
            else:
                self._forget(block)

    def _demote(self, block: int, plan: PlanBuilder) -> None:
        """Move a cached block to the host.

        Those who follow it in the tree have left the device before. Room is made by what was used least recently there,
        and that is always a leaf.
        """
        host_block = self.host.allocate()
        self.tree.replace(block, self.pool.num_blocks + host_block)
        plan.swap_out(block, host_block)
        plan.held_host_blocks.append(host_block)
        self._arriving.add(host_block)
        self.num_blocks_demoted += 1

    def _forget(self, block: int) -> None:
        """Lose a cached block, and what continues it on the host, which can be reached no more."""
        for behind in self.tree.behind(block):
            self.host.uncache(behind - self.pool.num_blocks)
            self.tree.evict(behind)
        self.tree.evict(block)

    def attach_blocks(self, seq: Sequence, blocks: list[int]) -> None:
        """Start an empty table with whole blocks of the tree."""
        assert not seq.block_table
        for block in blocks:
            self.pool.acquire(block)
        seq.block_table = list(blocks)
        seq.num_published_blocks = len(blocks)
        seq.num_computed_tokens = len(blocks) * self.block_size

    def begin_plan(self, plan: PlanBuilder) -> None:
        """Blocks that are evicted from now on may leave by `plan`."""
        self._plan = plan

    def finish_plan(self, plan: PlanBuilder) -> None:
        """Let go of what was held for the plan's copies and swaps."""
        self.pool.release(plan.held_blocks)
        plan.held_blocks.clear()
        self.host.release(plan.held_host_blocks)
        plan.held_host_blocks.clear()
        self._arriving.clear()
        self._planned.clear()
        self._plan = None

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
        have = len(table)
        missing = blocks_for(seq.num_computed_tokens + num_tokens, self.block_size) - have
        if missing > 0:
            table += self.pool.allocate_many(missing)
            plan.append_blocks(row, have, table)

    def publish_planned(self, seq: Sequence) -> None:
        """Enter the full blocks that the plan under construction has just been told to compute, so that those whom it
        admits later share them.

        Only where the tree has nothing: what would give way is written by this very step, so `publish` sees to it in
        the next plan.
        """
        size = self.block_size
        have, want = seq.num_published_blocks, seq.num_computed_tokens // size
        if want <= have or not self.caches(seq.group.request):
            return
        table = seq.block_table
        after = table[have - 1] if have else None
        first = seq.token_ids[have * size : (have + 1) * size].tobytes()
        if self.tree.has_next(seq.group.root_key, after, first):
            return
        want = self._num_publishable(seq, want)
        if want > have:
            self._extend_tree(seq, want)
            self._planned.update(table[have:want])
            seq.num_published_blocks = want

    def _extend_tree(self, seq: Sequence, want: int) -> list[int]:
        """The tree's blocks from the published ones to block `want` of the table, entered where it had none."""
        have, size = seq.num_published_blocks, self.block_size
        tokens = seq.token_ids[have * size : want * size].tobytes()
        assert len(tokens) == (want - have) * size * TOKEN_BYTES
        after = seq.block_table[have - 1] if have else None
        return self.tree.extend(seq.group.root_key, after, tokens, seq.block_table[have:want])

    def publish(self, seq: Sequence, num_tokens: int) -> list[tuple[int, int]]:
        """Enter the full blocks of the first `num_tokens` tokens, known and computed by earlier plans, into the tree.

        Returns (index, block) for each block of the table that gave way to one with the same content: two
        requests that computed the same prefix at the same time end up sharing it.
        """
        have, want = seq.num_published_blocks, num_tokens // self.block_size
        if want <= have or not self.caches(seq.group.request):
            return []
        table = seq.block_table
        want = self._num_publishable(seq, want)
        if want == have:
            return []
        replaced = []
        for index, block in enumerate(self._extend_tree(seq, want), have):
            if block >= self.pool.num_blocks:
                # Computed again, though the host still had it.
                self.host.uncache(block - self.pool.num_blocks)
                self.tree.replace(block, table[index])
            elif block != table[index]:
                self.pool.acquire(block)
                self.pool.release((table[index],))
                table[index] = block
                replaced.append((index, block))
        seq.num_published_blocks = want
        return replaced

    def _num_publishable(self, seq: Sequence, want: int) -> int:
        """Up to where `seq` can enter its blocks so that whoever holds a block of the tree holds those before it too.

        A block that others hold must not follow one that they do not hold: one that gives way here to the tree's own,
        or has done so before.
        """
        have, table = seq.num_published_blocks, seq.block_table
        holders = self.pool.ref_counts(table[have:want])
        if max(holders) == 1:
            return want
        known = self.tree.match(seq.group.root_key, seq.token_ids.tobytes(), want)
        # Who holds the block before, as far as that is known.
        before = self.pool.ref_count(table[have - 1]) if have else max(holders)
        for index, own in enumerate(holders, have):
            if index < len(known) and known[index] < self.pool.num_blocks:
                before = own if known[index] == table[index] else 1
            elif own > before:
                return index
            else:
                before = own
        return want

    def adopt(self, root_key: RootKey, tokens: bytes, blocks: list[int]) -> None:
        """Enter blocks that hold the KV of `tokens` since before this manager was made; they stay free.

        Raises `IntegrityError` for what no manager can have left: blocks out of range, or one for two places.
        """
        if len(tokens) != len(blocks) * self.block_size * TOKEN_BYTES:
            raise IntegrityError(f"{len(blocks)} blocks for {len(tokens) // TOKEN_BYTES} cached tokens")
        if not self.prefix_cache:
            return
        if any(not 0 <= block < self.pool.num_blocks for block in blocks):
            raise IntegrityError(f"a cached block is outside the pool of {self.pool.num_blocks}")
        known = self.tree.match(root_key, tokens, len(blocks))
        new = blocks[len(known) :]
        if len(set(new)) < len(new) or any(block in self.tree for block in new):
            raise IntegrityError("a cached block holds two different things")
        # As if a request had run on them and ended.
        path = known + new
        for block in path:
            self.pool.acquire(block)
        self.tree.extend(root_key, None, tokens, path)
        self.pool.release(reversed(path))

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
        on_host = self.pool.num_blocks
        for before, block in self.tree.paths():
            if before is not None and before >= on_host > block:
                raise IntegrityError(f"block {block} is on the device and what comes before it is not")
            if (
                before is not None
                and block < on_host
                and self.pool.ref_count(before) < self.pool.ref_count(block)
            ):
                raise IntegrityError(f"block {block} is held by someone who does not hold {before} before it")
        for seq in sequences:
            capacity = len(seq.block_table) * self.block_size
            if not 0 <= capacity - seq.num_computed_tokens < self.block_size:
                raise IntegrityError(
                    f"{seq.group.request.request_id}: table of {capacity} slots for its tokens"
                )
            if any(block not in self.tree for block in seq.block_table[: seq.num_published_blocks]):
                raise IntegrityError(f"{seq.group.request.request_id}: a published block left the tree")
