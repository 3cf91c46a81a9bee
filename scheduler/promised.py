"""Prefixes that are not cached yet but will be: prompts that wait or are being computed on some worker.

A request that goes behind one with the same beginning will find it computed when its turn comes, so a burst over one
prefix need not be scattered, each worker computing it anew. Promises are looked at again when they are used and a few
at every call, and end when the request has its first token (its prompt is in the worker's tree by then) or is gone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from octavo.scheduler.prefix_index import PrefixIndex
from octavo.scheduler.prefix_tree import RootKey, TreeNode

LOOKS_PER_CALL = 4
"""Promises checked at every call; one is made at each, so that what is over goes faster than new ones come."""


@dataclass(slots=True)
class _Promise:
    request_id: str
    worker: int
    path: TreeNode
    num_blocks: int


class PromisedPrefixes:
    """Of all workers with one block size. `is_due(worker, request_id)`: whether that prompt is still to be computed."""

    def __init__(self, block_size: int, is_due: Callable[[int, str], bool], *, bytes_max: int) -> None:
        self._is_due = is_due
        self._index = PrefixIndex(block_size, bytes_max=bytes_max)
        self._promises: dict[int, _Promise] = {}
        """By number, oldest first: each stands in the index as a holder of its own."""
        self._next = 0

    @property
    def num_bytes(self) -> int:
        return self._index.num_bytes

    def lookup(self, root_key: RootKey, tokens: bytes, max_blocks: int) -> dict[int, int]:
        """Worker -> most blocks of a prefix of `tokens` that some request there will have computed."""
        for number in list(self._promises)[:LOOKS_PER_CALL]:
            promise = self._promises.pop(number)
            if self._is_due(promise.worker, promise.request_id):
                # To the end: the next call looks at others.
                self._promises[number] = promise
            else:
                self._drop(number, promise)
        found, _ = self._index.lookup(root_key, tokens, max_blocks)
        best: dict[int, int] = {}
        for number, count in found.items():
            promise = self._promises[number]
            if count <= best.get(promise.worker, 0):
                continue
            if self._is_due(promise.worker, promise.request_id):
                best[promise.worker] = count
            else:
                self._drop(number, self._promises.pop(number))
        return best

    def promise(
        self, worker: int, request_id: str, root_key: RootKey, tokens: bytes, num_blocks: int
    ) -> None:
        """The first `num_blocks` blocks of `tokens` will be computed by that request."""
        if not num_blocks:
            return
        path = TreeNode(None, root_key)
        width = len(tokens) // num_blocks
        assert width * num_blocks == len(tokens)
        self._index.enter(self._next, path, tokens, num_blocks)
        path.blocks = [0] * num_blocks
        self._promises[self._next] = _Promise(request_id, worker, path, num_blocks)
        self._next += 1

    def _drop(self, number: int, promise: _Promise) -> None:
        self._index.leave(number, promise.path, promise.num_blocks)
