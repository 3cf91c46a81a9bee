"""Each form of a matrix product against torch's own, and what a batch may not do to a row."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from octavo.kernels import dispatch
from octavo.protos.errors import ConfigError
from octavo.worker.accelerate import accelerate, probe_logits
from octavo.worker.linears import (
    Float16Linear,
    Int8Linear,
    Linear,
    LinearModule,
    PackedLinear,
    PlainLinear,
    make_linear,
)

from .model_support import load

HAS_VNNI = dispatch.has_int8_products()
needs_vnni = pytest.mark.skipif(
    not HAS_VNNI, reason="this CPU has no AVX-512 VNNI: int8 products are FBGEMM's"
)


def own_int8(weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
    return PackedLinear(weight, bias, int8=True)


FORMS = {PlainLinear: 1e-6, PackedLinear: 1e-5, Float16Linear: 1e-3, Int8Linear: 0.03, own_int8: 0.02}
"""And how far from float32 each may be, relative to the length of the row."""
each_form = pytest.mark.parametrize(
    "form", [pytest.param(form, marks=[needs_vnni] if form is own_int8 else []) for form in FORMS]
)


@pytest.mark.parametrize("bias", [False, True])
@each_form
def test_every_form_is_the_product(form: Callable[..., Linear], bias: bool) -> None:
    torch.manual_seed(3)
    weight, own_bias = torch.randn(40, 24), torch.randn(40) if bias else None
    linear = form(weight, own_bias)
    assert linear.in_features == 24
    for rows in (1, 2, 7, 33):
        x = torch.randn(rows, 24)
        got, expected = linear(x), functional.linear(x, weight, own_bias)
        assert got.shape == (rows, 40)
        assert got.is_contiguous()
        assert ((got - expected).norm(dim=1) <= FORMS[form] * expected.norm(dim=1)).all()


@each_form
def test_neighbours_change_a_row_by_rounding_only(form: Callable[..., Linear]) -> None:
    torch.manual_seed(4)
    linear, x = form(torch.randn(40, 24), None), torch.randn(5, 24)
    crowd = torch.cat((x, 1e3 * torch.randn(40, 24)))
    torch.testing.assert_close(linear(crowd)[:5], linear(x), rtol=1e-5, atol=1e-5)


def test_int8_keeps_rows_of_zeros() -> None:
    linear = Int8Linear(torch.randn(8, 24), None)
    assert torch.equal(linear(torch.zeros(2, 24)), torch.zeros(2, 8))


@pytest.mark.parametrize("own", [False, pytest.param(True, marks=needs_vnni)])
def test_int8_is_this_projects_kernel_where_the_cpu_has_it(
    own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not own:
        monkeypatch.setattr(dispatch, "has_int8_products", lambda: False)
    made = make_linear(torch.randn(16, 24), quantization="int8")
    assert isinstance(made, PackedLinear if own else Int8Linear)
    assert make_linear(torch.randn(16, 24), quantization="int8", gated=True)(torch.ones(1, 24)).shape == (
        1,
        8,
    )


def test_half_weights_stay_with_torch() -> None:
    assert isinstance(make_linear(torch.randn(8, 8).bfloat16()), PlainLinear)


@pytest.mark.parametrize("quantization", [None, "fp16", "int8"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen2_moe"])
def test_accelerated_models_compute_the_same(
    family: str, quantization: str | None, tiny_model_dir: Callable[..., Path]
) -> None:
    loaded = load(tiny_model_dir(family))
    before = probe_logits(loaded)
    decoder = accelerate(loaded, quantization=quantization)
    after = probe_logits(loaded, decoder)
    close_enough = {None: 1e-4, "fp16": 1e-2, "int8": 0.3}[quantization]
    assert (after - before).norm() <= close_enough * before.norm()
    if decoder is None:
        assert isinstance(loaded.module.lm_head, LinearModule)
    else:
        assert loaded.module.lm_head.weight.numel() == 0  # taken over, not held twice


def test_a_model_that_only_looks_like_llama_keeps_its_module_graph(
    tiny_model_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load(tiny_model_dir("llama"))
    layer = type(loaded.module.model.layers[0])
    original = layer.forward
    monkeypatch.setattr(layer, "forward", lambda self, x, **kwargs: 1.01 * original(self, x, **kwargs))
    assert accelerate(loaded) is None


def test_quantization_needs_float32(tiny_model_dir: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match="float32"):
        accelerate(load(tiny_model_dir(), dtype="bfloat16"), quantization="int8")
