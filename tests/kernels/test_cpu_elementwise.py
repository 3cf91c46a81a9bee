"""The CPU's fused operations against their oracles, and what their callers rely on: rows do not see each other."""

from __future__ import annotations

import pytest
import torch

from octavo.kernels import dispatch, reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}[got.dtype]
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(0, 8), (1, 576), (3, 33), (5, 4), (200, 640)])
def test_rms_norm(rows: int, size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(rows)
    wide = torch.randn(rows, size + 7).to(dtype)
    x, weight = wide[:, :size], torch.randn(size).to(dtype)
    before = x.clone()
    close(dispatch.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    residual = torch.randn(rows, size).to(dtype)
    expected_residual = residual.clone()
    expected = reference.rms_norm(x, weight, 1e-5, expected_residual)
    close(dispatch.rms_norm(x, weight, 1e-5, residual), expected)
    close(residual, expected_residual)
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(0, 8), (1, 1536), (3, 13), (100, 700)])
def test_silu_mul(rows: int, size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(rows)
    gate_up = torch.randn(rows, 2 * size + 3).to(dtype)[:, : 2 * size]
    close(dispatch.silu_mul(gate_up), reference.silu_mul(gate_up))


def test_silu_mul_at_the_ends() -> None:
    gate = torch.tensor([[0.0, -0.0, 1e-30, 90.0, -90.0, 3e4, -3e4, float("nan")]]).repeat(1, 2)
    up = torch.full_like(gate, 2.0)
    got = dispatch.silu_mul(torch.cat((gate, up), dim=1))
    torch.testing.assert_close(got, reference.silu_mul(torch.cat((gate, up), dim=1)), equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "turned"), [(64, 64), (16, 8), (20, 12)])
def test_write_kv_rope(head_dim: int, turned: int, dtype: torch.dtype) -> None:
    torch.manual_seed(head_dim)
    slots = torch.tensor([3, -1, 17, 18, 40, 63, 0])
    fused = torch.randn(len(slots), 10, head_dim).to(dtype)
    angles = torch.randn(len(slots), turned)
    cos, sin = angles.cos()[:, : turned // 2], angles.sin()[:, : turned // 2]
    caches = torch.randn(2, 4, 2, 16, head_dim).to(dtype)
    expected, expected_caches = fused.clone(), caches.clone()
    for operation, heads, kv in (
        (dispatch.write_kv_rope, fused, caches),
        (reference.write_kv_rope, expected, expected_caches),
    ):
        q, k, v = heads.split((6, 2, 2), dim=1)
        operation(q, k, v, cos, sin, kv[0], kv[1], slots)
    close(fused, expected)
    close(caches, expected_caches)


def test_a_slot_outside_the_cache_is_refused_before_anything_is_written() -> None:
    q, kv, angles = torch.ones(2, 2, 8), torch.ones(2, 1, 8), torch.ones(2, 4)
    caches = torch.zeros(2, 2, 1, 4, 8)
    with pytest.raises(ValueError, match="slot"):
        dispatch.write_kv_rope(q, kv, kv, angles, angles, caches[0], caches[1], torch.tensor([0, 8]))
    assert not caches.any()
    assert torch.equal(q, torch.ones(2, 2, 8))


def test_normalize_and_scale_rows() -> None:
    torch.manual_seed(1)
    x = torch.randn(5, 21) * torch.tensor([1.0, 1e-3, 1e4, 0.0, 1.0])[:, None]
    rows, peaks = dispatch.normalize_rows(x)
    expected_rows, expected_peaks = reference.normalize_rows(x)
    close(rows, expected_rows)
    close(peaks, expected_peaks)
    for bias in (None, torch.randn(21)):
        got, expected = rows[:-1].clone(), rows[:-1].clone()
        dispatch.scale_rows(got, peaks, bias)
        reference.scale_rows(expected, peaks, bias)
        close(got, expected)


def test_a_row_does_not_depend_on_its_neighbours_or_on_threads() -> None:
    torch.manual_seed(2)
    x, weight, gate_up = torch.randn(300, 576), torch.randn(576), torch.randn(300, 1536)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        normed, activated = dispatch.rms_norm(x, weight, 1e-5), dispatch.silu_mul(gate_up)
        rows, peaks = dispatch.normalize_rows(x)
        scaled = x.clone()
        dispatch.scale_rows(scaled, peaks, weight)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(normed[7:8], dispatch.rms_norm(x[7:8], weight, 1e-5))
    assert torch.equal(activated[7:8], dispatch.silu_mul(gate_up[7:8]))
    own_rows, own_peaks = dispatch.normalize_rows(x[7:8])
    own_scaled = x[7:8].clone()
    dispatch.scale_rows(own_scaled, own_peaks, weight)
    assert torch.equal(rows[[7, -1]], own_rows)
    assert torch.equal(peaks[7:8], own_peaks)
    assert torch.equal(scaled[7:8], own_scaled)


@pytest.mark.parametrize(
    "call",
    [
        lambda: dispatch.rms_norm(torch.ones(2, 4), torch.ones(3), 1e-5),
        lambda: dispatch.rms_norm(torch.ones(2, 4), torch.ones(4), 1e-5, torch.ones(1, 4)),
        lambda: dispatch.silu_mul(torch.ones(2, 5)),
        lambda: dispatch.scale_rows(torch.ones(2, 4), torch.ones(3)),
        lambda: dispatch.normalize_rows(torch.ones(2, 1)),
    ],
)
def test_wrong_shapes_are_refused(call) -> None:
    with pytest.raises(ValueError, match="must"):
        call()
