"""The CPU's own matrix products against the oracle, and what a batch may not do to a row."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.kernels import dispatch, reference
from octavo.kernels.cpu import gemm
from octavo.kernels.cpu.tile import LINE, PANEL, TILE_ROWS

SIZES = st.one_of(
    st.integers(1, 3 * PANEL), st.sampled_from([PANEL, 2 * PANEL, gemm.DEPTH_MAX, gemm.DEPTH_MAX + 1])
)
ROWS = st.one_of(st.integers(1, 3 * TILE_ROWS), st.integers(gemm.ROWS_MAX - 1, 2 * gemm.ROWS_MAX + 1))
OF_ANY_SIZE = {
    "rows": ROWS,
    "spare": st.integers(0, 5),
    "bias": st.booleans(),
    "gated": st.booleans(),
    "seed": st.integers(0, 99),
}
"""What a product's test is given beside the sizes of the weight."""


def rows_of_wider(rows: int, inputs: int, spare: int) -> torch.Tensor:
    """Rows of a wider tensor, whose other numbers must not be read."""
    return torch.full((rows, inputs + spare), torch.nan)[:, :inputs].copy_(torch.randn(rows, inputs))


@settings(max_examples=60, deadline=None)
@given(outputs=SIZES, inputs=SIZES, **OF_ANY_SIZE)
def test_products_of_every_shape(
    rows: int, outputs: int, inputs: int, spare: int, bias: bool, gated: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    weight = torch.randn(2 * outputs if gated else outputs, inputs)
    own_bias = torch.randn(len(weight)) if bias else None
    x = rows_of_wider(rows, inputs, spare)
    got = dispatch.multiply(x, dispatch.pack_weight(weight, own_bias, gated=gated))
    expected = reference.multiply(x, weight, own_bias, gated=gated)
    assert got.shape == (rows, outputs)
    assert got.is_contiguous()
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5 * inputs)


@pytest.mark.parametrize("gated", [False, True])
def test_a_row_is_the_same_beside_any_others(gated: bool) -> None:
    torch.manual_seed(1)
    packed = dispatch.pack_weight(torch.randn(4 * PANEL + 6, 700), torch.randn(4 * PANEL + 6), gated=gated)
    x = torch.randn(210, 700)
    alone = torch.cat([dispatch.multiply(row[None], packed) for row in x])
    for rows in (2, 5, 6, 7, 13, 97, 210):
        assert torch.equal(dispatch.multiply(x[:rows], packed), alone[:rows])
        assert torch.equal(dispatch.multiply(x[-rows:], packed), alone[-rows:])


def test_the_number_of_threads_does_not_matter() -> None:
    torch.manual_seed(2)
    packed, x = dispatch.pack_weight(torch.randn(3 * PANEL, 64)), torch.randn(40, 64)
    threads = torch.get_num_threads()
    results = []
    for count in (1, 2):
        torch.set_num_threads(count)
        results.append(dispatch.multiply(x, packed))
    torch.set_num_threads(threads)
    assert torch.equal(*results)


def test_nan_stays_in_its_row() -> None:
    packed, x = dispatch.pack_weight(torch.ones(PANEL, 8)), torch.ones(3, 8)
    x[1, 2] = torch.nan
    got = dispatch.multiply(x, packed)
    assert got[1].isnan().all()
    assert torch.equal(got[[0, 2]], torch.full((2, PANEL), 8.0))


def test_panels_lie_on_cache_lines_and_end_in_zeros() -> None:
    packed = dispatch.pack_weight(torch.ones(PANEL + 1, 3))
    assert packed.panels.data_ptr() % LINE == 0
    assert packed.panels[1, :, 1:].count_nonzero() == 0


def test_refusals() -> None:
    packed = dispatch.pack_weight(torch.ones(4, 8))
    for bad in (
        lambda: dispatch.pack_weight(torch.ones(4, 8).half()),
        lambda: dispatch.pack_weight(torch.ones(3, 8), gated=True),
        lambda: dispatch.pack_weight(torch.ones(4, 8), torch.ones(3)),
        lambda: dispatch.multiply(torch.ones(2, 7), packed),
        lambda: dispatch.multiply(torch.ones(8, 2).T, packed),
        lambda: dispatch.multiply(torch.ones(2, 8).double(), packed),
    ):
        with pytest.raises(ValueError, match="float32"):
            bad()
    assert dispatch.multiply(torch.ones(0, 8), packed).shape == (0, 4)
