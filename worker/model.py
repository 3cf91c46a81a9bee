"""Runs the model on one ragged batch.

Owns the forward pass: flattened inputs through the fused decoder where the model has one, else into transformers'
module graph; attention over the paged KV tensor, the head on the rows that need logits. Knows nothing of plans,
requests or sampling.
"""

from __future__ import annotations

import torch

from octavo.worker.attention import StepSlot, bind
from octavo.worker.forward_batch import ForwardBatch
from octavo.worker.fused import FusedDecoder
from octavo.worker.loader import LoadedModel


class ModelRunner:
    """A loaded model bound to one KV tensor. Not thread-safe; a model has one runner at a time, the last made."""

    def __init__(self, loaded: LoadedModel, kv: torch.Tensor, decoder: FusedDecoder | None = None) -> None:
        """`kv` [num_layers, 2, num_blocks, num_kv_heads, block_size, head_dim], on the model's device.

        `decoder`: the same model, fused; it then runs instead of the module graph.
        """
        shape = loaded.shape
        expected = (shape.num_layers, 2, kv.shape[2], shape.num_kv_heads, kv.shape[4], shape.head_dim)
        assert kv.shape == expected, (
            f"kv must be [L, 2, blocks, Hkv, block size, D] = {expected}, got {kv.shape}"
        )
        self._module = loaded.module
        self._decoder = decoder
        self._step = StepSlot()
        if decoder is not None:
            decoder.bind(kv)
        else:
            bind(loaded.attention_sites, kv, self._step)

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
