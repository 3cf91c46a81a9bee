"""The forward pass of models built like Llama, in few calls a layer.

Owns the recognition of such models and their forward pass: products of a kind fused into one, residual sums into the
norms, RoPE into the cache write. A layer is nine calls, whatever the batch.

A model is recognised by its modules: the names and kinds of a Llama's (RMSNorms, projections q, k, v and o, an MLP of
gate, up and down with SiLU) and nothing beside them. That is not proof: see `accelerate`, which compares logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional

from octavo.kernels import dispatch
from octavo.kernels.layer_cache import LayerCache
from octavo.worker.attention import AttentionSite
from octavo.worker.forward_batch import ForwardBatch
from octavo.worker.linears import Linear
from octavo.worker.loader import LoadedModel


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    weight: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        return dispatch.rms_norm(x, self.weight, self.eps, residual)


@dataclass(slots=True, eq=False)
class FusedLayer:
    """One decoder layer: its weights, and its part of the KV cache once bound."""

    site: AttentionSite
    attention_norm: Norm
    qkv: Linear
    q_norm: Norm | None
    """Over each query head, where the model has it; `k_norm` over each key head."""
    k_norm: Norm | None
    output: Linear
    mlp_norm: Norm
    gate_up: Linear
    """SiLU of the gates times what they let through, [T, I]."""
    down: Linear
    cache: LayerCache | None = None

    def attend(
        self, x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor], batch: ForwardBatch
    ) -> torch.Tensor:
        """Normed hidden states [T, H] to attention's output [T, Hq * D]; KV is in its slots afterwards."""
        site, cache = self.site, self.cache
        assert cache is not None, "the layer is not bound to a KV cache"
        num_heads, num_kv_heads, head_dim = site.num_heads, site.num_kv_heads, site.head_dim
        heads = self.qkv(x).view(x.shape[0], num_heads + 2 * num_kv_heads, head_dim)
        q, k, v = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q = self.q_norm(q.reshape(-1, head_dim)).view(-1, num_heads, head_dim)
            k = self.k_norm(k.reshape(-1, head_dim)).view(-1, num_kv_heads, head_dim)
        dispatch.write_kv_rope(q, k, v, *angles, cache.k, cache.v, batch.slot_mapping, scales=cache.scales)
        return dispatch.paged_attention(
            q,
            cache.k,
            cache.v,
            block_tables=batch.block_tables,
            cu_seqlens_q=batch.cu_seqlens_q,
            context_lens=batch.context_lens,
            scale=site.scale,
            sliding_window=site.sliding_window,
            softcap=site.softcap,
            scales=cache.scales,
            num_shared_blocks=batch.num_shared_blocks,
        ).view(x.shape[0], num_heads * head_dim)


class FusedDecoder:
    """A whole model: token ids to logits. Bound to one KV cache at a time, the last."""

    def __init__(
        self,
        *,
        embedding: torch.Tensor,
        rotary: nn.Module,
        layers: list[FusedLayer],
        norm: Norm,
        head: Linear,
        vocab_size: int,
    ) -> None:
        self.embedding = embedding
        self.rotary = rotary
        self.layers = layers
        self.norm = norm
        self.head = head
        self._vocab_size = vocab_size
        self._float32 = torch.empty(1, dtype=torch.float32, device=embedding.device)

    def bind(self, caches: Sequence[LayerCache]) -> None:
        """`caches` of all layers in their order."""
        for layer in self.layers:
            layer.cache = caches[layer.site.layer]

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Write the batch's KV into its slots and return the logits of `batch.logit_rows`, [K, vocab]."""
        hidden = self.embed(batch.input_ids)
        angles = self._angles(batch.positions)
        x = self.layers[0].attention_norm(hidden)
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            attended = layer.attend(x, angles, batch)
            if index == last:
                # Nobody reads the other rows any more: their keys and values are all that they leave.
                attended, hidden = attended[batch.logit_rows], hidden[batch.logit_rows]
                if not len(hidden):
                    return hidden.new_empty(0, self._vocab_size)
            x = layer.mlp_norm(layer.output(attended), hidden)
            x = layer.down(layer.gate_up(x))
            x = (self.norm if index == last else self.layers[index + 1].attention_norm)(x, hidden)
        return self.head(x)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[T] to [T, H], a new tensor."""
        return functional.embedding(token_ids, self.embedding)

    def _angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines float32 [T, R / 2]; the model's own module gives them twice, side by side."""
        cos, sin = self.rotary(self._float32, positions.unsqueeze(0))
        half = cos.shape[2] // 2
        return cos[0, :, :half], sin[0, :, :half]


class SideBySide:
    """The products of several nn.Linears with the same input, one beside the other, from their own weights."""

    def __init__(self, modules: Sequence[nn.Linear], *, gated: bool = False) -> None:
        self._modules = tuple(modules)
        self._gated = gated
        self.in_features = modules[0].in_features

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        products = [functional.linear(x, module.weight, module.bias) for module in self._modules]
        product = torch.cat(products, dim=1) if len(products) > 1 else products[0]
        return dispatch.silu_mul(product) if self._gated else product


class Form(Protocol):
    """Makes one product of nn.Linears with the same input; `gated`: SiLU of the first times the second."""

    def __call__(self, modules: Sequence[nn.Linear], *, gated: bool = False) -> Linear: ...


# --- recognition -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _Parts:
    base: Any
    head: nn.Linear
    layers: list[Any]


_BASE = {"embed_tokens", "layers", "norm", "rotary_emb"}
_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION = (
    {"q_proj", "k_proj", "v_proj", "o_proj"},
    {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"},
)
_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}


def _children(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_children()}


def _match(module: Any, sites: tuple[AttentionSite, ...]) -> _Parts | None:
    """The parts of a module graph with the names and kinds of a Llama's."""
    base = getattr(module, "model", None)
    head = getattr(module, "lm_head", None)
    if base is None or _children(module) != {"model", "lm_head"} or type(head) is not nn.Linear:
        return None
    if _children(base) != _BASE or type(base.embed_tokens) is not nn.Embedding or not _is_norm(base.norm):
        return None
    layers = list(base.layers)
    if len(layers) != len(sites) or not all(map(_is_layer, layers)):
        return None
    if any(site.module is not layer.self_attn for site, layer in zip(sites, layers, strict=True)):
        return None
    return _Parts(base, head, layers)


def _is_norm(module: Any) -> bool:
    """Whether the module has the looks of a Llama's RMSNorm."""
    parameters = dict(module.named_parameters())
    return set(parameters) == {"weight"} and parameters["weight"].dim() == 1 and _eps(module) is not None


def _eps(norm: Any) -> float | None:
    eps = getattr(norm, "variance_epsilon", None)
    return float(eps) if isinstance(eps, float) else None


def _is_layer(layer: Any) -> bool:
    if _children(layer) != _LAYER:
        return False
    attention, mlp = layer.self_attn, layer.mlp
    if _children(attention) not in _ATTENTION or _children(mlp) != _MLP:
        return False
    linears = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
    linears += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    norms += [norm for name, norm in attention.named_children() if name.endswith("norm")]
    return (
        all(type(linear) is nn.Linear for linear in linears)
        and all(map(_is_norm, norms))
        and sum(1 for _ in layer.parameters())
        == sum(1 for part in (*linears, *norms) for _ in part.parameters())
        and "silu" in type(mlp.act_fn).__name__.lower()
    )


# --- assembly ----------------------------------------------------------------------------------------------


def _norm(module: Any) -> Norm:
    eps = _eps(module)
    assert eps is not None
    return Norm(module.weight.detach(), eps)


def assemble(loaded: LoadedModel, form: Form = SideBySide) -> FusedDecoder | None:
    """A decoder with the weights of `loaded`; None if its modules are not a Llama's.

    `form` is called for each product in turn, each time with the nn.Linears that make it.
    """
    parts = _match(loaded.module, loaded.attention_sites)
    if parts is None:
        return None
    layers = []
    for site, layer in zip(loaded.attention_sites, parts.layers, strict=True):
        attention, mlp = layer.self_attn, layer.mlp
        q_norm = getattr(attention, "q_norm", None)
        layers.append(
            FusedLayer(
                site=site,
                attention_norm=_norm(layer.input_layernorm),
                qkv=form((attention.q_proj, attention.k_proj, attention.v_proj)),
                q_norm=None if q_norm is None else _norm(q_norm),
                k_norm=None if q_norm is None else _norm(attention.k_norm),
                output=form((attention.o_proj,)),
                mlp_norm=_norm(layer.post_attention_layernorm),
                gate_up=form((mlp.gate_proj, mlp.up_proj), gated=True),
                down=form((mlp.down_proj,)),
            )
        )
    return FusedDecoder(
        embedding=parts.base.embed_tokens.weight.detach(),
        rotary=parts.base.rotary_emb,
        layers=layers,
        norm=_norm(parts.base.norm),
        head=form((parts.head,)),
        vocab_size=loaded.shape.vocab_size,
    )
