"""Device blocks: who may use which. Owns reference counts and the order in which free blocks are reused.

Knows nothing of tokens, requests or prefixes: the PrefixTree says which blocks hold something worth keeping
and is told when one is taken away (`on_evict`).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from octavo.protos.errors import IntegrityError


class FreeBlockQueue:
    """Free blocks in the order of reuse: an intrusive doubly linked list in two flat arrays.

    Append, pop and removal from the middle are O(1). Removal matters because a cached free block is revived
    when a prompt finds its prefix again. Index `num_blocks` is the sentinel that closes the ring.
    """

    def __init__(self, num_blocks: int) -> None:
        self._sentinel = num_blocks
        # Python lists of ints beat numpy scalars about five times for single reads and writes.
        self._next: list[int] = [*range(1, num_blocks + 1), 0]
        self._prev: list[int] = [num_blocks, *range(num_blocks)]
        self._size = num_blocks

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[int]:
        block = self._next[self._sentinel]
        while block != self._sentinel:
            yield block
            block = self._next[block]

    def pop(self) -> int:
        """The block that has been free the longest."""
        return self.pop_many(1)[0]

    def pop_many(self, count: int) -> list[int]:
        """The `count` blocks that have been free the longest, in order."""
        assert count <= self._size, "pop from an empty free queue"
        following, before, sentinel = self._next, self._prev, self._sentinel
        taken = []
        block = following[sentinel]
        for _ in range(count):
            taken.append(block)
            after = following[block]
            following[block] = before[block] = -1
            block = after
        following[sentinel] = block
        before[block] = sentinel
        self._size -= count
        return taken

    def remove(self, block: int) -> None:
        before, after = self._prev[block], self._next[block]
        assert before >= 0, f"block {block} is not free"
        self._next[before] = after
        self._prev[after] = before
        self._prev[block] = self._next[block] = -1
        self._size -= 1

    def append(self, block: int) -> None:
        """To the end: reused last."""
        self._insert(self._prev[self._sentinel], block)

    def appendleft(self, block: int) -> None:
        """To the front: reused first. For blocks that hold nothing worth keeping."""
        self._insert(self._sentinel, block)

    def _insert(self, before: int, block: int) -> None:
        assert self._prev[block] < 0, f"block {block} is free twice"
        after = self._next[before]
        self._next[before] = self._prev[after] = block
        self._prev[block], self._next[block] = before, after
        self._size += 1


class BlockState(enum.IntEnum):
    """For people who look."""

    FREE = 0
    CACHED = 1
    """Free, and its content can be found again."""
    PRIVATE = 2
    SHARED = 3
    """Of several tables."""


class BlockPool:
    """Reference counts over `num_blocks` blocks. A block is in the free queue or referenced, never both.

    `is_cached(block)` tells that a free block's content can be found again; `on_evict(blocks)` is called before
    such blocks are given to somebody else.
    """

    def __init__(
        self, num_blocks: int, *, is_cached: Callable[[int], bool], on_evict: Callable[[list[int]], None]
    ) -> None:
        self.num_blocks = num_blocks
        self.num_cached_free = 0
        """Free blocks whose content can be found again."""
        self.num_exclusive = 0
        """Blocks with one reference."""
        self._ref_counts = [0] * num_blocks
        self._free = FreeBlockQueue(num_blocks)
        self._is_cached = is_cached
        self._on_evict = on_evict

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can give, cached ones included."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def ref_count(self, block: int) -> int:
        return self._ref_counts[block]

    def ref_counts(self, blocks: list[int]) -> list[int]:
        return list(map(self._ref_counts.__getitem__, blocks))

    def states(self) -> bytes:
        """uint8 [num_blocks]: what each block is, a `BlockState`."""
        counts = np.asarray(self._ref_counts)
        found = np.where(
            counts > 1, BlockState.SHARED, np.where(counts > 0, BlockState.PRIVATE, BlockState.FREE)
        )
        for block in self._free:
            if self._is_cached(block):
                found[block] = BlockState.CACHED
        return found.astype(np.uint8).tobytes()

    def allocate(self) -> int:
        """A block with one reference. The caller has checked `num_free`."""
        return self.allocate_many(1)[0]

    def allocate_many(self, count: int) -> list[int]:
        """As so many times `allocate`."""
        blocks = self._free.pop_many(count)
        cached = [*filter(self._is_cached, blocks)]
        if cached:
            self.num_cached_free -= len(cached)
            self._on_evict(cached)
        for block in blocks:
            self._ref_counts[block] = 1
        self.num_exclusive += len(blocks)
        return blocks

    def acquire(self, block: int) -> None:
        """One more reference; revives a cached free block."""
        count = self._ref_counts[block]
        if count == 0:
            self._free.remove(block)
            self.num_cached_free -= self._is_cached(block)
            self.num_exclusive += 1
        elif count == 1:
            self.num_exclusive -= 1
        self._ref_counts[block] = count + 1

    def uncache(self, block: int) -> None:
        """The content is of no use any more; call before `is_cached` says so."""
        if self._ref_counts[block] == 0:
            self.num_cached_free -= 1
            self._free.remove(block)
            self._free.appendleft(block)

    def release(self, blocks: Iterable[int]) -> int:
        """Drop one reference of each, last block first, and return how many became free.

        The tail of a sequence goes into the queue before its head, so that a prefix outlives what follows it:
        the front of the queue is always a leaf of the prefix tree.
        """
        freed = 0
        for block in blocks:
            count = self._ref_counts[block]
            assert count > 0, f"block {block} released more often than acquired"
            self._ref_counts[block] = count - 1
            if count == 2:
                self.num_exclusive += 1
            elif count == 1:
                self.num_exclusive -= 1
                freed += 1
                if self._is_cached(block):
                    self.num_cached_free += 1
                    self._free.append(block)
                else:
                    self._free.appendleft(block)
        return freed

    def check_integrity(self, holders: Iterable[int]) -> None:
        """Raise `IntegrityError` unless the counts equal the references in `holders` (a block per reference)."""
        want = np.bincount(np.fromiter(holders, np.int64), minlength=self.num_blocks)
        have = np.asarray(self._ref_counts)
        if len(want) != self.num_blocks or (want != have).any():
            bad = np.flatnonzero(want[: self.num_blocks] != have)[:5].tolist()
            raise IntegrityError(
                f"blocks {bad} have counts {have[bad].tolist()} but {want[bad].tolist()} holders"
            )
        if self.num_exclusive != int((have == 1).sum()):
            raise IntegrityError("the count of exclusive blocks is wrong")
        free = list(self._free)
        if len(free) != len(self._free) or len(set(free)) != len(free):
            raise IntegrityError("the free queue is not a list of distinct blocks")
        if sorted(free) != np.flatnonzero(have == 0).tolist():
            raise IntegrityError("the free queue is not the set of unreferenced blocks")
        if sum(map(self._is_cached, free)) != self.num_cached_free:
            raise IntegrityError("the count of cached free blocks is wrong")
