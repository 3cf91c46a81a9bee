"""Hugging Face's continuous batching manager, float32. Greedy workloads: W1, W2, W3, W5.

python benchmarks/peers/hf_continuous.py --model-dir FOLDER --gsm8k FILE
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import environment

environment.enter(*environment.HUGGING_FACE)

import drive  # noqa: E402 - the peer's environment comes first
import torch  # noqa: E402
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig  # noqa: E402
from workloads import BenchRequest  # noqa: E402

POLL_SECONDS = 0.2


class HFContinuous:
    def __init__(self, model: Path) -> None:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.float32, attn_implementation="sdpa"
        ).eval()
        self._manager = loaded.init_continuous_batching(
            generation_config=GenerationConfig(
                do_sample=False, max_new_tokens=128, eos_token_id=-1, pad_token_id=0
            ),
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=32, num_blocks=1456, max_batch_tokens=512
            ),
        )
        self._manager.start()
        self._seen: dict[str, int] = {}
        self._count = 0
        self._names: dict[str, str] = {}

    def submit(self, request: BenchRequest) -> None:
        self._count += 1
        name = str(self._count)
        self._names[name] = request.id
        self._manager.add_request(
            request.prompt, request_id=name, max_new_tokens=request.max_tokens, streaming=True
        )

    def poll(self) -> Iterable[drive.Emission]:
        output = self._manager.get_result(timeout=POLL_SECONDS)
        if output is None:
            if not self._manager.is_running():
                raise RuntimeError("the thread that generates has ended")
            return
        if output.error:
            raise RuntimeError(output.error)
        seen = self._seen.get(output.request_id, 0)
        self._seen[output.request_id] = len(output.generated_tokens)
        yield (
            self._names[output.request_id],
            0,
            list(output.generated_tokens[seen:]),
            output.is_finished(),
        )


def main() -> None:
    parser = drive.options(__doc__ or "")
    parser.add_argument("--model-dir", type=Path, required=True, help="the model as a folder of safetensors")
    args = parser.parse_args()
    drive.bench(
        "hugging face continuous batching fp32", lambda: HFContinuous(args.model_dir), args, without=("w4",)
    )
    os._exit(0)  # its thread does not end


if __name__ == "__main__":
    main()
