"""vLLM on the CPU, float32, its engine stepped in this process (no server between).

python benchmarks/peers/vllm_cpu.py --model-dir FOLDER --gsm8k FILE [--budget N] [--compiled]
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import environment

VERSION = "0.32.0"
environment.enter(
    "vllm-cpu",
    [f"vllm=={VERSION}+cpu"],
    [
        *("--extra-index-url", f"https://wheels.vllm.ai/{VERSION}/cpu"),
        *("--extra-index-url", "https://download.pytorch.org/whl/cpu"),
    ],
)
for name, value in {
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}.items():
    os.environ.setdefault(name, value)

import drive  # noqa: E402 - the peer's environment comes first
from vllm import EngineArgs, LLMEngine, SamplingParams  # noqa: E402
from vllm.sampling_params import RequestOutputKind  # noqa: E402
from workloads import BenchRequest, build  # noqa: E402


class VLLM:
    def __init__(self, model: Path, *, compiled: bool, budget: int | None) -> None:
        limits: dict[str, Any] = {} if budget is None else {"max_num_batched_tokens": budget}
        self._engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=str(model),
                dtype="float32",
                enforce_eager=not compiled,
                max_model_len=2048,
                max_num_seqs=64,
                enable_prefix_caching=True,
                **limits,
            )
        )

    def submit(self, request: BenchRequest) -> None:
        params = SamplingParams(
            n=request.n,
            temperature=request.temperature,
            seed=request.seed,
            max_tokens=request.max_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self._engine.add_request(request.id, {"prompt_token_ids": request.prompt}, params)

    def poll(self) -> Iterable[drive.Emission]:
        for output in self._engine.step():
            for branch in output.outputs:
                ended = branch.finish_reason is not None
                yield output.request_id, branch.index, list(branch.token_ids), ended


def main() -> None:
    parser = environment.options(__doc__ or "")
    parser.add_argument("--compiled", action="store_true", help="torch.compile; minutes to start")
    parser.add_argument("--budget", type=int, help="tokens a step; vLLM's default is 2,048")
    args = parser.parse_args()
    started = time.perf_counter()
    engine = VLLM(args.model_dir, compiled=args.compiled, budget=args.budget)
    facts = {"start_seconds": round(time.perf_counter() - started, 1)}
    workloads = build(args.gsm8k, args.model_dir, args.repetition)
    figures, _ = drive.measure(engine, workloads, args.workloads.split(","))
    drive.report(f"vllm {VERSION} cpu fp32", figures, as_json=args.json, **facts)


if __name__ == "__main__":
    main()
