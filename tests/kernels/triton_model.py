"""A whole model on the Triton kernels, through the same door as on a GPU, gives the CPU's logits.

Run by `test_triton_properties.py` in a process of its own. Under the interpreter the door is told that CPU tensors
are a GPU's; where there is a GPU, nothing is told.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from octavo.kernels import dispatch
from octavo.worker.accelerate import accelerate
from octavo.worker.cuda_graphs import CudaRecorder, GraphedRunner
from octavo.worker.forward_batch import ForwardBatch
from octavo.worker.loader import load_model, resolve_model
from octavo.worker.model import ModelRunner
from octavo.worker.warmup import made_up_batch

from .triton_device import DEVICE, INTERPRETED


class Caller:
    """Runs a step again where a graph would be replayed."""

    def record(self, run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        return run


def logits(folder: Path, batches: list[ForwardBatch], device: str, *, graphs: bool) -> list[torch.Tensor]:
    loaded = load_model(resolve_model(str(folder)), device=torch.device(device), dtype="float32")
    decoder = accelerate(loaded)
    shape = loaded.shape
    kv = torch.full(
        (shape.num_layers, 2, 40, shape.num_kv_heads, 8, shape.head_dim),
        torch.nan,
        device=torch.device(device),
    )
    runner: Any = ModelRunner(loaded, kv, decoder)
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
        moved = {name: getattr(batch, name).to(device) for name in batch.__dataclass_fields__}
        found.append(runner.forward(ForwardBatch(**moved)).cpu().clone())
    if graphs:
        assert runner.num_replays == 2
    return found


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_model_gives_the_cpus_logits(
    family: str, tiny_model_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = torch.device("cpu")
    sizes: dict[str, Any] = {"block_size": 8, "vocab_size": 128, "device": cpu}
    # Sequences of three chunks in the first step; then decodes, of which two are of a padded size.
    batches = [
        made_up_batch([(0, 20), (0, 1), (0, 9)], **sizes),
        made_up_batch([(20, 1), (1, 1), (9, 1)], **sizes),
        made_up_batch([(21, 2), (2, 1)], **sizes),
        made_up_batch([(23, 1)], **sizes),
    ]
    folder = tiny_model_dir(family)
    expected = logits(folder, batches, "cpu", graphs=False)
    used: list[str] = []
    if INTERPRETED:

        def implementation(device_type: str, operation: str) -> Any:
            used.append(operation)
            return getattr(import_module(f"octavo.kernels.{operation}"), operation)

        monkeypatch.setattr(dispatch, "_implementation", implementation)
    actual = logits(folder, batches, DEVICE, graphs=True)
    if INTERPRETED:
        assert {"paged_attention", "write_kv_rope", "rms_norm", "silu_mul"} <= set(used)
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=1e-3, atol=1e-3)
