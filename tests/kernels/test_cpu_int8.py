"""Products of int8 on CPUs with VNNI against the oracle, and what a batch may not do to a row."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.kernels import dispatch, reference
from octavo.kernels.cpu import gemm
from octavo.kernels.cpu.tile import LINE, PANEL

from .test_cpu_gemm import OF_ANY_SIZE, rows_of_wider

pytestmark = pytest.mark.skipif(
    not dispatch.has_int8_products(), reason="this CPU (or NUMBA_CPU_FEATURES) has no AVX-512 VNNI"
)

GROUP_SIZE = 4 * gemm.GROUP_MAX
SIZES = st.one_of(st.integers(1, 3 * PANEL), st.sampled_from([PANEL, 2 * PANEL, 9 * GROUP_SIZE, 577, 1536]))


@settings(max_examples=40, deadline=None)
@given(outputs=SIZES, inputs=SIZES, **OF_ANY_SIZE)
def test_products_of_every_shape(
    rows: int, outputs: int, inputs: int, spare: int, bias: bool, gated: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    weight = torch.randn(2 * outputs if gated else outputs, inputs) / math.sqrt(inputs)
    own_bias = torch.randn(len(weight)) if bias else None
    # Rows of very different sizes.
    x = rows_of_wider(rows, inputs, spare)
    x *= 10.0 ** torch.randint(-3, 3, (rows, 1))
    got = dispatch.multiply(x, dispatch.pack_weight(weight, own_bias, gated=gated, int8=True))
    expected = reference.quantised_multiply(x, weight, own_bias, gated=gated, group_size=GROUP_SIZE)
    assert got.shape == (rows, outputs)
    assert got.is_contiguous()
    size = x.abs().amax(dim=1, keepdim=True)
    assert ((got - expected).abs() <= 1e-5 * (1 + size + gated * size**2)).all()


@pytest.mark.parametrize("gated", [False, True])
def test_a_row_is_the_same_beside_any_others_and_by_any_number_of_threads(gated: bool) -> None:
    torch.manual_seed(1)
    weight, bias = torch.randn(4 * PANEL + 6, 700), torch.randn(4 * PANEL + 6)
    packed = dispatch.pack_weight(weight, bias, gated=gated, int8=True)
    x = torch.randn(210, 700)
    alone = torch.cat([dispatch.multiply(row[None], packed) for row in x])
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            for rows in (1, 2, 5, 6, 7, 13, 97, 210):
                assert torch.equal(dispatch.multiply(x[:rows], packed), alone[:rows])
                assert torch.equal(dispatch.multiply(x[-rows:], packed), alone[-rows:])
    finally:
        torch.set_num_threads(threads)


def test_what_is_not_finite_stays_in_its_row() -> None:
    packed, x = dispatch.pack_weight(torch.ones(PANEL, 300), int8=True), torch.ones(5, 300)
    x[1, 2], x[2, 299], x[3, 100] = torch.nan, torch.inf, -torch.inf
    got = dispatch.multiply(x, packed)
    assert got[1].isnan().all()
    assert not got[2:4].isfinite().any()
    torch.testing.assert_close(got[[0, 4]], torch.full((2, PANEL), 300.0))


def test_zeros_and_the_smallest_numbers() -> None:
    weight = torch.randn(PANEL, 40)
    weight[3] = 0
    packed = dispatch.pack_weight(weight, int8=True)
    assert not dispatch.multiply(torch.zeros(2, 40), packed).any()
    assert not dispatch.multiply(torch.full((1, 40), 1e-40), packed).any()
    got = dispatch.multiply(torch.full((1, 40), 1e30), packed)
    assert got.isfinite().all()
    assert got[0, 3] == 0


def test_one_large_number_costs_its_own_group_digits_and_no_other() -> None:
    torch.manual_seed(3)
    weight, x = torch.randn(PANEL, 4 * GROUP_SIZE), torch.randn(2, 4 * GROUP_SIZE)
    packed = dispatch.pack_weight(weight, int8=True)
    x[1, :GROUP_SIZE] = 0
    x[1, 0], weight_of_it = 1000.0, weight[:, 0]
    got = dispatch.multiply(x, packed)[1] - 1000 * weight_of_it
    rest = weight[:, GROUP_SIZE:] @ x[1, GROUP_SIZE:]
    scale_error = 1000 * weight.abs().amax(dim=1) / 127 / 2
    assert ((got - rest).abs() <= scale_error + 0.05 * rest.norm()).all()


def test_panels_lie_on_cache_lines_and_end_in_zeros() -> None:
    packed = dispatch.pack_weight(torch.ones(PANEL + 1, 7), int8=True)
    assert packed.panels.data_ptr() % LINE == 0
    assert packed.panels.shape == (2, 2, PANEL, 4)
    assert packed.panels[1, :, 1:].count_nonzero() == 0
    assert packed.panels[:, 1, :, 3].count_nonzero() == 0
    assert dispatch.multiply(torch.ones(0, 7), packed).shape == (0, PANEL + 1)
