"""The index over all workers says what each worker's own tree says, whatever happens to them."""

from __future__ import annotations

import random

import numpy as np
import pytest

from octavo.scheduler.prefix_index import NODE_BYTES, PrefixIndex
from octavo.scheduler.prefix_tree import PrefixTree

from .support import Harness, make_request


def tree_paths(tree: PrefixTree) -> set[tuple]:
    width = tree.block_size * 4
    found = set()
    for node in tree.nodes():
        before, above = b"", node.parent
        while above is not None:
            before = bytes(above.tokens) + before
            above = above.parent
        for place, block in enumerate(node.blocks):
            tokens = before + bytes(node.tokens[: (place + 1) * width])
            found.add((node.root_key, tokens, block >= tree.num_device_blocks))
    return found


def lives(seed: int, index: PrefixIndex, num_steps: int):
    """Three workers with small pools and a host tier live on prompts that share their beginnings."""
    rng = random.Random(seed)
    fleet = [
        Harness(
            num_blocks=24,
            block_size=4,
            max_num_seqs=6,
            budget=32,
            num_host_blocks=rng.choice((0, 10)),
            kv_bytes_per_block=1,
            host_link_bytes_per_second=1e9,
        )
        for _ in range(3)
    ]
    for h in fleet:
        h.scheduler.step_time.observe(num_tokens=10, num_rows=1, context_tokens=10, seconds=1.0)
    for worker, h in enumerate(fleet[:2]):
        index.attach(worker, h.scheduler.kv.tree)
    attached = {0, 1}
    for number in range(num_steps):
        h = rng.choice(fleet)
        if rng.random() < 0.3:
            prompt = [n // 5 for n in range(rng.randint(1, 50))]
            prompt[rng.randrange(len(prompt)) :] = [rng.randint(1, 3)] * rng.randint(1, 12)
            h.add(
                make_request(f"r{number}", prompt, max_tokens=rng.randint(1, 12), salt=rng.choice(("", "x")))
            )
        elif rng.random() < 0.1 and (names := h.scheduler.unfinished()):
            h.abort(rng.choice(names))
        else:
            h.step()
        if number == num_steps // 2:
            # One joins with all that it has; another goes.
            index.attach(2, fleet[2].scheduler.kv.tree)
            index.detach(0, fleet[0].scheduler.kv.tree)
            attached = {1, 2}
        yield fleet, attached
    assert sum(h.scheduler.kv.num_blocks_promoted for h in fleet) >= 0


@pytest.mark.parametrize("seed", range(12))
def test_the_index_holds_what_the_trees_hold(seed):
    index = PrefixIndex(4)
    for number, (fleet, attached) in enumerate(lives(seed, index, 300)):
        if number % 3 and number < 290:
            continue
        index.check_integrity()
        for worker in range(3):
            want = tree_paths(fleet[worker].scheduler.kv.tree) if worker in attached else set()
            assert index.paths_of(worker) == want, f"seed {seed} step {number} worker {worker}"


@pytest.mark.parametrize("seed", range(6))
def test_a_lookup_finds_for_each_worker_what_its_own_tree_finds(seed):
    index, rng = PrefixIndex(4), random.Random(seed)
    for fleet, attached in lives(seed, index, 200):
        prompt = [n // 5 for n in range(rng.randint(1, 50))]
        tokens = np.asarray(prompt, np.int32).tobytes()
        limit = rng.randint(0, 12)
        held, on_host = index.lookup(("", ""), tokens, limit)
        for worker in attached:
            tree = fleet[worker].scheduler.kv.tree
            path = tree.match(("", ""), tokens, limit)
            assert held.get(worker, 0) == len(path)
            assert on_host.get(worker, 0) == sum(block >= tree.num_device_blocks for block in path)
        assert held.keys() <= attached


@pytest.mark.parametrize("seed", range(6))
def test_over_its_limit_the_index_forgets_and_never_promises_too_much(seed):
    index = PrefixIndex(4, bytes_max=6 * NODE_BYTES)
    for fleet, attached in lives(seed, index, 300):
        index.check_integrity()
        assert index.num_bytes <= index.bytes_max
        for worker in attached:
            assert index.paths_of(worker) <= tree_paths(fleet[worker].scheduler.kv.tree)
    assert index.num_forgotten_blocks


def test_nothing_is_left_when_all_is_gone():
    index, tree = PrefixIndex(4), PrefixTree(20, 4)
    index.attach(0, tree)
    tokens = np.arange(40, dtype=np.int32).tobytes()
    tree.extend(("", ""), None, tokens, list(range(10)))
    assert index.num_bytes > len(tokens)
    for block in reversed(range(10)):
        tree.evict(block)
    assert index.num_bytes == 0
