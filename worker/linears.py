"""Matrix products with fixed weights, in the forms that run fastest here.

Owns the forms and the choice among them. On a CPU weights are packed once into the layout that the code behind
reads in order: our own kernel for float32 and, on CPUs with AVX-512 VNNI, for int8; FBGEMM for float16 weights (widened
to float32 as they are read, float32 sums), and for int8 elsewhere. Measured, the packed form of a dtype was the fastest
at every number of rows (docs/performance.md), so a weight is held in one form. By our own kernel a row's result is then
the same to the last bit, however many rows stand beside it. Anything else (other devices, other dtypes) is
`PlainLinear`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Protocol

import torch
from torch import nn
from torch.nn import functional

from octavo.kernels import dispatch


class Linear(Protocol):
    """x [T, in_features] -> [T, out_features], contiguous, a new tensor."""

    in_features: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


class PlainLinear:
    """torch's own, in the dtype of the weight."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.in_features = weight.shape[1]
        self._weight, self._bias = weight, bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self._weight, self._bias)


class PackedLinear:
    """float32 throughout, or int8, by this project's own kernel (`kernels.cpu.gemm`).

    gated  the first half of the outputs are gates of the others: SiLU of them times these comes out
    int8   int8 weights with a scale each output, int8 activations with a scale for each 64 of a row
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, *, gated: bool = False, int8: bool = False
    ) -> None:
        self.in_features = weight.shape[1]
        self._weight = dispatch.pack_weight(
            weight.detach(), None if bias is None else bias.detach(), gated=gated, int8=int8
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return dispatch.multiply(x, self._weight)


class Gated:
    """SiLU of the first half of a product's outputs times the second half."""

    def __init__(self, linear: Linear) -> None:
        self.in_features = linear.in_features
        self._linear = linear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return dispatch.silu_mul(self._linear(x))


class Float16Linear:
    """Weights rounded to float16, everything else float32; FBGEMM. Half the bytes to read."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.in_features = weight.shape[1]
        self._packed = torch.ops.quantized.linear_prepack_fp16(weight.detach().float().contiguous(), bias)
        self._run = torch.ops.quantized.linear_dynamic_fp16.default

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self._run(x, self._packed)
        return out


class Int8Linear:
    """int8 weights with a scale each output, int8 activations with a scale each row; FBGEMM, for CPUs without VNNI.

    FBGEMM takes one scale for all rows of a call, from their range. Here every row is first divided by its largest
    magnitude and a row holding 1 and -1 is added, so that this range is always the same: rows do not disturb each
    other, and one with small numbers keeps its precision. On CPUs without VNNI activations have 7 bits
    (`reduce_range`): two products of 8 bits would overflow the 16-bit sum there.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.in_features = weight.shape[1]
        self._packed = _pack_int8(weight.detach().float())
        self._bias = None if bias is None else bias.detach().float().contiguous()
        self._run = torch.ops.quantized.linear_dynamic.default
        self._reduce_range = not torch.cpu._is_vnni_supported()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows, peaks = dispatch.normalize_rows(x)
        out: torch.Tensor = self._run(rows, self._packed, self._reduce_range)[:-1]
        dispatch.scale_rows(out, peaks, self._bias)
        return out


def _pack_int8(weight: torch.Tensor) -> torch.ScriptObject:
    scales = weight.abs().amax(dim=1).clamp_(min=1e-12) / 127
    zeros = torch.zeros(len(scales), dtype=torch.int64)
    with warnings.catch_warnings():
        # torch says that its quantised dtypes will go; FBGEMM takes weights in no other form.
        warnings.simplefilter("ignore")
        quantized = torch.quantize_per_channel(weight.contiguous(), scales.double(), zeros, 0, torch.qint8)
    packed: torch.ScriptObject = torch.ops.quantized.linear_prepack(quantized, None)
    return packed


def can_quantize() -> bool:
    """Whether this torch has FBGEMM."""
    return bool({"fbgemm", "x86"} & set(torch.backends.quantized.supported_engines))


def make_linear(
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    quantization: str | None = None,
    gated: bool = False,
) -> Linear:
    """The fastest form of `weight` [out_features, in_features], on its device.

    quantization  None: exact; "fp16" or "int8": see the classes; CPU only
    gated         SiLU of the first half of the outputs times the second half comes out
    """
    if weight.device.type == "cpu" and weight.dtype == torch.float32:
        int8 = quantization == "int8" and dispatch.has_int8_products()
        if quantization is None or int8:
            return PackedLinear(weight, bias, gated=gated, int8=int8)
    linear: Linear
    if quantization == "int8":
        linear = Int8Linear(weight, bias)
    elif quantization == "fp16":
        linear = Float16Linear(weight, bias)
    else:
        linear = PlainLinear(weight, bias)
    return Gated(linear) if gated else linear


class LinearModule(nn.Module):
    """A `Linear` in a module graph, in the place of an nn.Linear whose weight it took over."""

    def __init__(self, replaced: nn.Linear, quantization: str | None) -> None:
        super().__init__()
        self.in_features, self.out_features = replaced.in_features, replaced.out_features
        self._linear = make_linear(replaced.weight, replaced.bias, quantization=quantization)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self._linear(x.reshape(-1, self.in_features))
        return out.view(*x.shape[:-1], self.out_features)


def replace_linears(module: nn.Module, quantization: str | None) -> Callable[[], None]:
    """Put a `LinearModule` in the place of every nn.Linear (and of no subclass) below `module`; returns the undo."""
    replaced = [
        (parent, name, child)
        for parent in module.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear
    ]
    for parent, name, child in replaced:
        setattr(parent, name, LinearModule(child, quantization))

    def undo() -> None:
        for parent, name, child in replaced:
            setattr(parent, name, child)

    return undo
