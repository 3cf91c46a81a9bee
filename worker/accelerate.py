"""Turns a loaded model into the form that runs fastest here and still computes the same.

Owns the decision, and its proof: the logits of a few made-up tokens, at positions from the first to the last that the
model was made for, are computed the old way and the new, and must agree. This finds what no list of modules shows:
factors on residuals, embeddings or logits, norms that add 1 to their weight, attention that cools with the position.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence

import torch
from torch import nn

from octavo.kernels.layer_cache import plain_layers
from octavo.protos.errors import ConfigError
from octavo.worker.forward_batch import ForwardBatch
from octavo.worker.fused import FusedDecoder, assemble
from octavo.worker.linears import Linear, can_quantize, make_linear, replace_linears
from octavo.worker.loader import LoadedModel
from octavo.worker.model import ModelRunner
from octavo.worker.warmup import made_up_batch

logger = logging.getLogger(__name__)

_PROBE_TOKENS = 24
_PROBE_BLOCK_SIZE = 16
_AGREEMENT = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Largest difference of a logit, relative to the largest logit. A model of another kind differs by much more."""


def accelerate(loaded: LoadedModel, *, quantization: str | None = None) -> FusedDecoder | None:
    """The model as a `FusedDecoder`, which has then taken its weights over; or None: run the module graph.

    The module graph is left with its matrix products in their fastest form, where the model runs with these. Raises
    `ConfigError` for a quantization that cannot run here.
    """
    _check_quantization(loaded, quantization)
    decoder = assemble(loaded)
    if decoder is not None and _agree(probe_logits(loaded), probe_logits(loaded, decoder), loaded.dtype):

        def form(modules: Sequence[nn.Linear], *, gated: bool = False) -> Linear:
            return make_linear(*_taken(modules), quantization=quantization, gated=gated)

        return assemble(loaded, form)
    if loaded.device.type == "cpu" and loaded.dtype == torch.float32:
        _replace_linears(loaded, quantization)
    return None


def _check_quantization(loaded: LoadedModel, quantization: str | None) -> None:
    if quantization is None:
        return
    if loaded.device.type != "cpu" or loaded.dtype != torch.float32 or not can_quantize():
        dtype = str(loaded.dtype).removeprefix("torch.")
        raise ConfigError(
            f"quantization {quantization} needs a CPU, dtype float32 and a torch with FBGEMM; this is "
            f"{loaded.device.type} with {dtype}",
            param="quantization",
        )


def _taken(modules: Sequence[nn.Linear]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The weights of `modules`, one below the other, and their biases, if any has one; the modules lose them."""
    weight = torch.cat([module.weight for module in modules]) if len(modules) > 1 else modules[0].weight
    bias = None
    if any(module.bias is not None for module in modules):
        bias = torch.cat(
            [
                module.weight.new_zeros(module.out_features) if module.bias is None else module.bias
                for module in modules
            ]
        )
    for module in modules:
        module.weight = nn.Parameter(module.weight.new_empty(0), requires_grad=False)
    return weight.detach(), None if bias is None else bias.detach()


def _replace_linears(loaded: LoadedModel, quantization: str | None) -> None:
    """Put fast products into the module graph; exact ones only if the model runs with them and agrees."""
    before = probe_logits(loaded)
    undo = replace_linears(loaded.module, quantization)
    try:
        after = probe_logits(loaded)
    except (AttributeError, TypeError, RuntimeError) as error:  # code that reaches into its nn.Linears
        undo()
        if quantization is not None:
            raise ConfigError(
                f"quantization {quantization} does not suit {loaded.config.model_type}: {error}",
                param="quantization",
            ) from error
        logger.info("%s runs with torch's own matrix products: %s", loaded.info.name, error)
        return
    if quantization is None and not _agree(before, after, loaded.dtype):
        undo()
        logger.info("%s runs with torch's own matrix products, others change its logits", loaded.info.name)


@torch.inference_mode()
def probe_logits(loaded: LoadedModel, decoder: FusedDecoder | None = None) -> torch.Tensor:
    """float32 [24, vocab] of made-up tokens, from the module graph or from `decoder`."""
    shape = loaded.shape
    size = (shape.num_layers, 2, -(-_PROBE_TOKENS // _PROBE_BLOCK_SIZE), shape.num_kv_heads)
    kv = torch.zeros((*size, _PROBE_BLOCK_SIZE, shape.head_dim), dtype=loaded.dtype, device=loaded.device)
    return ModelRunner(loaded, plain_layers(kv), decoder).forward(_probe_batch(loaded))


def _probe_batch(loaded: LoadedModel) -> ForwardBatch:
    batch = made_up_batch(
        [(0, _PROBE_TOKENS)],
        block_size=_PROBE_BLOCK_SIZE,
        vocab_size=loaded.shape.vocab_size,
        device=loaded.device,
    )
    spread = torch.linspace(0, loaded.info.max_model_len - 1, _PROBE_TOKENS, device=loaded.device)
    rows = torch.arange(_PROBE_TOKENS, device=loaded.device)
    return dataclasses.replace(batch, positions=spread.long(), logit_rows=rows)


def _agree(one: torch.Tensor, other: torch.Tensor, dtype: torch.dtype) -> bool:
    if one.shape != other.shape:
        return False
    return bool((one - other).abs().amax() <= _AGREEMENT[dtype] * one.abs().amax())
