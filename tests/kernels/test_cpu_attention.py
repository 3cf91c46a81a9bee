"""The numba attention twin against the oracle, and what must not change its result by a single bit."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.kernels import dispatch, reference

from .batches import Batch, Shape, ragged_batch

TOLERANCE = {
    # A score of 40 is off by 2e-6 in float32, and its weight by as much of itself.
    torch.float32: {"rtol": 2e-5, "atol": 6e-6},
    # One unit in the last place: float32 and float64 may round to different neighbours.
    torch.bfloat16: {"rtol": 2**-7, "atol": 6e-6},
    torch.float16: {"rtol": 2**-10, "atol": 6e-6},
}


def assert_matches_oracle(batch: Batch, *, sharpness: float = 1.0, **options: object) -> None:
    """`sharpness` scales the scores, and with them what float32 loses of a weight."""
    actual = dispatch.paged_attention(**batch.arguments(), **options)
    expected = reference.paged_attention(**batch.arguments(), **options)
    assert actual.dtype == batch.q.dtype
    tolerance = TOLERANCE[batch.q.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance["rtol"], atol=tolerance["atol"] * sharpness)


shapes = st.builds(
    lambda kv_heads, group, head_dim, block_size, dtype: Shape(
        heads=kv_heads * group, kv_heads=kv_heads, head_dim=head_dim, block_size=block_size, dtype=dtype
    ),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 3, 4, 8]),
    head_dim=st.sampled_from([8, 20, 32, 64, 72, 128]),
    block_size=st.sampled_from([8, 16, 24, 32, 64, 5]),
    dtype=st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float16]),
)
sequences = st.lists(
    st.tuples(
        st.one_of(st.just(1), st.integers(0, 60)), st.one_of(st.integers(0, 90), st.integers(400, 1300))
    ).map(lambda pair: (pair[0], pair[0] + pair[1])),
    min_size=1,
    max_size=4,
)


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    shape=shapes,
    sequences=sequences,
    sliding_window=st.one_of(st.none(), st.integers(1, 200)),
    softcap=st.one_of(st.none(), st.floats(0.5, 50.0)),
    strided=st.booleans(),
    sharpness=st.sampled_from([1.0, 8.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_ragged_batch_matches_the_oracle(
    shape: Shape,
    sequences: list[tuple[int, int]],
    sliding_window: int | None,
    softcap: float | None,
    strided: bool,
    sharpness: float,
    seed: int,
) -> None:
    batch = ragged_batch(
        sequences, shape, seed=seed, sliding_window=sliding_window, strided=strided, sharpness=sharpness
    )
    assert_matches_oracle(batch, sharpness=sharpness, sliding_window=sliding_window, softcap=softcap)


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33, 48, 64])
@pytest.mark.parametrize("block_size", [8, 16, 24])
def test_d03_lengths_around_block_edges(length: int, block_size: int) -> None:
    shape = Shape(block_size=block_size)
    assert_matches_oracle(ragged_batch([(length, length), (1, length)], shape, seed=length))


def test_long_context_is_cut_and_merged() -> None:
    assert_matches_oracle(
        ragged_batch([(1, 5003), (7, 4096), (1, 1)], Shape(heads=9, kv_heads=3, head_dim=64))
    )


def test_one_token_is_its_own_value() -> None:
    batch = ragged_batch([(1, 1)])
    actual = dispatch.paged_attention(**batch.arguments())
    slot = batch.v_cache[batch.block_tables[0, 0], :, 0].repeat_interleave(3, dim=0)
    torch.testing.assert_close(actual[0], slot)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf"), 3e38])
@pytest.mark.parametrize("sliding_window", [None, 5])
def test_slots_nobody_sees_do_not_matter(poison: float, sliding_window: int | None) -> None:
    cases = [(1, 19), (20, 20), (3, 50), (0, 7)]
    clean = ragged_batch(cases, sliding_window=sliding_window, poison=0.0)
    dirty = ragged_batch(cases, sliding_window=sliding_window, poison=poison)
    assert torch.equal(
        dispatch.paged_attention(**dirty.arguments(), sliding_window=sliding_window),
        dispatch.paged_attention(**clean.arguments(), sliding_window=sliding_window),
    )


def test_nan_of_one_sequence_stays_there() -> None:
    batch = ragged_batch([(1, 40), (1, 40)])
    batch.k_cache[batch.block_tables[0, 1], :, 3] = float("nan")
    actual = dispatch.paged_attention(**batch.arguments())
    assert actual[0].isnan().all()
    assert not actual[1].isnan().any()


@pytest.mark.parametrize("options", [{}, {"sliding_window": 30}, {"softcap": 20.0}])
def test_d10_neighbours_and_threads_change_no_bit(options: dict[str, object]) -> None:
    cases = [(1, 700), (100, 100), (1, 3), (16, 1200), (0, 5), (40, 90)]
    batch = ragged_batch(cases, Shape(heads=9, kv_heads=3, head_dim=64))
    together = dispatch.paged_attention(**batch.arguments(), **options)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert torch.equal(dispatch.paged_attention(**batch.arguments(), **options), together)
    finally:
        torch.set_num_threads(threads)
    for s, _ in enumerate(cases):
        alone = dispatch.paged_attention(**batch.sequence(s).arguments(), **options)
        assert torch.equal(alone, together[batch.rows(s)])


@pytest.mark.parametrize("options", [{}, {"sliding_window": 90}])
@pytest.mark.parametrize("block_size", [16, 24])
def test_the_tiles_of_a_chunk_change_no_bit(options: dict[str, object], block_size: int) -> None:
    # Beside the others the first chunk is one tile; alone it is cut, for every thread to have some.
    cases = [(53, 300), (400, 410), (200, 205), (30, 700)]
    batch = ragged_batch(cases, Shape(heads=6, kv_heads=2, head_dim=32, block_size=block_size), seed=4)
    together = dispatch.paged_attention(**batch.arguments(), **options)
    for s, _ in enumerate(cases):
        alone = dispatch.paged_attention(**batch.sequence(s).arguments(), **options)
        assert torch.equal(alone, together[batch.rows(s)])
    assert_matches_oracle(batch, **options)


def test_nan_of_one_chunk_stays_there() -> None:
    shape = Shape(heads=9, kv_heads=3, head_dim=64)
    batch = ragged_batch([(40, 200)] * 2 + [(10, 200)] * 3, shape)
    batch.block_tables[1:, :8] = batch.block_tables[0, :8]
    for s in (0, 3):
        batch.v_cache[batch.block_tables[s, 10], :, 3] = float("nan")
        batch.k_cache[batch.block_tables[s, 11], :, 3] = float("nan")
    actual = dispatch.paged_attention(**batch.arguments())
    for s in range(5):
        assert actual[batch.rows(s)].isnan().all() == (s in (0, 3))
        assert actual[batch.rows(s)].isnan().any() == (s in (0, 3))


def test_rows_of_padding_are_left_alone() -> None:
    batch = ragged_batch([(2, 9), (1, 30)])
    batch.q = torch.cat([batch.q, torch.full_like(batch.q[:2], float("nan"))])
    assert torch.equal(dispatch.paged_attention(**batch.arguments())[3:], torch.zeros_like(batch.q[3:]))
    out = torch.full_like(batch.q, 7.0)
    assert dispatch.paged_attention(**batch.arguments(), out=out) is out
    assert (out[3:] == 7.0).all()
    assert (out[:3] != 7.0).all()


def test_out_may_be_a_slice_of_wider_rows() -> None:
    batch = ragged_batch([(5, 21)])
    wide = torch.full((5, batch.q.shape[1] + 2, batch.q.shape[2]), 7.0)
    dispatch.paged_attention(**batch.arguments(), out=wide[:, 1:-1])
    assert torch.equal(wide[:, 1:-1], dispatch.paged_attention(**batch.arguments()))
    assert (wide[:, 0] == 7.0).all()
    assert (wide[:, -1] == 7.0).all()


def test_several_threads_may_call_at_once() -> None:
    batch = ragged_batch([(30, 300), (1, 900)])
    expected = dispatch.paged_attention(**batch.arguments())

    def call(_: int) -> bool:
        return torch.equal(dispatch.paged_attention(**batch.arguments()), expected)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(call, range(60)))


def _break(batch: Batch, what: str) -> None:
    if what == "block outside the cache":
        batch.block_tables[0, 0] = batch.k_cache.shape[0]
    elif what == "negative block":
        batch.block_tables[0, 0] = -1
    elif what == "context longer than the table":
        batch.context_lens[0] = 10_000
    elif what == "more rows than context":
        batch.context_lens[0] = 1
    elif what == "falling bounds":
        batch.cu_seqlens_q = torch.tensor([0, -1], dtype=torch.int32)
    elif what == "int64 table":
        batch.block_tables = batch.block_tables.long()
    elif what == "heads that do not divide":
        batch.q = batch.q[:, :5]
    elif what == "caches of two types":
        batch.v_cache = batch.v_cache.half()
    elif what == "cache that is not contiguous":
        batch.k_cache = batch.k_cache.transpose(1, 2)
        batch.v_cache = batch.v_cache.transpose(1, 2)
    elif what == "cache of integers":
        batch.k_cache, batch.v_cache = batch.k_cache.int(), batch.v_cache.int()
    else:
        raise AssertionError(what)


@pytest.mark.parametrize(
    "what",
    [
        "block outside the cache",
        "negative block",
        "context longer than the table",
        "more rows than context",
        "falling bounds",
        "int64 table",
        "heads that do not divide",
        "caches of two types",
        "cache that is not contiguous",
        "cache of integers",
    ],
)
def test_a_wrong_batch_is_refused_before_anything_is_read(what: str) -> None:
    batch = ragged_batch([(2, 20)], poison=0.0)
    _break(batch, what)
    with pytest.raises(ValueError, match=r"\w+ \w+"):
        dispatch.paged_attention(**batch.arguments())


@pytest.mark.parametrize("options", [{"sliding_window": 0}, {"softcap": 0.0}, {"softcap": float("nan")}])
def test_options_out_of_range_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="must be"):
        dispatch.paged_attention(**ragged_batch([(1, 4)]).arguments(), **options)


def test_an_empty_step_computes_nothing() -> None:
    batch = ragged_batch([(0, 12), (0, 0)])
    assert dispatch.paged_attention(**batch.arguments()).shape == (0, 6, 32)
