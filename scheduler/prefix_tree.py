"""Which prefixes have their KV in device blocks: a radix tree on token ids at block granularity.

Owns the map from (salt, adapter, tokens) to blocks. Does not own the blocks: reference counts and the order of
eviction are the BlockPool's, which calls `evict` when it gives a free cached block away. Nodes compress runs
of blocks (the radix tree of SGLang's RadixAttention, section 3 of arXiv:2312.07104, with whole blocks of
PagedAttention, arXiv:2309.06180, as its alphabet).

Tokens themselves are the keys, compared byte by byte, so a hash collision can never give a wrong block.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from itertools import islice
from typing import Any, Protocol

from octavo.protos.errors import IntegrityError

RootKey = tuple[str, str]
"""(cache salt, adapter): a tuple, never a joined string, so no crafted salt reaches another tenant's tree."""

TOKEN_BYTES = 4
SIBLINGS_MAX = 64
"""Blocks compared in search of one that shares a part: enough for a conversation's branches, and a bound."""


class TreeNode:
    """A run of blocks with one way in. `tokens` is the run's int32 token ids, `blocks` one id per block."""

    __slots__ = ("blocks", "children", "families", "indexed", "parent", "root_key", "start", "tokens")

    def __init__(self, parent: TreeNode | None, root_key: RootKey) -> None:
        self.parent = parent
        self.root_key = root_key
        self.start: int = 0 if parent is None else parent.start + len(parent.blocks)
        """Blocks on the way to this run."""
        self.indexed: Any = None if parent is None else parent.indexed
        """The router's index: where it has this run."""
        self.tokens = bytearray()
        self.blocks: list[int] = []
        self.children: dict[bytes, TreeNode] = {}
        """By the tokens of the child's first block."""
        self.families: dict[bytes, dict[bytes, TreeNode]] = {}
        """The same children by the first few tokens, then by all of the block: a search for one that shares a part
        looks at nothing else."""

    def add_child(self, key: bytes, child: TreeNode, head_bytes: int) -> None:
        self.children[key] = child
        self.families.setdefault(key[:head_bytes], {})[key] = child

    def remove_child(self, key: bytes, head_bytes: int) -> None:
        del self.children[key]
        family = self.families[key[:head_bytes]]
        del family[key]
        if not family:
            del self.families[key[:head_bytes]]


class Listener(Protocol):
    """Hears of every change, before it is made (`entered`, `left`) or after (`moved`: block `old` changed its tier)."""

    def entered(self, node: TreeNode, tokens: bytes, num_blocks: int) -> None: ...

    def left(self, node: TreeNode, num_blocks: int) -> None: ...

    def moved(self, node: TreeNode, place: int, old: int) -> None: ...


def common_tokens(left: bytes, right: bytes) -> int:
    """Leading tokens that two int32 strings share. The lowest differing bit is found at C speed."""
    size = min(len(left), len(right))
    differ = int.from_bytes(left[:size], "little") ^ int.from_bytes(right[:size], "little")
    if not differ:
        return size // TOKEN_BYTES
    return ((differ & -differ).bit_length() - 1) // (8 * TOKEN_BYTES)


class PrefixTree:
    """Exact prefix lookup over at most `num_blocks` blocks; all operations are linear in the blocks touched."""

    def __init__(self, num_blocks: int, block_size: int, *, num_host_blocks: int = 0) -> None:
        """Blocks from `num_blocks` on, `num_host_blocks` of them, are in host memory."""
        self.block_size = block_size
        self.num_device_blocks = num_blocks
        self._width = block_size * TOKEN_BYTES
        self.min_shared_tokens = max(1, block_size // 4)
        """A part of a block is worth a copy from here on; every chat template shares its first token or two."""
        self._head_bytes = self.min_shared_tokens * TOKEN_BYTES
        self._roots: dict[RootKey, TreeNode] = {}
        self._node_of: list[TreeNode | None] = [None] * (num_blocks + num_host_blocks)
        self._index_of = [0] * (num_blocks + num_host_blocks)
        self.num_blocks = 0
        """Blocks in the tree, free or in use."""
        self.listeners: list[Listener] = []

    def __contains__(self, block: int) -> bool:
        return self._node_of[block] is not None

    def match(self, root_key: RootKey, tokens: bytes, max_blocks: int) -> list[int]:
        """Blocks of the longest known prefix of `tokens` (int32 bytes), at most `max_blocks`. Changes nothing."""
        width = self._width
        limit = min(max_blocks, len(tokens) // width) * width
        node = self._roots.get(root_key)
        found: list[int] = []
        at = 0
        while node is not None and at < limit:
            child = node.children.get(tokens[at : at + width])
            if child is None:
                break
            size = len(child.tokens)
            if at + size <= limit and tokens.startswith(child.tokens, at):
                found += child.blocks
                at += size
                node = child
                continue
            for index, block in enumerate(child.blocks):
                here = index * width
                if at >= limit or child.tokens[here : here + width] != tokens[at : at + width]:
                    break
                found.append(block)
                at += width
            break
        return found

    def has_next(self, root_key: RootKey, after: int | None, tokens: bytes) -> bool:
        """Whether the block of `tokens` (one block's) stands behind `after` (None: as a first block)."""
        node = self._roots.get(root_key) if after is None else self._node_of[after]
        if node is None:
            return False
        place = 0 if after is None else self._index_of[after] + 1
        if place < len(node.blocks):
            return node.tokens[place * self._width : (place + 1) * self._width] == tokens
        return tokens in node.children

    def match_inside(
        self, root_key: RootKey, after: int | None, tokens: bytes, *, skip: Container[int] = ()
    ) -> tuple[int, int] | None:
        """The block behind `after` (None: a first block) that begins with most of `tokens`, and how many that is.

        `tokens` is shorter than a block, or differs from all of them within one. None where fewer agree than
        `min_shared_tokens`. Looks at no more than `SIBLINGS_MAX` blocks, the newest first, at none of `skip`. Changes
        nothing.
        """
        node = self._roots.get(root_key) if after is None else self._node_of[after]
        if node is None:
            return None
        place = 0 if after is None else self._index_of[after] + 1
        if place < len(node.blocks):
            candidates = [
                (bytes(node.tokens[place * self._width : (place + 1) * self._width]), node.blocks[place])
            ]
        else:
            family = node.families.get(tokens[: self._head_bytes])
            if family is None:
                return None
            newest = ((key, child.blocks[0]) for key, child in reversed(family.items()))
            candidates = list(islice((one for one in newest if one[1] not in skip), SIBLINGS_MAX))
        best: tuple[int, int] | None = None
        for key, block in candidates:
            if block in skip:
                continue
            count = common_tokens(key, tokens)
            if count >= self.min_shared_tokens and count > (best[1] if best else 0):
                best = block, count
        return best

    def extend(self, root_key: RootKey, after: int | None, tokens: bytes, blocks: list[int]) -> list[int]:
        """Enter `blocks`, holding the KV of `tokens`, behind the tree's block `after` (None: at the root).

        Returns the tree's block for each place: the given one where it was new, the one that was there already
        otherwise (the caller then drops its copy, so that whoever holds a block holds the tree's own path to it).
        One in host memory is returned too, though: the caller replaces it, since what is on the device must be
        reachable over the device.
        The KV of `blocks` must have been computed by an earlier plan, or be computed by the one under construction.
        """
        width = self._width
        assert len(tokens) == len(blocks) * width
        if after is None:
            node = self._roots.setdefault(root_key, TreeNode(None, root_key))
            place = 0
        else:
            holder = self._node_of[after]
            assert holder is not None, f"block {after} is not in the tree"
            node, place = holder, self._index_of[after] + 1
        kept: list[int] = []
        for number in range(len(blocks)):
            key = tokens[number * width : (number + 1) * width]
            if place < len(node.blocks):
                if node.tokens[place * width : (place + 1) * width] == key:
                    kept.append(node.blocks[place])
                    place += 1
                    continue
                self._split(node, place)
            child = node.children.get(key)
            if child is not None:
                kept.append(child.blocks[0])
                node, place = child, 1
                continue
            if node.children or node.parent is None:
                child = TreeNode(node, node.root_key)
                node.add_child(key, child, self._head_bytes)
                node = child
            # Nothing continues this run, so the rest goes behind it in one piece.
            rest = blocks[number:]
            for listener in self.listeners:
                listener.entered(node, tokens[number * width :], len(rest))
            node.tokens += tokens[number * width :]
            node_of, index_of, start = self._node_of, self._index_of, len(node.blocks)
            for index, new in enumerate(rest, start):
                assert node_of[new] is None, f"block {new} is in the tree twice"
                node_of[new] = node
                index_of[new] = index
            node.blocks += rest
            self.num_blocks += len(rest)
            return kept + rest
        return kept

    def replace(self, old: int, new: int) -> None:
        """The KV of `old` is in `new` from now on: it moved between device and host, or was computed again."""
        node, index = self._node_of[old], self._index_of[old]
        assert node is not None, f"block {old} is not in the tree"
        self._node_of[old] = None
        node.blocks[index] = new
        self._place(node, index, new)
        if self.is_on_host(new) != self.is_on_host(old):
            for listener in self.listeners:
                listener.moved(node, index, old)

    def is_on_host(self, block: int) -> bool:
        return block >= self.num_device_blocks

    def evict(self, block: int) -> None:
        """Forget a block: the last of a run that nothing continues, which the pool's order guarantees."""
        self.evict_many([block])

    def evict_many(self, blocks: list[int]) -> None:
        """As `evict` for each, in order: those that stand one before the other in one run go together."""
        done = 0
        while done < len(blocks):
            node = self._node_of[blocks[done]]
            assert node is not None, f"block {blocks[done]} is not in the tree"
            run = node.blocks
            count, most = 0, min(len(run), len(blocks) - done)
            while count < most and run[-1 - count] == blocks[done + count]:
                count += 1
            last = not node.children and count
            assert last, f"block {blocks[done]} is evicted before what follows it"
            self._cut(node, count)
            done += count

    def _cut(self, node: TreeNode, count: int) -> None:
        """Forget the last `count` blocks of a run that nothing continues."""
        for listener in self.listeners:
            listener.left(node, count)
        for block in node.blocks[-count:]:
            self._node_of[block] = None
        self.num_blocks -= count
        key = bytes(node.tokens[: self._width])
        del node.blocks[-count:]
        del node.tokens[-count * self._width :]
        while not node.blocks and not node.children:
            parent = node.parent
            if parent is None:
                del self._roots[node.root_key]
                return
            parent.remove_child(key, self._head_bytes)
            # A parent that has run out of children stays, with its blocks; only an empty root goes too.
            node = parent

    def behind(self, block: int) -> list[int]:
        """All blocks that continue `block`, each before those it continues: in the order in which they can be
        evicted."""
        node = self._node_of[block]
        assert node is not None, f"block {block} is not in the tree"
        found = node.blocks[self._index_of[block] + 1 :]
        stack = list(node.children.values())
        while stack:
            node = stack.pop()
            found += node.blocks
            stack += node.children.values()
        return found[::-1]

    def _place(self, node: TreeNode, index: int, block: int) -> None:
        assert self._node_of[block] is None, f"block {block} is in the tree twice"
        self._node_of[block] = node
        self._index_of[block] = index

    def _split(self, node: TreeNode, place: int) -> None:
        """Cut a run in two so that another branch can leave at `place`."""
        tail = TreeNode(node, node.root_key)
        tail.start = node.start + place
        cut = place * self._width
        tail.tokens, tail.blocks = node.tokens[cut:], node.blocks[place:]
        tail.children, tail.families = node.children, node.families
        del node.tokens[cut:], node.blocks[place:]
        node.children, node.families = {}, {}
        node.add_child(bytes(tail.tokens[: self._width]), tail, self._head_bytes)
        for child in tail.children.values():
            child.parent = tail
        for index, block in enumerate(tail.blocks):
            self._node_of[block] = tail
            self._index_of[block] = index

    def nodes(self) -> Iterator[TreeNode]:
        """Every run, each after those that it continues."""
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            yield node
            stack += node.children.values()

    def paths(self) -> Iterator[tuple[int | None, int]]:
        """Every (block before, block) of the tree; None before a first block."""
        for node in self.nodes():
            before = node.parent.blocks[-1] if node.parent and node.parent.blocks else None
            for block in node.blocks:
                yield before, block
                before = block

    def check_integrity(self) -> None:
        """Raise `IntegrityError` on a broken link, a block in two places or a miscounted run."""
        seen: set[int] = set()
        for node in self.nodes():
            if len(node.tokens) != len(node.blocks) * self._width:
                raise IntegrityError("a prefix node's tokens and blocks differ in length")
            if node.parent is not None and not node.blocks:
                raise IntegrityError("an empty prefix node was left behind")
            if node.parent is not None and node.start != node.parent.start + len(node.parent.blocks):
                raise IntegrityError("a prefix node does not know how far down it stands")
            for index, block in enumerate(node.blocks):
                if block in seen or self._node_of[block] is not node or self._index_of[block] != index:
                    raise IntegrityError(f"block {block} is misplaced in the prefix tree")
                seen.add(block)
            families = {key: child for family in node.families.values() for key, child in family.items()}
            if families != node.children or not all(node.families.values()):
                raise IntegrityError("a prefix node's children and their families differ")
            for key, child in node.children.items():
                if child.parent is not node or bytes(child.tokens[: self._width]) != key:
                    raise IntegrityError("a prefix node hangs under the wrong key")
        if len(seen) != self.num_blocks or sum(node is not None for node in self._node_of) != len(seen):
            raise IntegrityError("the prefix tree's block count is wrong")
