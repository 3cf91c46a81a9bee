"""Where a step's time goes: scheduler, wire, embedding, linears, attention, norms, head, sampler, Python overhead.

    python benchmarks/profile_step.py [--quantization int8] [--model FOLDER] [--steps 15] [--context 256] [--json]

Steps of 1, 8, 32 and 64 decodes and of prompt chunks of 128 and 512 tokens run as the engine runs them: the real
scheduler plans, the plan and the result go through the wire's encoding (which the in-process engine leaves out),
the executor executes. Timers sit around the parts of the model. "embedding" is that of tokens and of positions
(rotary angles), "attention" includes the cache write with its rotation, "norms" all that is done row by row between two
products: residual sums, norms, activation. What is left of a step (input preparation, Python between the calls, and in
a module graph what its Python does itself) is "Python overhead".

Printed are medians over the steps, each part as a share of the step and of the linears-only bound: the same
matrix products, head included, run on the same weights with nothing between them, in turn with the steps.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from octavo.kernels import dispatch
from octavo.protos import worker_pb2
from octavo.protos.codec import decode_plan, decode_result, encode_plan, encode_result
from octavo.protos.types import Request, SamplingParams
from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.scheduler import Scheduler
from octavo.scheduler.step_time import StepTimeModel
from octavo.worker.build import build_executor
from octavo.worker.config import WorkerConfig
from octavo.worker.executor import Executor
from octavo.worker.linears import LinearModule

PARTS = (
    "scheduler",
    "wire",
    "embedding",
    "linears",
    "attention",
    "norms",
    "head",
    "sampler",
    "Python overhead",
)
DECODES = (1, 8, 32, 64)
CHUNKS = (128, 512)

Parts = dict[str, float]

clock: Callable[[], float] = time.perf_counter


class Timers:
    """Seconds by part, gathered by wrappers around functions that are looked up at every call."""

    def __init__(self) -> None:
        self.seconds: Parts = defaultdict(float)

    def wrap(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        @functools.wraps(function, updated=())
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = clock()
            result = function(*args, **kwargs)
            self.seconds[part] += clock() - start
            return result

        return timed

    def take(self) -> Parts:
        taken, self.seconds = dict(self.seconds), defaultdict(float)
        return taken


@contextmanager
def instrumented(executor: Executor) -> Iterator[Timers]:
    """Timers around the parts of the model that `executor` runs."""
    timers = Timers()
    undo: list[tuple[Any, str, Any]] = []

    def patch(owner: Any, name: str, part: str) -> None:
        original = getattr(owner, name)
        undo.append((owner, name, original))
        setattr(owner, name, timers.wrap(original, part))

    runner: Any = executor._runner
    if runner._decoder is not None:
        decoder = runner._decoder
        patch(decoder, "embed", "embedding")
        patch(decoder, "_angles", "embedding")
        patch(decoder, "head", "head")
        for layer in decoder.layers:
            for name in ("qkv", "output", "gate_up", "down"):
                patch(layer, name, "linears")
    else:
        head = runner._module.get_output_embeddings()
        for child in runner._module.modules():
            if child is head:
                patch(child, "forward", "head")
            elif isinstance(child, (torch.nn.Linear, LinearModule)):
                patch(child, "forward", "linears")
            elif isinstance(child, torch.nn.Embedding) or "Rotary" in type(child).__name__:
                patch(child, "forward", "embedding")
            elif "Norm" in type(child).__name__ or ".activation" in type(child).__module__:
                patch(child, "forward", "norms")
    patch(executor._sampler, "sample", "sampler")
    for name in ("rms_norm", "silu_mul"):
        patch(dispatch, name, "norms")
    for name in ("write_kv", "write_kv_rope", "paged_attention"):
        patch(dispatch, name, "attention")
    try:
        yield timers
    finally:
        for owner, name, original in reversed(undo):
            setattr(owner, name, original)


class Driver:
    """One executor under one scheduler, stepped by hand."""

    def __init__(self, executor: Executor, budget: int) -> None:
        info = executor.info
        self.executor = executor
        self.scheduler = Scheduler(
            SchedulerConfig(
                num_blocks=info.num_blocks,
                block_size=info.block_size,
                max_num_seqs=info.max_num_seqs,
                max_num_batched_tokens=budget,
                max_model_len=info.model.max_model_len,
                pipeline_depth=1,
                prefix_cache=False,
            ),
            StepTimeModel.of_worker(info),
        )
        executor.reset()
        self._rng = np.random.default_rng(1)
        self._count = 0

    def add(self, num_prompt_tokens: int, max_tokens: int) -> None:
        ids = self._rng.integers(5, self.executor.info.model.vocab_size, num_prompt_tokens).astype(np.int32)
        self._count += 1
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        request = Request(request_id=str(self._count), prompt_token_ids=ids, params=params, seed=0)
        self.scheduler.add(request, time.monotonic())

    def step(self, timers: Timers | None = None) -> tuple[int, Parts]:
        """Tokens of the step, and seconds by part."""
        if timers is not None:
            timers.take()  # what ran between the steps is none of theirs
        start = clock()
        plan = self.scheduler.plan(time.monotonic())
        planned = clock()
        assert plan is not None
        plan = decode_plan(worker_pb2.StepPlan.FromString(encode_plan(plan).SerializeToString()))
        received = clock()
        result = self.executor.execute(plan)
        executed = clock()
        result = decode_result(worker_pb2.StepResult.FromString(encode_result(result).SerializeToString()))
        returned = clock()
        self.scheduler.commit(result, time.monotonic())
        ended = clock()
        parts: Parts = timers.take() if timers is not None else {}
        parts["scheduler"] = planned - start + ended - returned
        parts["wire"] = received - planned + returned - executed
        parts["step"] = ended - start
        parts["Python overhead"] = parts["step"] - sum(parts.get(part, 0.0) for part in PARTS[:-1])
        return plan.num_scheduled_tokens, parts


def decode_steps(driver: Driver, timers: Timers, rows: int, context: int, steps: int) -> list[Parts]:
    for _ in range(rows):
        driver.add(context, steps + 8 + rows * (context // 64 + 1))
    while driver.step(timers)[0] != rows:
        pass
    products = Products(driver.executor, rows, rows)
    measured = [driver.step(timers)[1] | {"bound": products.seconds()} for _ in range(steps + 1)]
    for request_id in driver.scheduler.unfinished():
        driver.scheduler.abort(request_id, time.monotonic())
    return measured[1:]


def chunk_steps(driver: Driver, timers: Timers, tokens: int, steps: int) -> list[Parts]:
    products = Products(driver.executor, tokens, 1)
    measured = []
    for _ in range(steps + 1):
        driver.add(tokens, 1)
        measured.append(driver.step(timers)[1] | {"bound": products.seconds()})
    return measured[1:]


class Products:
    """All matrix products of a step of `rows` tokens, nothing between them."""

    def __init__(self, executor: Executor, rows: int, num_logit_rows: int) -> None:
        runner: Any = executor._runner
        self._linears: list[Any]
        if runner._decoder is not None:
            layers = runner._decoder.layers
            self._linears = [
                linear for layer in layers for linear in (layer.qkv, layer.output, layer.gate_up, layer.down)
            ]
            self._head = runner._decoder.head
        else:
            self._head = runner._module.get_output_embeddings()
            self._linears = [
                child
                for child in runner._module.modules()
                if isinstance(child, (torch.nn.Linear, LinearModule)) and child is not self._head
            ]
        # A timer's wrapper hides the attribute.
        self._linears = [getattr(linear, "__wrapped__", linear) for linear in self._linears]
        self._head = getattr(self._head, "__wrapped__", self._head)
        self._inputs = {size: torch.randn(rows, size) for size in {one.in_features for one in self._linears}}
        self._logit_rows = torch.randn(num_logit_rows, self._head.in_features)

    @torch.inference_mode()
    def seconds(self) -> float:
        start = clock()
        for linear in self._linears:
            linear(self._inputs[linear.in_features])
        self._head(self._logit_rows)
        return clock() - start


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="as `octavo serve --model`; default: the default model")
    parser.add_argument("--quantization", help="as `octavo serve --quantization`")
    parser.add_argument("--steps", type=int, default=15, help="measured steps of each kind")
    parser.add_argument("--context", type=int, default=256, help="tokens of each decode's context")
    parser.add_argument("--threads", type=int)
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="one thread, and its CPU time instead of the clock's: for machines on which others work, too",
    )
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.cpu_time:
        global clock
        clock, args.threads = time.process_time, 1
    executor = build_executor(
        WorkerConfig(
            worker_id="profile",
            model=args.model,
            quantization=args.quantization,
            num_threads=args.threads,
            max_num_seqs=max(DECODES),
            num_host_blocks=0,
            num_blocks=max(DECODES) * (args.context + 200) // 16 + 64,
        )
    )
    if not args.json:
        print("| step | ms | linears-only bound, ms | step / bound |", " | ".join(PARTS), "|")
        print("|---" * (len(PARTS) + 4) + "|")
    results = {}
    for kind, sizes in (("decodes", DECODES), ("chunk", CHUNKS)):
        for size in sizes:
            driver = Driver(executor, budget=512)
            with instrumented(executor) as timers:
                if kind == "decodes":
                    steps = decode_steps(driver, timers, size, args.context, args.steps)
                else:
                    steps = chunk_steps(driver, timers, size, max(3, args.steps // 3))
            names = (*PARTS, "step", "bound")
            row = {name: statistics.median(step.get(name, 0.0) for step in steps) for name in names}
            results[f"{kind} {size}"] = row
            if not args.json:
                print_row(f"{kind} {size}", row)
    if args.json:
        print(json.dumps(results, indent=2))


def print_row(name: str, row: Parts) -> None:
    shares = [f"{100 * row[part] / row['step']:.1f} % ({row[part] / row['bound']:.3f})" for part in PARTS]
    figures = [f"{1e3 * row['step']:.1f}", f"{1e3 * row['bound']:.1f}", f"{row['step'] / row['bound']:.2f}"]
    print("|", " | ".join([name, *figures, *shares]), "|", flush=True)


if __name__ == "__main__":
    main()
