"""Section of `gpu.py`: whole models of Llama's shape with random weights, through runner, executor and scheduler."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from typing import Any

import numpy as np
import torch
from gpu_device import Timer, device_of, limits

from octavo.protos.types import ModelInfo, Request, SamplingParams, StepPlan, WorkerInfo
from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.scheduler import Scheduler
from octavo.worker import attention, module_graph
from octavo.worker.accelerate import accelerate
from octavo.worker.cuda_graphs import GraphedRunner
from octavo.worker.executor import Executor, Runner
from octavo.worker.gpu_sampler import choose_sampler
from octavo.worker.input_batch import InputBatch
from octavo.worker.kv_pool import KVPool, KVShape
from octavo.worker.loader import LoadedModel, ModelShape
from octavo.worker.model import ModelRunner
from octavo.worker.plan_checks import BatchLimits
from octavo.worker.swap import SwapSpace
from octavo.worker.warmup import made_up_batch, num_blocks_of

_COMMON = {
    "vocab_size": 128_256,
    "max_position_embeddings": 131_072,
    "rope_theta": 500_000.0,
    "rms_norm_eps": 1e-5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
MODELS: dict[str, dict[str, Any]] = {
    "engine_1b": _COMMON
    | {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64},
    "engine_8b": _COMMON
    | {"hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32, "head_dim": 128},
    "dry": {
        "vocab_size": 256, "max_position_embeddings": 512, "num_attention_heads": 4, "num_key_value_heads": 2,
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16,
    },
}  # fmt: skip
BLOCK_SIZE = 16


class _Caller:
    """For dry runs: runs a step again where a graph would be replayed."""

    def record(self, run: Any) -> Any:
        return run


def random_model(config_fields: dict[str, Any], device: torch.device, dtype: torch.dtype) -> LoadedModel:
    """As the loader would leave it."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    attention.register()
    config = LlamaConfig(**config_fields, tie_word_embeddings=False)
    with module_graph.quiet(), torch.device(device):
        module = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=attention.IMPLEMENTATION
        )
    module = module.eval().requires_grad_(False).to(device)
    sites = module_graph.probe(module, module.config, device)
    shape = ModelShape(
        num_layers=len(sites),
        num_heads=sites[0].num_heads,
        num_kv_heads=sites[0].num_kv_heads,
        head_dim=sites[0].head_dim,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        sliding_windows=tuple(site.sliding_window for site in sites),
    )
    info = ModelInfo(
        name="random", vocab_size=config.vocab_size, max_model_len=min(8192, config.max_position_embeddings)
    )
    return LoadedModel(
        module=module,
        config=module.config,
        info=info,
        shape=shape,
        dtype=dtype,
        device=device,
        attention_sites=sites,
    )


class Machine:
    """A model, its pool, and a runner with and without graphs."""

    def __init__(self, report: Any, name: str) -> None:
        self.report = report
        self.device = device_of(report)
        dry = report.dry_run
        torch.manual_seed(0)
        dtype = torch.float32 if dry else torch.bfloat16
        self.loaded = random_model(MODELS["dry" if dry else name], self.device, dtype)
        self.weight_bytes = sum(p.numel() * p.element_size() for p in self.loaded.module.parameters())
        decoder = accelerate(self.loaded)
        self.fused = decoder is not None
        shape = self.loaded.shape
        self.kv_shape = KVShape(
            num_layers=shape.num_layers,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            block_size=BLOCK_SIZE,
            dtype=dtype,
        )
        self.max_num_seqs = 4 if dry else 256
        self.max_model_len = 64 if dry else 8192
        # 256 sequences of 1,200 tokens, where that leaves room for activations.
        self.num_blocks = 64
        if not dry:
            fitting = int(0.8 * torch.cuda.mem_get_info()[0]) // self.kv_shape.bytes_per_block
            self.num_blocks = min(19_200, fitting)
        self.pool = KVPool(self.kv_shape, num_blocks=self.num_blocks, device=self.device)
        self.pool.kv.normal_()
        self.plain = ModelRunner(self.loaded, self.pool.layers, decoder)
        self.graphed = GraphedRunner(
            self.plain,
            max_num_seqs=self.max_num_seqs,
            max_blocks_per_seq=-(-self.max_model_len // BLOCK_SIZE),
            device=self.device,
            recorder=_Caller() if dry else None,
        )
        self.timer = Timer(report, repeats=15, seconds_max=0.6)

    def batch(self, chunks: list[tuple[int, int]]) -> Any:
        assert num_blocks_of(chunks, BLOCK_SIZE) <= self.num_blocks
        return made_up_batch(
            chunks, block_size=BLOCK_SIZE, vocab_size=self.loaded.shape.vocab_size, device=self.device
        )


def run(report: Any, name: str) -> None:
    found = report.case("limits", lambda: limits(report), again=True) or {}
    made: list[Machine] = []

    def build() -> dict[str, Any]:
        started = time.perf_counter()
        made.append(Machine(report, name))
        machine = made[0]
        return {
            "seconds": round(time.perf_counter() - started, 1),
            "weight_bytes": machine.weight_bytes,
            "fused": machine.fused,
        }

    if report.case("build", build, again=True) is None:
        return
    machine = made[0]
    report.case("graphs", lambda: record(machine), again=True)
    for num_seqs in (1, 3) if report.dry_run else (1, 8, 32, 64, 128, 256):
        report.case(f"decode {num_seqs}", lambda n=num_seqs: decode(machine, n, found))
    for tokens in (20,) if report.dry_run else (512, 2048, 8192):
        report.case(f"prefill {tokens}", lambda n=tokens: prefill(machine, n, found))
    for num_requests in (3,) if report.dry_run else (1, 32, 128):
        for name, runner, depth in (
            ("", machine.graphed, 2),
            (", one step at a time", machine.graphed, 1),
            (", without graphs", machine.plain, 2),
        ):
            report.case(
                f"serve {num_requests}{name}",
                lambda n=num_requests, r=runner, d=depth: serve(machine, n, r, depth=d),
            )


def record(machine: Machine) -> dict[str, Any]:
    started = time.perf_counter()
    machine.graphed.record()
    return {"seconds": round(time.perf_counter() - started, 1), "sizes": len(machine.graphed._replays)}


def decode(machine: Machine, num_seqs: int, found: dict[str, float]) -> dict[str, Any]:
    """A step, and the least it could take: weights and keys read at the speed of a copy."""
    context = 20 if machine.report.dry_run else 1024
    batch = machine.batch([(context - 1, 1)] * num_seqs)
    kv_bytes = num_seqs * context / BLOCK_SIZE * machine.kv_shape.bytes_per_block
    before = machine.graphed.num_replays
    with_graphs = machine.timer.median(lambda: machine.graphed.forward(batch), flush=False)
    without = machine.timer.median(lambda: machine.plain.forward(batch), flush=False)
    difference = (machine.graphed.forward(batch) - machine.plain.forward(batch)).abs().max().item()
    least = (machine.weight_bytes + kv_bytes) / found.get("copy_bytes_per_second", float("nan"))
    return {
        "milliseconds": round(with_graphs * 1e3, 3),
        "milliseconds_without_graphs": round(without * 1e3, 3),
        "milliseconds_at_least": round(least * 1e3, 3),
        "tokens_per_second": round(num_seqs / with_graphs, 1),
        "replayed": machine.graphed.num_replays > before,
        "logits_differ_by": difference,
    }


def prefill(machine: Machine, tokens: int, found: dict[str, float]) -> dict[str, Any]:
    batch = machine.batch([(0, tokens)])
    seconds = machine.timer.median(lambda: machine.plain.forward(batch), flush=False)
    shape, config = machine.loaded.shape, machine.loaded.config
    per_layer = shape.hidden_size * shape.head_dim * 2 * (shape.num_heads + shape.num_kv_heads)
    per_layer += 3 * shape.hidden_size * config.intermediate_size
    flops = 2 * tokens * shape.num_layers * per_layer
    flops += 2 * shape.num_layers * shape.num_heads * shape.head_dim * tokens * (tokens + 1)
    least = flops / found.get("bfloat16_flops_per_second", float("nan"))
    return {
        "milliseconds": round(seconds * 1e3, 2),
        "milliseconds_at_least": round(least * 1e3, 2),
        "tokens_per_second": round(tokens / seconds),
    }


def executor(machine: Machine, runner: Runner, *, run_ahead: bool) -> Executor:
    limits_ = BatchLimits(
        max_num_seqs=machine.max_num_seqs,
        max_model_len=machine.max_model_len,
        max_num_batched_tokens=64 if machine.report.dry_run else 2048,
        vocab_size=machine.loaded.shape.vocab_size,
        block_size=BLOCK_SIZE,
        num_host_blocks=0,
    )
    info = WorkerInfo(
        worker_id="benchmark",
        model=machine.loaded.info,
        device=str(machine.device),
        dtype=str(machine.loaded.dtype).removeprefix("torch."),
        block_size=BLOCK_SIZE,
        num_blocks=machine.num_blocks,
        num_host_blocks=0,
        max_num_seqs=machine.max_num_seqs,
        kv_bytes_per_block=machine.kv_shape.bytes_per_block,
    )
    input_batch = InputBatch(limits_, num_blocks=machine.num_blocks)
    swap_space = SwapSpace(machine.pool, num_blocks=0)
    sampler = choose_sampler(machine.device)
    return Executor(runner, machine.pool, swap_space, input_batch, sampler, info, run_ahead=run_ahead)


def serve(machine: Machine, num_requests: int, runner: Runner, *, depth: int) -> dict[str, Any]:
    """Requests that all arrive at once, through scheduler, executor and sampler. With a depth of 2 each step is planned
    and launched while the one before it runs."""
    dry = machine.report.dry_run
    prompt_len, max_tokens = (10, 4) if dry else (512, 96)
    worker = executor(machine, runner, run_ahead=depth > 1)
    scheduler = Scheduler(
        SchedulerConfig(
            num_blocks=machine.num_blocks,
            block_size=BLOCK_SIZE,
            max_num_seqs=machine.max_num_seqs,
            max_num_batched_tokens=worker._input_batch.limits.max_num_batched_tokens,
            max_model_len=machine.max_model_len,
            pipeline_depth=depth,
            prefix_cache=False,
        )
    )
    prompts = np.random.default_rng(0).integers(
        3, machine.loaded.shape.vocab_size, (num_requests, prompt_len)
    )
    for index, prompt in enumerate(prompts.astype(np.int32)):
        params = SamplingParams(max_tokens=max_tokens, temperature=0.8, top_p=0.95, ignore_eos=True)
        prompt.flags.writeable = False
        request = Request(request_id=f"r{index}", prompt_token_ids=prompt, params=params, seed=index)
        scheduler.add(request, 0.0)
    parts: dict[str, float] = defaultdict(float)
    started = time.perf_counter()
    first_seconds, decode_steps, decode_seconds, outputs = 0.0, 0, 0.0, 0
    plans: deque[StepPlan] = deque()
    while scheduler.has_work:
        step_started = time.perf_counter()
        while len(plans) < depth and (plan := scheduler.plan(step_started - started)) is not None:
            plans.append(plan)
        if not plans:
            break
        plan = plans.popleft()
        result = worker.execute(plan, plans[0] if plans else None)
        scheduler.commit(result, time.perf_counter() - started)
        seconds = time.perf_counter() - step_started
        outputs += int((result.token_ids >= 0).sum())
        if not first_seconds and len(result.token_ids):
            first_seconds = time.perf_counter() - started
        if plan.num_scheduled_tokens == len(plan.rows) == num_requests:
            decode_steps += 1
            decode_seconds += seconds
            for part, value in result.parts_seconds.items():
                parts[part] += value
            parts["scheduler"] += seconds - result.step_seconds
    total = time.perf_counter() - started
    assert outputs == num_requests * max_tokens, f"{outputs} tokens came out"
    steps = max(1, decode_steps)
    return {
        "seconds": round(total, 3),
        "output_tokens_per_second": round(outputs / total, 1),
        "first_token_seconds": round(first_seconds, 4),
        "decode_step_milliseconds": round(decode_seconds / steps * 1e3, 3),
        "decode_steps": decode_steps,
        "parts_milliseconds": {part: round(value / steps * 1e3, 3) for part, value in parts.items()},
    }
