"""Sequences that read the same blocks, on the CPU: read once, and not a bit of any result is another."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from octavo.kernels import dispatch
from octavo.kernels.cpu import plan

from .batches import Batch, Shape, ragged_batch
from .quantised_cache import FORMATS, Cache
from .test_cpu_attention import assert_matches_oracle, shapes

Relations = list[tuple[int, int]]


def share(batch: Batch, relations: Relations) -> None:
    """Sequence by sequence (parent, blocks): it begins with so many of an earlier sequence's blocks, as far as both
    have whole blocks in which no row of this step stands."""
    block_size = batch.k_cache.shape[2]
    before = (batch.context_lens - batch.cu_seqlens_q.diff()) // block_size
    for s, (parent, blocks) in enumerate(relations[: len(before)]):
        if s > 0:
            parent %= s
            shared = min(blocks, int(before[s]), int(before[parent]))
            batch.block_tables[s, :shared] = batch.block_tables[parent, :shared]


def apart(batch: Batch) -> tuple[Batch, torch.Tensor]:
    """The same numbers with every sequence's blocks its own, and which block each was before."""
    tables, lengths, block_size = batch.block_tables, batch.context_lens, batch.k_cache.shape[2]
    used = torch.arange(tables.shape[1]) < -(-lengths // block_size)[:, None]
    before = tables[used].long()
    own = torch.full_like(tables, 2**31 - 1)
    own[used] = torch.arange(len(before), dtype=torch.int32)
    moved = dataclasses.replace(
        batch, k_cache=batch.k_cache[before], v_cache=batch.v_cache[before], block_tables=own
    )
    return moved, before


relations = st.lists(
    st.tuples(st.integers(0, 11), st.one_of(st.integers(0, 12), st.integers(20, 90))),
    min_size=12,
    max_size=12,
)
sequences = st.lists(
    st.tuples(
        st.sampled_from([1, 1, 1, 2, 5, 16, 60, 0]), st.one_of(st.integers(0, 90), st.integers(400, 1300))
    ).map(lambda pair: (pair[0], pair[0] + pair[1])),
    min_size=2,
    max_size=12,
)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    shape=shapes,
    sequences=sequences,
    relations=relations,
    sliding_window=st.one_of(st.none(), st.none(), st.integers(1, 700)),
    softcap=st.one_of(st.none(), st.floats(0.5, 50.0)),
    seed=st.integers(0, 2**32 - 1),
)
# Chunks of unlike lengths behind the same keys, under a soft cap, whose rows are masked one by one.
@example(
    shape=Shape(heads=16, kv_heads=2, head_dim=8, block_size=8, dtype=torch.float32),
    sequences=[(1, 1), (1, 1), (5, 5), (2, 402), (1, 1), (1, 1), (1, 1), (1, 1), (2, 721), (5, 1185)],
    relations=[(0, 0)] * 9 + [(3, 20)],
    sliding_window=None,
    softcap=1.0,
    seed=0,
)
def test_whatever_is_shared_changes_no_bit(
    shape: Shape,
    sequences: list[tuple[int, int]],
    relations: Relations,
    sliding_window: int | None,
    softcap: float | None,
    seed: int,
) -> None:
    batch = ragged_batch(sequences, shape, seed=seed)
    share(batch, relations)
    options: dict[str, Any] = {"sliding_window": sliding_window, "softcap": softcap}
    assert_matches_oracle(batch, **options)
    together = dispatch.paged_attention(**batch.arguments(), **options)
    assert torch.equal(dispatch.paged_attention(**apart(batch)[0].arguments(), **options), together)
    for s in range(len(sequences)):
        alone = dispatch.paged_attention(**batch.sequence(s).arguments(), **options)
        assert torch.equal(alone, together[batch.rows(s)])


@pytest.mark.parametrize("format", FORMATS)
def test_a_shared_quantised_cache_too(format: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    batch = ragged_batch(
        [(1, 700)] * 5 + [(5, 640)] * 3 + [(40, 650)], Shape(heads=9, kv_heads=3, head_dim=64)
    )
    share(batch, [(0, 38)] * 9)
    cache = Cache(*batch.k_cache.shape, format)
    cache.raw.bitwise_and_(0xBF)  # no NaN among the bytes
    for scales in cache.scales:
        scales.copy_(2.0 ** torch.randint(-6, -3, scales.shape, generator=generator))
    together = dispatch.paged_attention(
        **batch.arguments() | {"k_cache": cache.k, "v_cache": cache.v, "scales": cache.scales}
    )
    for s in range(9):
        alone = batch.sequence(s).arguments() | {"k_cache": cache.k, "v_cache": cache.v}
        assert torch.equal(dispatch.paged_attention(**alone, scales=cache.scales), together[batch.rows(s)])


def keys_read(batch: Batch, group: int, *, items_min: int = 1, sliding_window: int = 0) -> int:
    """Keys that the items of a batch read, for each KV head."""
    items, members, _, _ = plan.plan_items(
        batch.block_tables.numpy(),
        batch.cu_seqlens_q.numpy(),
        batch.context_lens.numpy(),
        batch.k_cache.shape[2],
        group,
        sliding_window,
        items_min,
    )
    assert [*items[:, plan.FIRST], len(members)] == [0, *items[:, plan.END]]
    return int((members[:, plan.KEY_END] - members[:, plan.TOGETHER]).sum())


def test_a_prefix_is_read_once_by_a_tile_of_rows() -> None:
    batch = ragged_batch([(1, 768 + 40)] * 24)
    assert keys_read(batch, group=3) == 24 * 808
    share(batch, [(0, 48)] * 24)
    # 16 sequences of 3 rows fill a tile.
    assert keys_read(batch, group=3) == 2 * 768 + 24 * 40
    # Four items are left where four are wanted.
    assert keys_read(batch, group=3, items_min=8) == 4 * 768 + 24 * 40
    assert keys_read(batch, group=3, sliding_window=1000) == 24 * 808


def test_groups_and_their_groups_are_found_in_any_order() -> None:
    batch = ragged_batch([(1, 500)] * 8)
    share(batch, [(0, 0), (0, 16), (0, 16), (2, 28), (1, 28), (0, 28), (5, 30), (0, 0)])
    # All but the last share 256 keys; two pairs and one group of three 448, two of the three 480, in whole key tiles.
    own = 500 - 448
    assert keys_read(batch, group=1) == 256 + 3 * (448 - 256) + 7 * own + 500


def test_only_whole_blocks_that_all_rows_see_are_read_together() -> None:
    batch = ragged_batch([(1, 130), (1, 129), (4, 130), (1, 120)])
    batch.block_tables[1:, :7] = batch.block_tables[0, :7]
    assert keys_read(batch, group=1) == 64 + 66 + 65 + 66 + 56
    batch.block_tables[1:, :8] = batch.block_tables[0, :8]
    # The chunk's first row sees 127 keys.
    assert keys_read(batch, group=1) == 128 + 2 + 1 + (130 - 64) + (120 - 64)
