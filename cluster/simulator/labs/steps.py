"""Labs about steps: who runs when, and what giving way costs."""

from __future__ import annotations

import random
from typing import Any

from octavo.cluster.simulator.hardware import preset
from octavo.cluster.simulator.labs.lab import Drive, LabResult, drive, request
from octavo.cluster.simulator.plots import bars, lines
from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.events import Preempted, TokensOut
from octavo.scheduler.reserve import GrowthReserve
from octavo.scheduler.scheduler import Scheduler
from octavo.scheduler.step_time import StepTimeModel


def batching() -> LabResult:
    """A batch that waits for its longest member, against one that is made anew at every step."""
    slots = 4
    rng = random.Random(42)
    lengths = [rng.randint(10, 120) for _ in range(16)]
    static = sum(max(lengths[i : i + slots]) for i in range(0, len(lengths), slots))
    config = SchedulerConfig(num_blocks=200, max_num_seqs=slots, max_num_batched_tokens=64, pipeline_depth=1)
    # A prompt of one token, so that every step of a request gives one of its tokens.
    run = drive(
        config,
        StepTimeModel.of_coefficients(1.0, 0.0, 0.0, 0.0),
        [(0.0, request(str(number), 1, length, at=number)) for number, length in enumerate(lengths)],
    )
    continuous = len(run.step_seconds)
    least = -(-sum(lengths) // slots)
    return LabResult(
        title="Batching: static against continuous",
        parameters={
            "requests": "16 of random.Random(42).randint(10, 120) output tokens, first come, first served",
            "slots": slots,
        },
        figures={
            "static_steps": static,
            "continuous_steps": continuous,
            "least_steps": least,
            "speedup": static / continuous,
        },
        text=(
            f"In batches of {slots} that wait for their longest member, {sum(lengths)} tokens take {static} steps. "
            f"When a slot is given on as soon as it is free, they take {continuous}. No order could take less than "
            f"{least}: what is left is the end, when too few requests remain to fill the slots."
        ),
        svg=bars(
            {"static": {"steps": float(static)}, "continuous": {"steps": float(continuous)}},
            title="Steps until all 16 have their tokens",
            limit=float(static),
        ),
    )


def chunked() -> LabResult:
    """A long prompt comes while others decode: how long is the longest pause?"""
    device = preset("llama-3.1-8b", "a100-80gb")
    prompt, decoders = 8192, 8
    budgets = (128, 256, 512, 1024, 2048, 4096, 16_384)
    pauses: dict[int, float] = {}
    firsts: dict[int, float] = {}
    for budget in budgets:
        config = SchedulerConfig(
            num_blocks=2000,
            max_num_seqs=64,
            max_num_batched_tokens=budget,
            max_model_len=16_384,
            pipeline_depth=1,
        )
        arrivals = [(0.0, request(str(i), 16, 400, at=i)) for i in range(decoders)]
        arrivals.append((1.0, request("long", prompt, 2, at=decoders)))
        run = drive(config, device.step_time(), arrivals)
        pauses[budget] = max(run.step_seconds)
        firsts[budget] = next(
            event.metrics.ttft_seconds
            for event in run.events
            if isinstance(event, TokensOut) and event.request_id == "long" and event.metrics is not None
        )
    whole = pauses[budgets[-1]]
    return LabResult(
        title="Chunked prefill: what one long prompt does to everybody else",
        parameters={
            "device": device.name,
            "step_times": device.source,
            "prompt_tokens": prompt,
            "decoders": decoders,
        },
        figures={
            "worst_pause_seconds": {str(budget): value for budget, value in pauses.items()},
            "ttft_seconds": {str(budget): value for budget, value in firsts.items()},
        },
        text=(
            f"A prompt of {prompt} tokens in one step stops {decoders} running answers for {whole:.2f} s. Cut to a "
            f"budget of 512 tokens a step, nobody waits longer than {pauses[512]:.3f} s. The long prompt's own first "
            f"token then comes after {firsts[512]:.2f} s in place of {firsts[budgets[-1]]:.2f} s."
        ),
        svg=lines(
            {
                "longest pause of the others": [(float(b), pauses[b]) for b in budgets[:-1]],
                "first token of the long one": [(float(b), firsts[b]) for b in budgets[:-1]],
            },
            title="Seconds, by the token budget of a step",
            x_label="token budget",
            y_label="seconds",
        ),
    )


def crossover() -> LabResult:
    """Swap or recompute: the price of both, by the speed of the host link."""
    device = preset("llama-3.1-8b", "a100-80gb")
    tokens = 2048
    links = (0.5e9, 1e9, 1.5e9, 2e9, 2.5e9, 3e9, 4e9, 6e9, 8e9)
    chosen: dict[float, Preempted] = {
        link: _one_victim(device.step_time(), device, tokens, link) for link in links
    }
    swaps = {link: event.swap_seconds or 0.0 for link, event in chosen.items()}
    recompute = chosen[links[0]].recompute_seconds
    moved = swaps[links[0]] * links[0]
    return LabResult(
        title="Crossover: swap or compute again",
        parameters={
            "device": device.name,
            "step_times": device.source,
            "victim_tokens": chosen[links[0]].lost_tokens,
        },
        figures={
            "recompute_seconds": recompute,
            "swap_seconds": {f"{link / 1e9:g} GB/s": value for link, value in swaps.items()},
            "kind": {f"{link / 1e9:g} GB/s": event.kind.value for link, event in chosen.items()},
            "crossover_bytes_per_second": moved / recompute,
        },
        text=(
            f"A victim with {chosen[links[0]].lost_tokens} tokens costs {recompute:.3f} s to compute again, and two "
            f"trips of {moved / 2e6:.0f} MB over the host link. Both cost the same at "
            f"{moved / recompute / 1e9:.1f} GB/s. Below that the scheduler computes again, above it swaps, for each "
            "victim by its own prices."
        ),
        svg=lines(
            {
                "swap": [(link / 1e9, value) for link, value in swaps.items()],
                "recompute": [(link / 1e9, recompute) for link in links],
            },
            title="Seconds that parking one request costs",
            x_label="host link, GB/s",
            y_label="seconds",
        ),
    )


def _one_victim(step_time: StepTimeModel, device: Any, tokens: int, link: float) -> Preempted:
    """The first preemption of two requests that outgrow a pool together."""
    config = SchedulerConfig(
        num_blocks=2 * tokens // 16 + 4,
        max_num_batched_tokens=2048,
        num_host_blocks=1000,
        kv_bytes_per_block=device.kv_bytes_per_token * 16,
        host_link_bytes_per_second=link,
        prefix_cache=False,
    )
    run = drive(config, step_time, [(0.0, request(str(i), tokens, 200, at=i)) for i in range(2)])
    return next(event for event in run.events if isinstance(event, Preempted))


class _EagerReserve(GrowthReserve):
    """Lets in whatever fits at this moment, and learns nothing."""

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config.block_size, config.max_model_len)
        self.horizon = 0

    def on_preemption(self) -> None:
        pass

    def on_finish(self) -> None:
        pass


def thrash() -> LabResult:
    """Too little memory: what letting everybody in at once costs."""
    rng = random.Random(2026)
    arrivals, now = [], 0.0
    for number in range(150):
        now += rng.expovariate(12.0)
        arrivals.append((now, request(str(number), rng.randint(20, 300), rng.randint(50, 400), at=number)))
    config = SchedulerConfig(
        num_blocks=400, max_num_seqs=64, max_num_batched_tokens=512, preemption="recompute"
    )
    device = StepTimeModel.of_coefficients(0.005, 2e-4, 5e-5, 0.0)

    def be_eager(scheduler: Scheduler) -> None:
        scheduler._life.reserve = _EagerReserve(config)

    careful = drive(config, device, arrivals)
    eager = drive(config, device, arrivals, prepare=be_eager)
    counts = {"with reserve": _counts(careful), "without": _counts(eager)}
    ours, theirs = counts["with reserve"], counts["without"]
    return LabResult(
        title="Thrash: admission that leaves no room to grow",
        parameters={
            "requests": "150, random.Random(2026): prompts of 20 to 300, outputs of 50 to 400 tokens, 12 a second",
            "pool_tokens": config.max_pool_tokens,
        },
        figures=counts,
        text=(
            f"Without a growth reserve {theirs['preemptions']} times a request gave way, and "
            f"{theirs['recomputed_share']:.1%} of all computed tokens had been computed before. With a reserve that "
            "doubles at each preemption and falls slowly it was "
            f"{ours['preemptions']} times and {ours['recomputed_share']:.1%}. The same work was done after "
            f"{ours['seconds']:.1f} s in place of {theirs['seconds']:.1f} s."
        ),
        svg=bars(
            {name: {"preemptions": float(found["preemptions"])} for name, found in counts.items()},
            title="Preemptions of 150 requests",
            limit=float(max(1, *(found["preemptions"] for found in counts.values()))),
        ),
    )


def _counts(run: Drive) -> dict[str, Any]:
    counts = run.scheduler.snapshot()
    return {
        "preemptions": sum(counts["preemptions"].values()),
        "recomputed_share": counts["recomputed_tokens"] / counts["scheduled_tokens"],
        "steps": counts["steps"],
        "seconds": max(event.time for event in run.events),
    }
