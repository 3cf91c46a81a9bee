"""Hugging Face `generate` on static batches of 16, float32: what one gets without a serving engine. W1 and W5.

    python benchmarks/peers/hf_static.py --model-dir FOLDER --gsm8k FILE

A batch is padded on the left to its longest prompt and runs until its longest answer is done; the surplus tokens of
the others are thrown away. Tokens count when the batch is done: there is no stream.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from pathlib import Path

import environment

environment.enter(*environment.HUGGING_FACE)

import drive  # noqa: E402 - the peer's environment comes first
import torch  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402
from workloads import BenchRequest  # noqa: E402

BATCH = 16


class HFStatic:
    def __init__(self, model: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self._waiting: deque[BenchRequest] = deque()

    def submit(self, request: BenchRequest) -> None:
        assert request.n == 1
        self._waiting.append(request)

    @torch.inference_mode()
    def poll(self) -> Iterable[drive.Emission]:
        batch = [self._waiting.popleft() for _ in range(min(BATCH, len(self._waiting)))]
        width = max(len(request.prompt) for request in batch)
        ids = torch.zeros(len(batch), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(batch):
            ids[row, width - len(request.prompt) :] = torch.tensor(request.prompt)
            mask[row, width - len(request.prompt) :] = 1
        output = self._model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=max(request.max_tokens for request in batch),
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        for row, request in enumerate(batch):
            yield request.id, 0, output[row, width : width + request.max_tokens].tolist(), True


def main() -> None:
    parser = drive.options(__doc__ or "")
    parser.add_argument("--model-dir", type=Path, required=True, help="the model as a folder of safetensors")
    args = parser.parse_args()
    drive.bench(
        "hugging face generate fp32, batches of 16",
        lambda: HFStatic(args.model_dir),
        args,
        without=("w2", "w3", "w4"),
    )


if __name__ == "__main__":
    main()
