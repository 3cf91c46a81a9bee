"""Policies of the router on recorded workloads: mean and p99 time to first token and hit rate, as a table and a plot.

    python benchmarks/router_traces.py --data FOLDER [--out docs/routing] [--quick]

Real Router and Scheduler objects in virtual time (`octavo.cluster.simulator`), Llama 3.1 8B on A100s by the roofline
preset, blocks of 64 tokens. Load is set by compressing the trace's clock: 0.3, 0.6 and 0.85 of the rate at which the
work that no cache of any size could save (prefill of new blocks, and decoding) would keep every worker busy. A real
cache saves less, so that 0.85 is at or near saturation. Small fleets run each place several times, with ties broken
otherwise each time: the p99 of one run of 500 requests is its five slowest, and says little. It takes about twenty
minutes of one core, at once or in pieces (--seconds).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import xxhash

from octavo.cluster.simulator.fleet import FleetConfig, Simulation, quantile
from octavo.cluster.simulator.hardware import Device, preset
from octavo.cluster.simulator.plots import bars
from octavo.cluster.simulator.traces import Trace, read_trace
from octavo.scheduler.router import ROUTER_POLICIES

FILES = {
    "conversation": "mooncake_conversation.jsonl",
    "synthetic": "mooncake_synthetic.jsonl",
    "agentic": "agentic_claude_code_rle.jsonl.gz",
}
LOADS = {"low": 0.3, "middle": 0.6, "near saturation": 0.85}
NUM_REQUESTS = {8: 500, 64: 1000, 512: 1000}
"""Of each trace, the first."""
AGENTIC_REQUESTS = {8: 500, 64: 600, 512: 800}
"""Its prompts are ten times as long."""
NUM_SEEDS = {8: 4, 64: 1, 512: 1}
"""Runs of each place; what they measure is taken over the requests of all."""
MAX_MODEL_LEN = 131_072
BLOCK_SIZE = 64


@dataclass(frozen=True)
class Cell:
    trace: str
    workers: int
    load: str
    policy: str
    runs: int
    requests: int
    """Of each run."""
    mean_ttft: float
    p99_ttft: float
    hit_rate: float
    index_exact: float
    """Share of requests for which the index said what the chosen worker's own tree held then."""
    cached_as_predicted: float
    """Share of requests that found, when admitted, what their reservation said: what was cached when they were routed,
    or what a change with a name had made of it."""
    cached_as_told: float
    """Share of requests that found what was cached when they were routed: nothing changed while they waited."""
    cached_as_foreseen: float
    """As that, with what requests ahead had promised to compute."""
    causes: dict[str, int]
    """Requests by what changed their prediction."""
    utilisation: float
    predicted_error: float
    """Mean absolute error of the predicted TTFT, in shares of the mean TTFT."""
    cpu_seconds: float


def new_work_seconds(trace: Trace, device: Device) -> float:
    """Work that no prefix cache could save."""
    known: set[int] = set()
    total = 0.0
    for one in trace.requests:
        ids = [] if one.block_ids is None else one.block_ids.tolist()
        shared = 0
        for block in ids:
            if block not in known:
                break
            shared += 1
        known.update(ids)
        new = max(1, one.num_prompt_tokens - shared * one.block_tokens)
        decode = (
            device.token_seconds + device.row_seconds + one.num_prompt_tokens * device.context_token_seconds
        )
        total += new * device.token_seconds + one.num_output_tokens * decode
    return total


def run_cell(trace: Trace, name: str, workers: int, load: str, policy: str, device: Device) -> Cell:
    seconds = new_work_seconds(trace, device) / workers / LOADS[load]
    config = FleetConfig(
        device=device,
        num_workers=workers,
        policy=policy,
        block_size=BLOCK_SIZE,
        max_model_len=MAX_MODEL_LEN,
    )
    begin = time.process_time()
    faster = trace.faster(trace.seconds / seconds)
    records = [
        Simulation(replace(config, seed=seed), faster).run() for seed in range(1, NUM_SEEDS[workers] + 1)
    ]
    done = [one for record in records for one in record.outcomes]
    ttft = [one.ttft_seconds for one in done]
    mean = sum(ttft) / len(ttft)
    return Cell(
        name,
        workers,
        load,
        policy,
        NUM_SEEDS[workers],
        len(trace.requests),
        mean,
        quantile(ttft, 0.99),
        sum(one.cached_tokens for one in done) / sum(one.num_prompt_tokens for one in done),
        sum(one.index_exact for one in done) / len(done),
        sum(one.cached_tokens == one.predicted_cached_tokens for one in done) / len(done),
        sum(not one.repredictions for one in done) / len(done),
        sum(one.cached_tokens == one.foreseen_cached_tokens for one in done) / len(done),
        dict(Counter(cause.value for one in done for cause in one.repredictions)),
        sum(sum(record.busy_seconds) / workers / record.end_seconds for record in records) / len(records),
        sum(abs(one.ttft_seconds - one.predicted_ttft_seconds) for one in done) / len(done) / mean,
        time.process_time() - begin,
    )


def load_trace(data: Path, name: str, workers: int, quick: bool) -> Trace:
    return read_trace(data / FILES[name]).at_most(MAX_MODEL_LEN).cut(num_requests(name, workers, quick))


def num_requests(name: str, workers: int, quick: bool) -> int:
    most = (AGENTIC_REQUESTS if name == "agentic" else NUM_REQUESTS)[workers]
    return most // (10 if quick else 1)


def table(cells: list[Cell]) -> str:
    """Markdown: a row a place, a column a policy: mean / p99 TTFT in seconds, hit rate."""
    lines = ["| trace | workers | load | " + " | ".join(ROUTER_POLICIES) + " | best |"]
    lines.append("|---|---|---|" + "---|" * (len(ROUTER_POLICIES) + 1))
    places: dict[tuple[str, int, str], dict[str, Cell]] = {}
    for cell in cells:
        places.setdefault((cell.trace, cell.workers, cell.load), {})[cell.policy] = cell
    for (trace, workers, load), found in places.items():
        texts = [
            f"{cell.mean_ttft:.3f} / {cell.p99_ttft:.2f}, {cell.hit_rate:.0%}"
            for cell in (found[policy] for policy in ROUTER_POLICIES if policy in found)
        ]
        lines.append(f"| {trace} | {workers} | {load} | " + " | ".join(texts) + f" | {verdict(found)} |")
    return "\n".join(lines)


def verdict(found: dict[str, Cell]) -> str:
    """Whether the default policy has the lowest mean and the lowest p99 of a place, or by how much another is lower."""
    own, behind = found[ROUTER_POLICIES[0]], []
    for name, value in (("mean", lambda cell: cell.mean_ttft), ("p99", lambda cell: cell.p99_ttft)):
        best = min(found.values(), key=value)
        if value(best) < value(own):
            behind.append(f"{name} {value(own) / value(best) - 1:+.1%} behind {best.policy}")
    return "; ".join(behind) or "yes"


def code_state() -> str:
    """Of everything that decides: cells of two states are not for one table."""
    root = Path(__file__).resolve().parent.parent
    digest = xxhash.xxh64()
    for folder in ("scheduler", "cluster/simulator"):
        for path in sorted((root / folder).glob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def known_cells(path: Path, quick: bool) -> list[Cell]:
    """Cells that an earlier run of the same code state has left, if they measured what would be measured now."""
    if not path.exists():
        return []
    saved = json.loads(path.read_text(encoding="utf-8"))
    if saved["code_state"] != code_state():
        return []
    cells = [Cell(**cell) for cell in saved["cells"]]
    return [
        cell
        for cell in cells
        if (cell.runs, cell.requests)
        == (NUM_SEEDS[cell.workers], num_requests(cell.trace, cell.workers, quick))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with the traces")
    parser.add_argument(
        "--out",
        type=Path,
        help="write OUT.json after every cell, and OUT.svg; what is there is not run again",
    )
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no cell after so long")
    parser.add_argument("--quick", action="store_true", help="a tenth of the requests, 8 and 64 workers")
    parser.add_argument("--traces", nargs="+", default=list(FILES), choices=FILES)
    parser.add_argument("--workers", nargs="+", type=int, default=list(NUM_REQUESTS), choices=NUM_REQUESTS)
    args = parser.parse_args()
    begin = time.monotonic()
    device = preset("llama-3.1-8b", "a100-80gb")
    cells = [] if args.out is None else known_cells(args.out.with_suffix(".json"), args.quick)
    known = {(cell.trace, cell.workers, cell.load, cell.policy) for cell in cells}
    state = code_state()
    for name in args.traces:
        for workers in [count for count in args.workers if count < 512 or not args.quick]:
            places = [(load, policy) for load in LOADS for policy in ROUTER_POLICIES]
            missing = [place for place in places if (name, workers, *place) not in known]
            trace = load_trace(args.data, name, workers, args.quick) if missing else None
            for load, policy in missing:
                if time.monotonic() - begin > args.seconds:
                    return
                assert trace is not None
                cell = run_cell(trace, name, workers, load, policy, device)
                cells.append(cell)
                print(json.dumps(asdict(cell)), file=sys.stderr, flush=True)
                if args.out is not None:
                    saved = {"code_state": state, "cells": [asdict(cell) for cell in cells]}
                    args.out.with_suffix(".json").write_text(
                        json.dumps(saved, indent=1) + "\n", encoding="utf-8"
                    )
    print(table(cells))
    if args.out is not None:
        args.out.with_suffix(".svg").write_text(plot(cells), encoding="utf-8")


def plot(cells: list[Cell]) -> str:
    """Mean TTFT of each policy as a multiple of the best one's, place by place."""
    groups: dict[str, dict[str, float]] = {}
    for cell in cells:
        groups.setdefault(f"{cell.trace} {cell.workers} {cell.load}", {})[cell.policy] = cell.mean_ttft
    relative = {
        place: {policy: value / min(found.values()) for policy, value in found.items()}
        for place, found in groups.items()
    }
    return bars(relative, title="Mean time to first token, in multiples of the best policy", limit=4.0)


if __name__ == "__main__":
    main()
