"""Labs about blocks: what is reserved, used and lost."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from octavo.cluster.simulator.hardware import preset
from octavo.cluster.simulator.labs.lab import Drive, LabResult, drive, request
from octavo.cluster.simulator.plots import above, bars, lines
from octavo.protos.types import Request
from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.scheduler import Scheduler
from octavo.scheduler.step_time import StepTimeModel

STEP = StepTimeModel.of_coefficients(0.01, 1e-4, 1e-5, 1e-7)


def _blocks_of(lengths: list[int], block_size: int) -> int:
    """Blocks that the scheduler gives to prompts of these lengths, all at once."""
    config = SchedulerConfig(
        num_blocks=sum(lengths) // block_size + len(lengths),
        block_size=block_size,
        max_num_seqs=len(lengths),
        max_num_batched_tokens=sum(lengths),
    )
    scheduler = Scheduler(config)
    for number, length in enumerate(lengths):
        scheduler.add(request(str(number), length, 1, at=number), 0.0)
    scheduler.plan(0.0)
    used: int = scheduler.snapshot()["blocks_used"]
    return used


def fragmentation() -> LabResult:
    """Contiguous reservation at the maximum length against blocks."""
    block, reserved = 16, 2048
    rng = random.Random(2026)
    lengths = [rng.randint(40, 600) for _ in range(100)]
    tokens, blocks = sum(lengths), _blocks_of(lengths, block)
    paged, contiguous = tokens / (blocks * block), tokens / (len(lengths) * reserved)
    return LabResult(
        title="Fragmentation: what a reservation wastes",
        parameters={"requests": "100 of random.Random(2026).randint(40, 600) tokens", "block_size": block}
        | {"reserved_tokens": reserved},
        figures={
            "tokens": tokens,
            "blocks": blocks,
            "paged_use": paged,
            "contiguous_use": contiguous,
            "capacity_ratio": paged / contiguous,
        },
        text=(
            f"A request that reserves {reserved} slots for {tokens // len(lengths)} tokens on average leaves "
            f"{1 - contiguous:.1%} of them empty. In blocks of {block} only the end of each last block is, "
            f"{1 - paged:.1%}. The same memory holds {paged / contiguous:.2f} times as many requests."
        ),
        svg=bars(
            {"contiguous": {"used share": contiguous}, "blocks": {"used share": paged}},
            title="Share of the memory in use that holds a token",
            limit=1.0,
        ),
    )


def block_size() -> LabResult:
    """Small blocks waste less, and cost more entries."""
    rng = random.Random(2026)
    lengths = [rng.randint(40, 600) for _ in range(100)]
    sizes = (1, 4, 8, 16, 32, 64, 128, 256)
    blocks = {size: _blocks_of(lengths, size) for size in sizes}
    waste = {size: 1 - sum(lengths) / (count * size) for size, count in blocks.items()}
    return LabResult(
        title="Block size: waste against bookkeeping",
        parameters={"requests": "100 of random.Random(2026).randint(40, 600) tokens"},
        figures={
            "waste": {str(size): value for size, value in waste.items()},
            "blocks": {str(size): count for size, count in blocks.items()},
        },
        text=(
            "The last block of a request is half empty on average, so waste grows with the size: "
            f"{waste[16]:.1%} at 16 tokens, {waste[64]:.1%} at 64, {waste[256]:.1%} at 256. Blocks to keep count of "
            f"fall as fast: {blocks[1]} of one token, {blocks[16]} of 16, {blocks[256]} of 256. At 16 both are small, "
            "and a shared prefix still ends close to where two prompts part."
        ),
        svg=lines(
            {"waste, share": [(float(size), waste[size]) for size in sizes]},
            title="Share of slots that hold nothing",
            x_label="tokens in a block",
            y_label="waste",
        ),
    )


def branches() -> LabResult:
    """Parallel samples of one prompt share its blocks; the first write into a shared block copies it."""
    prompt, output, n, block = 1000, 100, 8, 16
    config = SchedulerConfig(num_blocks=4000, block_size=block, max_num_seqs=64, max_num_batched_tokens=2048)

    shared = drive(config, STEP, [(0.0, request("all", prompt, output, n=n))])
    apart = drive(config, STEP, [(0.0, request(str(i), prompt, output, at=i)) for i in range(n)])
    peaks = [run.scheduler.snapshot()["peak_blocks"] for run in (shared, apart)]
    tokens = [run.scheduler.snapshot()["scheduled_tokens"] for run in (shared, apart)]
    return LabResult(
        title="Branches: one prompt, eight answers",
        parameters={"prompt_tokens": prompt, "output_tokens": output, "n": n, "block_size": block},
        figures={
            "blocks_shared": peaks[0],
            "blocks_apart": peaks[1],
            "saved": 1 - peaks[0] / peaks[1],
            "computed_tokens_shared": tokens[0],
            "computed_tokens_apart": tokens[1],
        },
        text=(
            f"{n} answers to one prompt of {prompt} tokens take {peaks[0]} blocks when the prompt's are shared, "
            f"{peaks[1]} when each has its own: {1 - peaks[0] / peaks[1]:.0%} less. The prompt is computed once, so "
            f"that {tokens[0]} tokens are run in place of {tokens[1]}. Only its last, partly filled block is copied, "
            "by whoever writes into it first."
        ),
        svg=bars(
            {"shared": {"blocks": float(peaks[0])}, "apart": {"blocks": float(peaks[1])}},
            title="Blocks in use at the peak",
            limit=float(max(peaks)),
        ),
    )


def incident() -> LabResult:
    """Load rises; a server that reserves the maximum length stands full long before its memory is."""
    limit, seconds, answer = 4096, 30.0, 128
    device = preset("llama-2-13b", "a100-80gb")
    rates = (20.0, 180.0)
    arrivals = list(_rising(rates, seconds, answer))
    common: dict[str, Any] = {
        "block_size": 16,
        "num_blocks": device.kv_tokens // 16,
        "max_num_batched_tokens": 4096,
        "max_model_len": limit,
        "max_waiting": 100_000,
    }
    reservations = device.kv_tokens // limit
    runs: dict[str, list[_Moment]] = {}
    final: dict[str, Drive] = {}
    for name, rows in (("contiguous", reservations), ("paged", 1024)):
        seen: list[_Moment] = []

        def watch(now: float, scheduler: Scheduler, seen: list[_Moment] = seen) -> None:
            counts, running = scheduler.snapshot(), scheduler.num_running_seqs
            held = counts["blocks_used"] * 16
            seen.append(_Moment(now, running, held, held * (1 - counts["waste"])))

        # Whole reservations are as many rows: a row's blocks are always there.
        config = SchedulerConfig(max_num_seqs=rows, **common)
        final[name] = drive(config, device.step_time(), arrivals, watch=watch, end=seconds)
        runs[name] = seen
    peak = {name: max(one.in_flight for one in seen) for name, seen in runs.items()}
    full = next(one.seconds for one in runs["contiguous"] if one.in_flight >= reservations)
    held = max(runs["contiguous"], key=lambda one: one.in_flight).used_tokens
    thin = {name: _thin(seen) for name, seen in runs.items()}
    waste = final["paged"].scheduler.snapshot()["peak_waste"]
    ratio = peak["paged"] / peak["contiguous"]
    slots = reservations * limit
    return LabResult(
        title="Incident: full at a few per cent of the memory",
        parameters={
            "device": device.name,
            "kv_tokens": device.kv_tokens,
            "limit_tokens": limit,
            "conversation_tokens": "random.Random(7).randint(150, 300), the prompt",
            "answer_tokens": answer,
            "requests_per_second": list(rates),
            "rising_for_seconds": seconds,
            "step_times": device.source,
        },
        figures={
            "contiguous_in_flight": peak["contiguous"],
            "paged_in_flight": peak["paged"],
            "in_flight_ratio": ratio,
            "contiguous_full_at_seconds": full,
            "contiguous_reserved_tokens": slots,
            "contiguous_used_tokens": held,
            "contiguous_lost_share": 1 - held / slots,
            "paged_peak_waste": waste,
        },
        text=(
            f"A reservation of {limit} slots fits {reservations} times, so that after {full:.1f} s no further request "
            f"starts, while {1 - held / slots:.0%} of what is reserved holds nothing. In blocks {peak['paged']:.0f} "
            f"requests are in flight at the peak, {ratio:.1f} times as many, and {waste:.1%} of the slots in use are "
            "empty. What limits the server then is its speed: at 180 requests a second either would need more GPUs."
        ),
        svg=above(
            lines(
                {name: [(one.seconds, one.in_flight) for one in seen] for name, seen in thin.items()},
                title="Requests in flight while the load rises from 20 to 180 a second",
                x_label="seconds",
                y_label="in flight",
            ),
            lines(
                {
                    "contiguous: reserved": [
                        (one.seconds, one.in_flight * limit) for one in thin["contiguous"]
                    ],
                    "contiguous: used": [(one.seconds, one.used_tokens) for one in thin["contiguous"]],
                    "paged: held": [(one.seconds, one.held_tokens) for one in thin["paged"]],
                    "paged: used": [(one.seconds, one.used_tokens) for one in thin["paged"]],
                },
                title="Slots for tokens: what lies between held and used is lost",
                x_label="seconds",
                y_label="tokens",
            ),
        ),
    )


@dataclass(frozen=True, slots=True)
class _Moment:
    seconds: float
    in_flight: int
    held_tokens: int
    """Slots of the blocks in use."""
    used_tokens: float


def _rising(rates: tuple[float, float], seconds: float, answer: int) -> list[tuple[float, Request]]:
    """Poisson arrivals whose rate rises evenly."""
    rng = random.Random(7)
    now = 0.0
    arrivals: list[tuple[float, Request]] = []
    while True:
        now += rng.expovariate(rates[0] + (rates[1] - rates[0]) * now / seconds)
        if now >= seconds:
            return arrivals
        number = len(arrivals)
        arrivals.append((now, request(str(number), rng.randint(150, 300), answer, at=number % 2000)))


def _thin(moments: list[_Moment]) -> list[_Moment]:
    """One each tenth of a second: a plot shows no more."""
    kept = [
        later for before, later in pairwise(moments) if int(before.seconds * 10) != int(later.seconds * 10)
    ]
    return kept or moments
