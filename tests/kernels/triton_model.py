"""A whole model on the Triton kernels, through the same door as on a GPU, gives the CPU's logits.

Run by `test_triton_properties.py` in a process of its own. Under the interpreter the door is told that CPU tensors
are a GPU's; where there is a GPU, nothing is told.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from octavo.kernels import dispatch
from octavo.worker import linears
from octavo.worker.accelerate import accelerate
from octavo.worker.cuda_graphs import CudaRecorder, GraphedRunner
from octavo.worker.forward_batch import ForwardBatch
from octavo.worker.kv_pool import KVPool, KVShape
from octavo.worker.loader import load_model, resolve_model
from octavo.worker.model import ModelRunner
from octavo.worker.warmup import made_up_batch

from .triton_device import DEVICE, INTERPRETED


class Caller:
    """Runs a step again where a graph would be replayed."""

    def record(self, run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        return run


def logits(
    folder: Path, batches: list[ForwardBatch], device: str, *, kv_cache_dtype: str, graphs: bool
) -> list[torch.Tensor]:
    loaded = load_model(resolve_model(str(folder)), device=torch.device(device), dtype="float32")
    decoder = accelerate(loaded)
    shape = KVShape(
        num_layers=loaded.shape.num_layers,
        num_kv_heads=loaded.shape.num_kv_heads,
        head_dim=loaded.shape.head_dim,
        block_size=8,
        dtype=dispatch.QUANTISED.get(kv_cache_dtype, torch.float32),
    )
    pool = KVPool(shape, num_blocks=40, device=torch.device(device))
    pool.kv.view(torch.uint8).fill_(0xFF)  # NaN in every format, scales too
    runner: Any = ModelRunner(loaded, pool.layers, decoder)
    if graphs:
        runner = GraphedRunner(
            runner,
            max_num_seqs=4,
            max_blocks_per_seq=16,
            device=torch.device(device),
            recorder=Caller() if INTERPRETED else CudaRecorder(torch.device(device)),
        )
        runner.record()
    found = []
    for batch in batches:
        values = {name: getattr(batch, name) for name in batch.__dataclass_fields__}
        moved = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in values.items()}
        found.append(runner.forward(ForwardBatch(**moved)).cpu().clone())
    if graphs:
        assert runner.num_replays == 2
    return found


def shared_prefix_batch() -> ForwardBatch:
    """Three decodes behind the first two blocks of the first sequence, each in a block of its own."""
    tables = torch.tensor([[0, 1, block] for block in (20, 31, 7)], dtype=torch.int32)
    return ForwardBatch(
        input_ids=torch.tensor([5, 6, 7]),
        positions=torch.full((3,), 16),
        slot_mapping=tables[:, 2].long() * 8,
        block_tables=tables,
        cu_seqlens_q=torch.arange(4, dtype=torch.int32),
        context_lens=torch.full((3,), 17, dtype=torch.int32),
        logit_rows=torch.arange(3),
        num_shared_blocks=2,
    )


@pytest.mark.parametrize(
    ("family", "kv_cache_dtype"), [("llama", "auto"), ("qwen3", "auto"), ("llama", "int8"), ("qwen3", "fp8")]
)
def test_a_model_gives_the_cpus_logits(
    family: str, kv_cache_dtype: str, tiny_model_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = torch.device("cpu")
    sizes: dict[str, Any] = {"block_size": 8, "vocab_size": 128, "device": cpu}
    # Sequences of three chunks in the first step; then decodes, of which two are of a padded size.
    batches = [
        made_up_batch([(0, 20), (0, 1), (0, 9)], **sizes),
        made_up_batch([(20, 1), (1, 1), (9, 1)], **sizes),
        made_up_batch([(21, 2), (2, 1)], **sizes),
        made_up_batch([(23, 1)], **sizes),
        shared_prefix_batch(),
    ]
    folder = tiny_model_dir(family)
    apart = [dataclasses.replace(batch, num_shared_blocks=0) for batch in batches]
    expected = logits(folder, apart, "cpu", kv_cache_dtype=kv_cache_dtype, graphs=False)
    used: list[str] = []
    if INTERPRETED:

        def implementation(device_type: str, operation: str) -> Any:
            used.append(operation)
            module = dispatch._MODULES.get(operation, operation)
            return getattr(import_module(f"octavo.kernels.{module}"), operation)

        def make_linear(weight: Any, bias: Any, *, quantization: None, gated: bool) -> linears.Linear:
            plain = linears.PlainLinear(weight, bias)
            return linears.Gated(plain) if gated else plain

        monkeypatch.setattr(dispatch, "_implementation", implementation)
        # Products as on a GPU.
        monkeypatch.setattr("octavo.worker.accelerate.make_linear", make_linear)
    actual = logits(folder, batches, DEVICE, kv_cache_dtype=kv_cache_dtype, graphs=True)
    if INTERPRETED:
        written = "write_kv_rope" if kv_cache_dtype == "auto" else "write_kv_rope_quantised"
        assert {"paged_attention", "cascade_attention", written, "rms_norm", "silu_mul"} <= set(used)
    # A number between two bytes may go either way by its last bit.
    limit = 1e-3 if kv_cache_dtype == "auto" else 2e-2
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=limit, atol=limit)
