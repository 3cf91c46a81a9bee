"""Which worker holds which prefix: one radix tree over the prefix trees of all workers, kept exact by their changes.

A node is a run of blocks with, for each worker, how many leading blocks of it that worker holds and how many of
those stand in its host tier. That is all there is to know, because a worker that holds a block holds all before it,
and device blocks come before host blocks on every path.

Owns no block and decides nothing: a lookup costs one walk down, whatever the number of workers. Each worker's tree
reports through its `WorkerPrefixes`. The positions kept in the workers' tree nodes (`TreeNode.indexed`) survive splits
here without being told: a split leaves the old node object at the tail, so the way to the root from a
remembered node always passes through the node that is meant.

Over `bytes_max` the prefixes that were asked for longest ago are forgotten. Predictions for them are then too low,
never too high, until somebody computes them again.
"""

from __future__ import annotations

from collections.abc import Iterator

from octavo.protos.errors import IntegrityError
from octavo.scheduler.prefix_tree import TOKEN_BYTES, PrefixTree, RootKey, TreeNode, common_tokens

NODE_BYTES = 700
"""A node without tokens and holders, as CPython 3.11 lays it out, rounded up."""
HOLDER_BYTES = 100
"""One worker in a node's dict, with the slack of a growing dict."""
INDEX_BYTES_MAX = 512 * 2**20
FORGET_TO = 0.9
"""Share of the limit that is left after forgetting, so that forgetting is rare."""


class IndexNode:
    """A run of blocks from depth `start` (in blocks) on, with one way in."""

    __slots__ = (
        "children",
        "forgotten",
        "held",
        "host",
        "last_used",
        "num_blocks",
        "parent",
        "start",
        "tokens",
    )

    def __init__(
        self, parent: IndexNode | None, start: int, tokens: bytes | bytearray, num_blocks: int
    ) -> None:
        self.parent = parent
        self.start = start
        self.tokens = bytearray(tokens)
        self.num_blocks = num_blocks
        self.children: dict[bytes, IndexNode] = {}
        self.held: dict[int, int] = {}
        """Worker -> leading blocks of this run that it holds, on the device or the host; at least 1."""
        self.host: dict[int, int] = {}
        """Worker -> how many of these, the last ones, are in its host tier; at least 1."""
        self.last_used = 0
        self.forgotten = False


class WorkerPrefixes:
    """One worker's voice in the index: what its PrefixTree calls when something enters, leaves or moves."""

    __slots__ = ("_index", "_tree", "_worker")

    def __init__(self, index: PrefixIndex, worker: int, tree: PrefixTree) -> None:
        self._index = index
        self._worker = worker
        self._tree = tree

    def entered(self, node: TreeNode, tokens: bytes, num_blocks: int) -> None:
        """`num_blocks` blocks holding `tokens` are about to stand behind the present end of the run `node`."""
        self._index.enter(self._worker, node, tokens, num_blocks)

    def left(self, node: TreeNode, num_blocks: int) -> None:
        """The last blocks of the run `node`, which nothing continues, are about to go."""
        self._index.leave(self._worker, node, num_blocks)

    def moved(self, node: TreeNode, place: int, old: int) -> None:
        """The block at `place` of the run `node` changed its tier."""
        to_host = self._tree.is_on_host(node.blocks[place])
        self._index.move(self._worker, node, node.start + place, to_host=to_host)


def hear_no_more(tree: PrefixTree) -> None:
    """No index hears of `tree` from now on."""
    tree.listeners = [one for one in tree.listeners if not isinstance(one, WorkerPrefixes)]


class PrefixIndex:
    """See the module. All workers share one block size."""

    def __init__(self, block_size: int, *, bytes_max: int = INDEX_BYTES_MAX) -> None:
        self.block_size = block_size
        self.bytes_max = bytes_max
        self.num_bytes = 0
        """Estimate by `NODE_BYTES`, `HOLDER_BYTES` and the tokens."""
        self.num_forgotten_blocks = 0
        self._width = block_size * TOKEN_BYTES
        self._roots: dict[RootKey, IndexNode] = {}
        self._clock = 0

    # --- asking --------------------------------------------------------------------------------------------

    def lookup(
        self, root_key: RootKey, tokens: bytes, max_blocks: int
    ) -> tuple[dict[int, int], dict[int, int]]:
        """Worker -> how many blocks of a prefix of `tokens` (int32) it holds, at most `max_blocks`; and worker -> how
        many of these, the last ones, are in its host tier. Workers without any are in neither."""
        held: dict[int, int] = {}
        on_host: dict[int, int] = {}
        node = self._roots.get(root_key)
        if node is None:
            return held, on_host
        self._clock += 1
        width = self._width
        max_blocks = min(max_blocks, len(tokens) // width)
        depth = 0
        while depth < max_blocks:
            child = node.children.get(tokens[depth * width : (depth + 1) * width])
            if child is None:
                break
            child.last_used = self._clock
            limit = min(child.num_blocks, max_blocks - depth)
            run = child.tokens if limit == child.num_blocks else child.tokens[: limit * width]
            whole = tokens.startswith(run, depth * width)
            common = limit if whole else self._common(child, 0, tokens, depth, limit)
            for worker, count in child.held.items():
                held[worker] = depth + (count if count < common else common)
            for worker, count in child.host.items():
                last = min(child.held[worker], common) - child.held[worker] + count
                if last > 0:
                    # All that follows a host block is on the host too.
                    on_host[worker] = on_host.get(worker, 0) + last
            if common < child.num_blocks:
                break
            depth += common
            node = child
        return held, on_host

    def _common(self, node: IndexNode, place: int, tokens: bytes, at: int, limit: int) -> int:
        """Whole blocks in which the run from `place` on and `tokens` from block `at` on agree, at most `limit`."""
        width = self._width
        mine = bytes(node.tokens[place * width : (place + limit) * width])
        return common_tokens(mine, tokens[at * width : (at + limit) * width]) // self.block_size

    # --- what workers report -------------------------------------------------------------------------------

    def attach(self, worker: int, tree: PrefixTree) -> None:
        """Take in all that `tree` holds, and hear of every change from now on."""
        for node in tree.nodes():
            node.indexed = None if node.parent is None else node.parent.indexed
            if node.blocks:
                self._enter(worker, node, bytes(node.tokens), node.start, len(node.blocks))
                for place, block in enumerate(node.blocks):
                    if tree.is_on_host(block):
                        self.move(worker, node, node.start + place, to_host=True)
        tree.listeners.append(WorkerPrefixes(self, worker, tree))
        self._limit_bytes()

    def detach(self, worker: int, tree: PrefixTree) -> None:
        """Forget a worker and hear nothing more of it."""
        hear_no_more(tree)
        for node in list(self._nodes()):
            if node.held.pop(worker, 0):
                self.num_bytes -= HOLDER_BYTES
            node.host.pop(worker, None)
        for node in list(self._nodes()):
            if not node.held and not node.forgotten:
                self._prune(node)

    def enter(self, worker: int, node: TreeNode, tokens: bytes, num_blocks: int) -> None:
        self._enter(worker, node, tokens, node.start + len(node.blocks), num_blocks)
        if self.num_bytes > self.bytes_max:
            self._limit_bytes()

    def leave(self, worker: int, node: TreeNode, num_blocks: int) -> None:
        end = node.start + len(node.blocks)
        goal = end - num_blocks
        at: IndexNode | None = node.indexed
        while end > goal:
            while at is not None and at.start >= end:
                at = at.parent
            assert at is not None, "a block leaves that never entered"
            node.indexed = at
            going = min(end - goal, end - at.start)
            self._let_go(at, worker, end, going)
            end -= going

    def _let_go(self, node: IndexNode, worker: int, end: int, num_blocks: int) -> None:
        """`worker` holds `num_blocks` less of the run `node`, up to depth `end` so far."""
        held, count = node.held, node.held.get(worker, 0)
        if node.start + count != end:
            assert node.forgotten, "a block leaves that is not the last of its path"
            # Of a forgotten run no more is known than what the worker held of it then.
            count = min(count, end - num_blocks - node.start)
            if count > 0:
                held[worker] = count
            else:
                held.pop(worker, None)
            return
        if worker in node.host:
            self._count_host(node, worker, -min(num_blocks, node.host[worker]))
        count -= num_blocks
        if count:
            held[worker] = count
            if len(held) == 1 and not node.forgotten and not node.children:
                # Nobody else holds any of it, so what was behind is of no use.
                size = count * self._width
                self.num_bytes -= len(node.tokens) - size
                del node.tokens[size:]
                node.num_blocks = count
            return
        del held[worker]
        if not node.forgotten:
            self.num_bytes -= HOLDER_BYTES
            if not held:
                self._prune(node)

    def move(self, worker: int, node: TreeNode, place: int, *, to_host: bool) -> None:
        """The block at depth `place` of the path through `node` changed its tier."""
        at: IndexNode | None = node.indexed
        while at is not None and at.start > place:
            at = at.parent
        assert at is not None, "a block moves that never entered"
        if not at.forgotten:
            self._count_host(at, worker, 1 if to_host else -1)

    @staticmethod
    def _count_host(node: IndexNode, worker: int, change: int) -> None:
        count = node.host.get(worker, 0) + change
        assert 0 <= count <= node.held[worker], "host blocks are miscounted"
        if count:
            node.host[worker] = count
        else:
            node.host.pop(worker, None)

    def _enter(self, worker: int, node: TreeNode, tokens: bytes, depth: int, num_blocks: int) -> None:
        width = self._width
        at = self._end_of(node, depth)
        done = 0
        while done < num_blocks:
            place = depth + done - at.start
            if place < at.num_blocks:
                # Inside a run that another worker holds further than this one.
                limit = min(at.num_blocks - place, num_blocks - done)
                common = self._common(at, place, tokens, done, limit)
                if common:
                    self._hold(at, worker, place + common)
                    done += common
                if done == num_blocks:
                    break
                if place + common < at.num_blocks:
                    at = self._split(at, place + common)
                continue
            child = at.children.get(tokens[done * width : (done + 1) * width])
            if child is not None:
                at = child
                continue
            rest = tokens[done * width :]
            if at.parent is not None and not at.children and not at.forgotten:
                # Nothing continues this run: whoever held all of it now holds a part.
                at.tokens += rest
                at.num_blocks += num_blocks - done
                self.num_bytes += len(rest)
            elif not at.forgotten:
                child = IndexNode(at, depth + done, rest, num_blocks - done)
                at.children[rest[:width]] = child
                self.num_bytes += NODE_BYTES + len(rest)
                at = child
            else:
                # Behind a forgotten prefix nothing can be found.
                break
            self._hold(at, worker, at.num_blocks)
            break
        node.indexed = at

    def _end_of(self, node: TreeNode, depth: int) -> IndexNode:
        """The node that holds the block before `depth` on the path to the end of `node`."""
        if depth == 0:
            root = self._roots.get(node.root_key)
            if root is None:
                root = self._roots[node.root_key] = IndexNode(None, 0, b"", 0)
                self.num_bytes += NODE_BYTES
            return root
        at: IndexNode | None = node.indexed
        while at is not None and at.start >= depth:
            at = at.parent
        assert at is not None, "a path begins nowhere"
        return at

    def _hold(self, node: IndexNode, worker: int, count: int) -> None:
        if worker not in node.held and not node.forgotten:
            self.num_bytes += HOLDER_BYTES
        node.held[worker] = count
        node.last_used = self._clock

    def _split(self, node: IndexNode, place: int) -> IndexNode:
        """Cut a run in two; `node` stays the tail. Returns the new head."""
        parent, width = node.parent, self._width
        assert parent is not None
        cut = place * width
        head = IndexNode(parent, node.start, node.tokens[:cut], place)
        head.last_used, head.forgotten = node.last_used, node.forgotten
        if not node.forgotten:
            parent.children[bytes(node.tokens[:width])] = head
            self.num_bytes += NODE_BYTES
        del node.tokens[:cut]
        node.start += place
        node.num_blocks -= place
        node.parent = head
        head.children[bytes(node.tokens[:width])] = node
        held, host = node.held, node.host
        node.held, node.host = {}, {}
        for worker, count in held.items():
            head.held[worker] = min(count, place)
            behind, on_host = max(0, count - place), host.get(worker, 0)
            if behind:
                node.held[worker] = behind
                if not node.forgotten:
                    self.num_bytes += HOLDER_BYTES
            if on_host:
                if min(on_host, behind):
                    node.host[worker] = min(on_host, behind)
                if on_host > behind:
                    head.host[worker] = on_host - behind
        if not node.held and not node.forgotten:
            self._prune(node)
        return head

    def _prune(self, node: IndexNode) -> None:
        """Remove a run that nobody holds; then nobody holds what continues it."""
        while not node.held and not node.children:
            parent = node.parent
            self.num_bytes -= NODE_BYTES + len(node.tokens)
            if parent is None:
                self._roots = {key: root for key, root in self._roots.items() if root is not node}
                return
            del parent.children[bytes(node.tokens[: self._width])]
            node.forgotten = True
            node = parent

    # --- the limit -----------------------------------------------------------------------------------------

    def _limit_bytes(self) -> None:
        if self.num_bytes <= self.bytes_max:
            return
        nodes = [node for node in self._nodes() if node.parent is not None]
        # What continues a run was never used later than the run: leaves go first.
        nodes.sort(key=lambda node: (node.last_used, -node.start))
        for node in nodes:
            if self.num_bytes <= FORGET_TO * self.bytes_max:
                return
            if node.children or node.forgotten:
                continue
            parent = node.parent
            assert parent is not None
            self.num_bytes -= NODE_BYTES + len(node.tokens) + HOLDER_BYTES * len(node.held)
            self.num_forgotten_blocks += node.num_blocks
            del parent.children[bytes(node.tokens[: self._width])]
            node.forgotten = True

    def _nodes(self) -> Iterator[IndexNode]:
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            yield node
            stack += node.children.values()

    def paths_of(self, worker: int) -> set[tuple[RootKey, bytes, bool]]:
        """Every block that `worker` holds: (root key, all tokens up to its end, whether it is on the host)."""
        found = set()
        stack = [(key, root, b"") for key, root in self._roots.items()]
        while stack:
            key, node, before = stack.pop()
            held, on_host = node.held.get(worker, 0), node.host.get(worker, 0)
            for place in range(held):
                tokens = before + bytes(node.tokens[: (place + 1) * self._width])
                found.add((key, tokens, place >= held - on_host))
            stack += [(key, child, before + bytes(node.tokens)) for child in node.children.values()]
        return found

    def check_integrity(self) -> None:
        """Raise `IntegrityError` on a broken link, a run nobody holds or a miscounted byte."""
        num_bytes = 0
        for node in self._nodes():
            num_bytes += NODE_BYTES + len(node.tokens) + HOLDER_BYTES * len(node.held)
            if len(node.tokens) != node.num_blocks * self._width or node.forgotten:
                raise IntegrityError("an index node's tokens and blocks differ, or it was forgotten")
            if node.parent is not None and not node.held:
                raise IntegrityError("an index node is held by nobody")
            for worker, held in node.held.items():
                if not 0 <= node.host.get(worker, 0) <= held <= node.num_blocks or not held:
                    raise IntegrityError(f"worker {worker} holds {held} of {node.num_blocks} blocks")
            for key, child in node.children.items():
                if (
                    child.parent is not node
                    or bytes(child.tokens[: self._width]) != key
                    or child.start != node.start + node.num_blocks
                ):
                    raise IntegrityError("an index node hangs in the wrong place")
                if node.parent is not None and any(
                    node.held.get(worker) != node.num_blocks for worker in child.held
                ):
                    raise IntegrityError("a worker holds a block and not those before it")
        if num_bytes != self.num_bytes:
            raise IntegrityError(f"the index counts {self.num_bytes} bytes and holds {num_bytes}")
