"""llama.cpp's server inside xllamacpp, called directly (no HTTP between). Needs the model as a GGUF file.

    python benchmarks/peers/llama_cpp.py --gguf FILE --model-dir FOLDER --gsm8k FILE [--threads 2]

It streams text, not ids: a piece counts as one token, and what merging of UTF-8 pieces swallowed is made up for at the
end of the answer.
"""

from __future__ import annotations

import json
import os
import queue
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import environment

environment.enter("llama-cpp", ["xllamacpp", "tokenizers"])

import drive  # noqa: E402 - the peer's environment comes first
import xllamacpp  # noqa: E402
from workloads import BenchRequest, build  # noqa: E402

POLL_SECONDS = 0.2
UNKNOWN_ID = 0


class LlamaCpp:
    def __init__(self, gguf: Path, threads: int) -> None:
        params = xllamacpp.CommonParams()
        params.model.path = str(gguf)
        params.n_parallel, params.n_ctx = 48, 32768
        params.kv_unified, params.cont_batching, params.n_gpu_layers = True, True, 0
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        self._server = xllamacpp.Server(params)
        self._pieces: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def submit(self, request: BenchRequest) -> None:
        threading.Thread(target=self._complete, args=(request,), daemon=True).start()

    def _complete(self, request: BenchRequest) -> None:
        made = [0] * request.n
        body = {
            "prompt": request.prompt,
            "n_predict": request.max_tokens,
            "temperature": request.temperature,
            "samplers": ["temperature"],
            "seed": request.seed or 0,
            "n_cmpl": request.n,
            "stream": True,
            "ignore_eos": True,
            "cache_prompt": True,
        }

        def take(data: Any) -> bool:
            items = json.loads(data) if isinstance(data, (bytes, str)) else data
            for item in items if isinstance(items, list) else [items]:
                if item.get("error"):
                    self._pieces.put(RuntimeError(str(item["error"])))
                    return True
                choice = item["choices"][0]
                branch, ended = choice.get("index", 0), choice.get("finish_reason") is not None
                count = request.max_tokens - made[branch] if ended else int(bool(choice.get("text")))
                made[branch] += count
                self._pieces.put((request.id, branch, [UNKNOWN_ID] * count, ended))
            return False

        try:
            self._server.handle_completions(body, take)
        except Exception as error:  # hand it to the thread that waits
            self._pieces.put(error)

    def poll(self) -> Iterable[drive.Emission]:
        try:
            piece = self._pieces.get(timeout=POLL_SECONDS)
        except queue.Empty:
            return
        if isinstance(piece, Exception):
            raise piece
        yield piece


def main() -> None:
    parser = environment.options(__doc__ or "")
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    started = time.perf_counter()
    engine = LlamaCpp(args.gguf, args.threads)
    facts = {"start_seconds": round(time.perf_counter() - started, 1)}
    workloads = build(args.gsm8k, args.model_dir, args.repetition)
    figures, _ = drive.measure(engine, workloads, args.workloads.split(","))
    drive.report(f"llama.cpp {args.gguf.name}", figures, as_json=args.json, **facts)
    os._exit(0)  # its threads do not end


if __name__ == "__main__":
    main()
