"""Octavo on the workloads W1 to W5, through the in-process engine.

    python benchmarks/serving.py --gsm8k gsm8k_test.jsonl [--quantization int8] [--workloads w1,w5] [--json]

The data's path may also stand in OCTAVO_GSM8K. Prints figures by workload (see `workloads.py` and `drive.py`); with
`--tokens FILE` writes every branch's token ids there, and with `--compare FILE` says how far they equal those of an
earlier run: whole answers, and tokens before the first difference. `peers/` holds the same for other engines, and
`contest.py` runs all of them in turn.
"""

from __future__ import annotations

import json
import queue
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))  # the peers' environments have no other way either

import drive
from agreement import agreement
from workloads import BenchRequest, build

from octavo import Engine
from octavo.protos.types import OutputDelta, Request, SamplingParams
from octavo.worker.loader import resolve_model


class OctavoEngine:
    """`drive.BenchEngine` over an `Engine`'s loop."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._count = 0
        self._names: dict[str, str] = {}
        self._deltas: queue.SimpleQueue[OutputDelta] = queue.SimpleQueue()

    def submit(self, request: BenchRequest) -> None:
        # An id may come again, as the same request does in W2.
        self._count += 1
        request_id = str(self._count)
        self._names[request_id] = request.id
        params = SamplingParams(
            n=request.n, max_tokens=request.max_tokens, temperature=request.temperature, ignore_eos=True
        )
        self._engine.loop.submit(
            Request(
                request_id=request_id,
                prompt_token_ids=np.array(request.prompt, np.int32),
                params=params,
                seed=request.seed or 0,
            ),
            self._deltas.put,
        )

    def poll(self) -> Iterable[drive.Emission]:
        deltas = [self._deltas.get()]
        while not self._deltas.empty():
            deltas.append(self._deltas.get())
        for delta in deltas:
            if delta.error is not None:
                raise RuntimeError(f"{delta.error_name}: {delta.error}")
            name = self._names[delta.request_id]
            yield name, delta.branch, list(delta.token_ids), delta.finish_reason is not None


def main() -> None:
    parser = drive.options(__doc__ or "")
    parser.add_argument("--model", help="as `octavo serve --model`; default: the default model")
    parser.add_argument("--quantization")
    parser.add_argument("--budget", type=int, help="tokens a step; default: Octavo's")
    parser.add_argument("--itl-target", type=float, help="seconds a step may take")
    parser.add_argument("--tokens", type=Path, help="write token ids here")
    parser.add_argument("--compare", type=Path, help="with token ids written before")
    args = parser.parse_args()
    folder = resolve_model(args.model).folder
    answers: drive.Answers = {}
    started = time.perf_counter()
    with Engine(
        args.model,
        quantization=args.quantization,
        max_num_batched_tokens=args.budget,
        itl_target=args.itl_target,
        max_num_seqs=64,
        num_blocks=2048,
        host_blocks=0,
    ) as engine:
        start_seconds = round(time.perf_counter() - started, 1)
        workloads = build(args.gsm8k, folder, args.repetition)
        for figures, made in drive.measure(OctavoEngine(engine), workloads, args.workloads.split(",")):
            answers |= made
            name = f"octavo {args.quantization or 'fp32'}"
            drive.report(name, figures, made, as_json=args.json, start_seconds=start_seconds)
    if args.compare:
        print(agreement(answers, json.loads(args.compare.read_text(encoding="utf-8"))))
    if args.tokens:
        args.tokens.write_text(json.dumps(answers), encoding="utf-8")


if __name__ == "__main__":
    main()
