"""Attention in parts against the oracle: keys cut into splits, prefixes that a batch shares, quantised caches.

Run by `test_triton_properties.py` in a process of its own. The plain kernel has its cases in `triton_cases.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.kernels import merge_partials, reference
from octavo.kernels import paged_attention as module
from octavo.kernels.cascade_attention import cascade_attention
from octavo.kernels.paged_attention import choose_splits, paged_attention

from .batches import Batch, Shape, ragged_batch
from .triton_device import DEVICE, INTERPRETED

shapes = st.builds(
    lambda kv_heads, group, head_dim, block_size, dtype: Shape(
        heads=kv_heads * group, kv_heads=kv_heads, head_dim=head_dim, block_size=block_size, dtype=dtype
    ),
    kv_heads=st.integers(1, 2),
    group=st.sampled_from([1, 3, 4]),
    head_dim=st.sampled_from([16, 20, 64]),
    block_size=st.sampled_from([8, 16, 24, 64]),
    dtype=st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float16]),
)
few = settings(max_examples=16, deadline=None, derandomize=True)


@pytest.fixture(autouse=True)
def poisoned_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody wrote must not be read."""

    def empty(cls: type, num_partials: int, q: torch.Tensor) -> merge_partials.Partials:
        sizes = (num_partials, *q.shape)
        results, lse = (
            torch.full(shape, torch.nan, dtype=torch.float32, device=q.device)
            for shape in (sizes, sizes[:-1])
        )
        return merge_partials.Partials(results, lse)

    monkeypatch.setattr(merge_partials.Partials, "empty", classmethod(empty))


def on_device(batch: Batch) -> dict[str, Any]:
    return {
        key: value.to(DEVICE) if isinstance(value, torch.Tensor) else value
        for key, value in vars(batch).items()
    }


def padded(batch: Batch) -> Batch:
    """With a row of padding at the end, which nobody may compute."""
    batch.q = torch.cat([batch.q, batch.q.new_full((1, *batch.q.shape[1:]), torch.nan)])
    return batch


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """`actual` has a row of padding more, which must be as it was."""
    assert (actual[-1] == 7.0).all()
    tolerance = {
        torch.float32: (2e-5, 3e-6),
        # Two units in the last place: the interpreter truncates, and weights are rounded in another order.
        torch.bfloat16: (2**-6, 2**-8),
        torch.float16: (2**-9, 2**-10),
    }[expected.dtype]
    torch.testing.assert_close(actual[:-1].cpu(), expected, rtol=tolerance[0], atol=tolerance[1])


@few
@given(
    shape=shapes,
    sequences=st.lists(
        st.tuples(st.sampled_from([0, 1, 1, 3]), st.integers(0, 900)).map(lambda pair: (pair[0], sum(pair))),
        min_size=1,
        max_size=3,
    ),
    splits=st.sampled_from([0, 0, 1, 2, 3, 8]),
    options=st.sampled_from(
        [{}, {}, {"sliding_window": 300}, {"softcap": 3.0}, {"sliding_window": 20, "softcap": 30.0}]
    ),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_ragged_batch_whole_or_in_splits(
    shape: Shape, sequences: list[tuple[int, int]], splits: int, options: dict[str, Any], seed: int
) -> None:
    batch = ragged_batch(
        sequences, shape, seed=seed, sliding_window=options.get("sliding_window"), strided=True
    )
    expected = reference.paged_attention(**batch.arguments(), **options)
    batch = padded(batch)
    out = torch.full(batch.q.shape, 7.0, dtype=batch.q.dtype, device=DEVICE)
    options = {"sliding_window": None, "softcap": None, **options}
    paged_attention(**on_device(batch), **options, out=out, splits=splits, upcast=INTERPRETED)
    assert_close(out, expected)


@pytest.mark.parametrize(
    ("programs", "keys_max", "splits"),
    [
        (8, 100_000, 32),  # one sequence of a 8-billion Llama
        (64, 100_000, 4),
        (132, 100_000, 2),
        (264, 100_000, 0),
        (10_000, 100_000, 0),
        (8, 256, 0),  # nothing to cut
        (8, 700, 3),
        (0, 0, 0),
    ],
)
def test_splits_are_chosen_by_shapes(programs: int, keys_max: int, splits: int) -> None:
    assert choose_splits(programs=programs, keys_max=keys_max, num_multiprocessors=132) == splits


def test_splits_of_a_step_do_not_depend_on_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph is recorded with one set of lengths and replayed with others."""
    monkeypatch.setattr(module, "multiprocessors", lambda device: 132)
    found = set()
    for contexts in ((1, 1, 1), (9000, 3, 900), (70_000, 70_000, 70_000)):
        rows = torch.zeros(3, 6, 32)
        cache = torch.zeros(1, 2, 16, 32)
        call = module.AttentionCall(
            q=rows,
            k_cache=cache,
            v_cache=cache,
            block_tables=torch.zeros(3, 5000, dtype=torch.int32),
            cu_seqlens_q=torch.arange(4, dtype=torch.int32),
            context_lens=torch.tensor(contexts, dtype=torch.int32),
            scale=1.0,
            sliding_window=None,
            softcap=None,
            scales=None,
            upcast=False,
        )
        found.add((call.choose_splits(), call.num_tiles()))
    assert found == {(32, 3 + 3 // 5)}


def share_prefix(batch: Batch, num_blocks: int) -> None:
    """Make every sequence's first blocks those of the longest."""
    batch.block_tables[:, :num_blocks] = batch.block_tables[batch.context_lens.argmax(), :num_blocks].clone()


@few
@given(
    shape=shapes,
    num_shared_blocks=st.integers(1, 20),
    sequences=st.lists(
        st.tuples(st.sampled_from([0, 1, 1, 5, 20]), st.integers(0, 70)), min_size=1, max_size=4
    ),
    softcap=st.sampled_from([None, None, 3.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_shared_prefix(
    shape: Shape, num_shared_blocks: int, sequences: list[tuple[int, int]], softcap: float | None, seed: int
) -> None:
    shared = num_shared_blocks * shape.block_size
    batch = ragged_batch(
        [(rows, shared + rows + own) for rows, own in sequences], shape, seed=seed, strided=True
    )
    share_prefix(batch, num_shared_blocks)
    expected = reference.paged_attention(**batch.arguments(), softcap=softcap)
    batch = padded(batch)
    out = torch.full(batch.q.shape, 7.0, dtype=batch.q.dtype, device=DEVICE)
    cascade_attention(
        **on_device(batch), softcap=softcap, out=out, num_shared_blocks=num_shared_blocks, upcast=INTERPRETED
    )
    assert_close(out, expected)
