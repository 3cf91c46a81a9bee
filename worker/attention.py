"""Octavo's paged attention as one of transformers' attention functions.

Owns the registration, what each attention module of a model turned out to need (`AttentionSite`, found by running
the model once), and the way a step's metadata reaches it (`PagedLayer`, hung on the module). A model whose attention
goes through transformers' interface runs unchanged; one that asks for something paged attention does not compute is
refused. No mask is built: transformers makes none for an attention function without a registered mask function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import AttentionInterface

from octavo.kernels import dispatch
from octavo.kernels.layer_cache import LayerCache
from octavo.protos.errors import ModelLoadError
from octavo.worker.forward_batch import ForwardBatch

IMPLEMENTATION = "octavo_paged"
"""The name under which transformers finds it."""
_ATTRIBUTE = "octavo_layer"
_UNSUPPORTED_ARGUMENTS = {
    "s_aux": "attention sinks",
    "position_bias": "position biases",
    "attention_bias": "attention biases",
    "indices": "sparse attention",
}
"""Extra arguments of the interface that change the result, and what they mean."""


@dataclass(frozen=True, slots=True, eq=False)
class AttentionSite:
    """One attention module and the constants of its calls."""

    module: nn.Module
    layer: int
    """Index among the attention layers, which is that of its part of the KV cache."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int | None
    softcap: float | None


@dataclass(slots=True, eq=False)
class StepSlot:
    """Where a runner puts the batch of the step that is under way, for its layers to read."""

    batch: ForwardBatch | None = None


@dataclass(frozen=True, slots=True, eq=False)
class PagedLayer:
    """What one attention module needs to run: its constants, its KV blocks, the step."""

    site: AttentionSite
    cache: LayerCache
    step: StepSlot

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Write this step's KV, then attend. All [1, heads, T, D] in; [1, T, num_heads, D] out."""
        batch = self.step.batch
        assert batch is not None, "attention ran outside of a step"
        # [1, H, T, D] -> [T, H, D]: views, since the module made them by the opposite transposition.
        query, key, value = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
        cache = self.cache
        dispatch.write_kv(key, value, cache.k, cache.v, batch.slot_mapping, scales=cache.scales)
        out = dispatch.paged_attention(
            query,
            cache.k,
            cache.v,
            block_tables=batch.block_tables,
            cu_seqlens_q=batch.cu_seqlens_q,
            context_lens=batch.context_lens,
            scale=self.site.scale,
            sliding_window=self.site.sliding_window,
            softcap=self.site.softcap,
            scales=cache.scales,
            num_shared_blocks=batch.num_shared_blocks,
        )
        return out.unsqueeze(0)


@dataclass(slots=True)
class _Recorder:
    config: Any
    sites: list[AttentionSite] = field(default_factory=list)


_recorder: ContextVar[_Recorder | None] = ContextVar("octavo_attention_recorder", default=None)


def paged_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function that transformers calls; see `PagedLayer.attend` for shapes."""
    recorder = _recorder.get()
    if recorder is not None:
        recorder.sites.append(_site(recorder, module, query, key, value, attention_mask, scaling, kwargs))
        return query.transpose(1, 2).contiguous(), None
    layer: PagedLayer = getattr(module, _ATTRIBUTE)
    return layer.attend(query, key, value), None


def register() -> None:
    """Make the implementation known to transformers. May be called again."""
    AttentionInterface.register(IMPLEMENTATION, paged_attention_forward)


def find_sites(config: Any, run: Callable[[], Any]) -> tuple[AttentionSite, ...]:
    """Call `run`, one forward pass over any tokens, and return the attention modules in order of their layers.

    Raises `ModelLoadError` when the model asks for attention that Octavo does not compute, or calls it other than
    once per layer.
    """
    with _recording(config) as recorder:
        run()
    sites = sorted(recorder.sites, key=lambda site: site.layer)
    num_layers = config.num_hidden_layers
    if [site.layer for site in sites] != list(range(num_layers)):
        raise ModelLoadError(
            f"cannot run {config.model_type}: it has {num_layers} layers, of which {len(sites)} called the attention "
            f"function; only models in which each layer is one self-attention run here"
        )
    shapes = {(site.num_heads, site.num_kv_heads, site.head_dim) for site in sites}
    if len(shapes) != 1:
        raise ModelLoadError(
            f"cannot run {config.model_type}: its layers differ in heads or head size: {shapes}"
        )
    return tuple(sites)


def bind(sites: tuple[AttentionSite, ...], caches: Sequence[LayerCache], step: StepSlot) -> None:
    """Give each attention module its own of `caches`, which are those of all layers in their order."""
    for site in sites:
        setattr(site.module, _ATTRIBUTE, PagedLayer(site, caches[site.layer], step))


@contextmanager
def _recording(config: Any) -> Iterator[_Recorder]:
    recorder = _Recorder(config)
    token = _recorder.set(recorder)
    try:
        yield recorder
    finally:
        _recorder.reset(token)


def _site(
    recorder: _Recorder,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None,
    kwargs: dict[str, Any],
) -> AttentionSite:
    config = recorder.config

    def refuse(reason: str) -> None:
        raise ModelLoadError(f"cannot run {config.model_type}: {reason}")

    if attention_mask is not None:
        refuse("it computes an attention mask or bias of its own")
    if kwargs.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        refuse("its attention is not causal")
    for name, meaning in _UNSUPPORTED_ARGUMENTS.items():
        if kwargs.get(name) is not None:
            refuse(f"it uses {meaning}, which paged attention does not compute")
    if key.shape != value.shape or query.shape[-1] != key.shape[-1]:
        refuse(
            f"queries, keys and values differ in head size ({query.shape[-1]}, {key.shape[-1]}, {value.shape[-1]})"
        )
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        refuse("its attention modules have no layer_idx")
    assert isinstance(layer, int)
    softcap = kwargs.get("softcap")
    return AttentionSite(
        module=module,
        layer=layer,
        num_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        head_dim=query.shape[-1],
        scale=float(query.shape[-1] ** -0.5 if scaling is None else scaling),
        sliding_window=_sliding_window(config, layer, kwargs.get("sliding_window")),
        softcap=None if softcap is None else float(softcap),
    )


def _sliding_window(config: Any, layer: int, argument: int | None) -> int | None:
    """The window of a layer. Some models state it only through the mask they ask for, that is, in the config."""
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None and layer_types[layer] == "full_attention":
        return None
    if argument is None and (layer_types is not None or getattr(config, "use_sliding_window", True)):
        argument = getattr(config, "sliding_window", None)
    return argument
