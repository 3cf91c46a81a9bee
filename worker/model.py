"""Runs the model on one ragged batch.

Owns the forward pass: flattened inputs through the fused decoder where the model has one, else into transformers'
module graph; attention over the paged KV cache, the head on the rows that need logits. Knows nothing of plans,
requests or sampling.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from octavo.kernels.layer_cache import LayerCache
from octavo.worker.attention import StepSlot, bind
from octavo.worker.forward_batch import ForwardBatch
from octavo.worker.fused import FusedDecoder
from octavo.worker.loader import LoadedModel


class ModelRunner:
    """A loaded model bound to one KV cache. Not thread-safe; a model has one runner at a time, the last made."""

    def __init__(
        self, loaded: LoadedModel, caches: Sequence[LayerCache], decoder: FusedDecoder | None = None
    ) -> None:
        """`caches` of all layers in their order, on the model's device.

        `decoder`: the same model, fused; it then runs instead of the module graph.
        """
        shape = loaded.shape
        assert len(caches) == shape.num_layers, (len(caches), shape.num_layers)
        num_blocks, _, block_size, _ = caches[0].k.shape
        expected = (num_blocks, shape.num_kv_heads, block_size, shape.head_dim)
        assert caches[0].k.shape == expected, (
            f"a cache must be [blocks, Hkv, block size, D] = {expected}, got {caches[0].k.shape}"
        )
        self._module = loaded.module
        self._decoder = decoder
        self._step = StepSlot()
        if decoder is not None:
            decoder.bind(caches)
        else:
            bind(loaded.attention_sites, caches, self._step)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Write the batch's KV into its slots and return the logits of `batch.logit_rows`, float32 [K, vocab]."""
        if self._decoder is not None:
            return self._decoder.forward(batch).float()
        self._step.batch = batch
        try:
            # One row of all tokens. Positions restart at each sequence; the block tables keep sequences apart.
            output = self._module(
                input_ids=batch.input_ids.unsqueeze(0),
                position_ids=batch.positions.unsqueeze(0),
                use_cache=False,
                logits_to_keep=batch.logit_rows,
            )
        finally:
            self._step.batch = None
        logits: torch.Tensor = output.logits[0]
        return logits.float()
