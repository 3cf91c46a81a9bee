"""llama.cpp's server inside xllamacpp, called directly (no HTTP between). Needs the model as a GGUF file.

    python benchmarks/peers/llama_cpp.py --gguf FILE --model-dir FOLDER --gsm8k FILE [--f32] [--threads 2]

It streams text, not ids: a piece counts as one token, and what merging of UTF-8 pieces swallowed is made up for by
empty pieces at the end of the answer. With --f32 the weights are widened (once, beside the file) and the cache is
float32, too.
"""

from __future__ import annotations

import json
import os
import queue
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import environment

environment.enter("llama-cpp", ["xllamacpp==2026.10.11549", "gguf==0.19.0", "tokenizers"])

import drive  # noqa: E402 - the peer's environment comes first
import xllamacpp  # noqa: E402
from gguf_f32 import widened  # noqa: E402
from workloads import BenchRequest  # noqa: E402

POLL_SECONDS = 0.2
NUM_SLOTS = 48
CONTEXT_TOKENS = 32768
"""Of all slots together, as Octavo's pool in `serving.py`."""


class LlamaCpp:
    def __init__(self, gguf: Path, threads: int, *, f32: bool) -> None:
        params = xllamacpp.CommonParams()
        params.model.path = str(widened(gguf) if f32 else gguf)
        params.verbosity = 0
        params.n_parallel, params.n_ctx = NUM_SLOTS, CONTEXT_TOKENS
        params.kv_unified, params.cont_batching, params.n_gpu_layers = True, True, 0
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        if f32:
            params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
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
                pieces = [choice["text"]] if choice.get("text") else []
                made[branch] += len(pieces)
                if ended:
                    pieces += [""] * (request.max_tokens - made[branch])
                self._pieces.put((request.id, branch, pieces, ended))
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
    parser = drive.options(__doc__ or "")
    parser.add_argument("--model-dir", type=Path, required=True, help="folder with tokenizer.json")
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--f32", action="store_true", help="exact, and slower")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    name = f"llama.cpp {args.gguf.stem}{' as F32' if args.f32 else ''}"
    drive.bench(name, lambda: LlamaCpp(args.gguf, args.threads, f32=args.f32), args)
    os._exit(0)  # its threads do not end


if __name__ == "__main__":
    main()
