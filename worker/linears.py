"""Matrix products with fixed weights, in the forms that run fastest here.

Owns the forms and the choice among them. On a CPU weights are packed once into the layout that the library behind
reads in order: oneDNN for float32, FBGEMM for float16 weights (widened to float32 as they are read, float32 sums)
and for int8. Measured, the packed form of a dtype was the fastest from 2 to 512 rows, and at 1 row on a quiet machine
(docs/performance.md), so a weight is held in one form, and a row's result does not hang on how many rows stand beside
it but for float32 rounding. Anything else (other devices, other dtypes, a torch without these
libraries) is `PlainLinear`.
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


_PACK_ROWS = 32
"""Rows that oneDNN is told to expect. The layout it then picks was the fastest for 1 to 512 rows."""


class PackedLinear:
    """float32 throughout, oneDNN."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.in_features = weight.shape[1]
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), _PACK_ROWS)
        self._bias = bias
        self._run = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self._run(x, self._weight, self._bias, "none", [], "")
        return out


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
    """int8 weights with a scale each output, int8 activations with a scale each row; FBGEMM.

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
    weight: torch.Tensor, bias: torch.Tensor | None = None, *, quantization: str | None = None
) -> Linear:
    """The fastest form of `weight` [out_features, in_features], on its device.

    quantization  None: exact; "fp16" or "int8": see the classes; CPU only
    """
    if quantization == "int8":
        return Int8Linear(weight, bias)
    if quantization == "fp16":
        return Float16Linear(weight, bias)
    packs = (
        weight.device.type == "cpu" and weight.dtype == torch.float32 and torch.backends.mkldnn.is_available()
    )
    return PackedLinear(weight, bias) if packs else PlainLinear(weight, bias)


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
