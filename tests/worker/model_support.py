"""Drives a ModelRunner the way the executor will: sequences over shuffled blocks, steps of chunks and decodes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from octavo.kernels.layer_cache import plain_layers
from octavo.worker.forward_batch import ForwardBatch
from octavo.worker.fused import FusedDecoder
from octavo.worker.loader import LoadedModel, load_model, resolve_model
from octavo.worker.model import ModelRunner

CPU = torch.device("cpu")


def load(folder: Path, dtype: str = "auto") -> LoadedModel:
    return load_model(resolve_model(str(folder)), device=CPU, dtype=dtype)


class PagedSession:
    """Sequences by number, each with a block table drawn at random from one pool whose content starts as NaN."""

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        num_blocks: int,
        block_size: int = 16,
        seed: int = 0,
        decoder: FusedDecoder | None = None,
    ) -> None:
        shape = loaded.shape
        size = (shape.num_layers, 2, num_blocks, shape.num_kv_heads, block_size, shape.head_dim)
        # A read of a slot that was never written shows in every logit after it.
        self.kv = torch.full(size, float("nan"), dtype=loaded.dtype)
        self.runner = ModelRunner(loaded, plain_layers(self.kv), decoder)
        self.block_size = block_size
        self._free = np.random.default_rng(seed).permutation(num_blocks).tolist()
        self._tables: dict[int, list[int]] = {}
        self._lengths: dict[int, int] = {}

    def step(
        self, chunks: Sequence[tuple[int, Sequence[int]]], *, rows: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Run `(sequence, new token ids)` pairs in one batch. Logits of `rows` of the batch, all by default."""
        ids, positions, slots, offsets, contexts = [], [], [], [0], []
        for sequence, tokens in chunks:
            table = self._tables.setdefault(sequence, [])
            start = self._lengths.get(sequence, 0)
            end = start + len(tokens)
            while len(table) * self.block_size < end:
                table.append(self._free.pop())
            ids += list(tokens)
            positions += range(start, end)
            slots += [
                table[p // self.block_size] * self.block_size + p % self.block_size for p in range(start, end)
            ]
            offsets.append(offsets[-1] + len(tokens))
            contexts.append(end)
            self._lengths[sequence] = end
        width = max(len(self._tables[sequence]) for sequence, _ in chunks) + 1
        tables = np.full((len(chunks), width), 2**31 - 1, np.int32)
        for row, (sequence, _) in enumerate(chunks):
            tables[row, : len(self._tables[sequence])] = self._tables[sequence]
        batch = ForwardBatch(
            input_ids=torch.tensor(ids),
            positions=torch.tensor(positions),
            slot_mapping=torch.tensor(slots),
            block_tables=torch.from_numpy(tables),
            cu_seqlens_q=torch.tensor(offsets, dtype=torch.int32),
            context_lens=torch.tensor(contexts, dtype=torch.int32),
            logit_rows=torch.tensor(range(len(ids)) if rows is None else list(rows), dtype=torch.int64),
        )
        return self.runner.forward(batch)


def hf_logits(folder: Path, ids: Sequence[int], keep: int = 0) -> torch.Tensor:
    """Hugging Face's float32 logits over `ids`, of the last `keep` positions (0: all), [positions, vocab]."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.inference_mode():
        return model(torch.tensor([list(ids)]), logits_to_keep=keep, use_cache=False).logits[0]
