"""The whole system on this machine, from nothing to a table of what it did. `make demo` runs it.

Starts a local Ray with a coordinator and workers and the HTTP endpoint, holds a short chat, answers the 32 requests
of `prompts.jsonl`, and ends, leaving no process behind. Everything is asked over HTTP, as any client would.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from octavo import Client, SamplingParams
from octavo.cluster.outputs import RequestOutput
from octavo.cluster.service import Service, ServiceConfig
from octavo.protos.errors import OctavoError

PROMPTS_FILE = Path(__file__).with_name("prompts.jsonl")
QUESTION = "In two sentences: what was an octavo in the days of hand-printed books?"
GRACE_SECONDS = 10.0
EXIT_WAIT_SECONDS = 10.0
MARK = "OCTAVO_DEMO_RUN"


@dataclass(frozen=True, kw_only=True)
class DemoReport:
    """What the closing table says. Seconds, tokens, shares of 1."""

    model: str
    workers: int
    start_seconds: float
    requests: int
    prompt_tokens: int
    output_tokens: int
    seconds: float
    output_tokens_per_second: float
    total_tokens_per_second: float
    ttft_p50_seconds: float
    ttft_p95_seconds: float
    cached_tokens: int
    preemptions: int
    steps: int
    block_waste_at_peak: float
    """Slots of allocated blocks that held no token when most blocks were in use, over all workers."""
    contiguous_waste: float
    """The same requests, had each reserved room for the model's limit."""
    processes_left: int


def main() -> int:
    arguments = _arguments()
    # With --json, standard output is for the result alone.
    out = sys.stderr if arguments.json else sys.stdout
    # Inherited by everything that is started from here, under any parent: so what is left can be told.
    os.environ[MARK] = f"{os.getpid()}-{time.time_ns()}"
    config = ServiceConfig(
        model=arguments.model, num_workers=arguments.workers, device=arguments.device, port=arguments.port
    )
    service = Service(config)
    try:
        print(f"starting Ray, a coordinator, {arguments.workers} workers and the HTTP endpoint", file=out)
        began = time.monotonic()
        service.start(on_progress=lambda line: print(f"  {line}", file=out, flush=True))
        start_seconds = time.monotonic() - began
        with Client(service.url) as client:
            _chat(client, out)
            outputs, seconds = _batch(client, arguments.max_tokens)
            limit = client.models()[0].max_model_len
        stats = service.stats()
    except OctavoError as error:
        print(f"demo: {error.message}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    finally:
        print("stopping", file=out, flush=True)
        service.stop(GRACE_SECONDS)
    left = _processes_left()
    report = _report(service.model_name, start_seconds, outputs, seconds, stats, limit, len(left))
    if arguments.json:
        print(json.dumps(asdict(report)))
    else:
        _print_table(report)
    for process in left:
        print(f"demo: still running: {process}", file=sys.stderr)
    return 1 if left else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Start Octavo here, let it answer a chat and a batch, and end."
    )
    parser.add_argument("--model", help="folder, hub id or .gguf file; default: the small default model")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--port", type=int, default=0, help="0: any free port")
    parser.add_argument("--max-tokens", type=int, default=64, help="of each answer of the batch")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser.parse_args()


def _chat(client: Client, out: Any) -> None:
    print(f"\n> {QUESTION}", file=out, flush=True)
    params = SamplingParams(temperature=0, max_tokens=80)
    for piece in client.stream([{"role": "user", "content": QUESTION}], params):
        print(piece, end="", file=out, flush=True)
    print("\n", file=out, flush=True)


def _batch(client: Client, max_tokens: int) -> tuple[list[RequestOutput], float]:
    bodies = [json.loads(line)["body"] for line in PROMPTS_FILE.read_text("utf-8").split("\n") if line]
    prompts = [body.get("messages") or body["prompt"] for body in bodies]
    began = time.monotonic()
    outputs = client.generate(prompts, SamplingParams(temperature=0, max_tokens=max_tokens), progress=True)
    return outputs, time.monotonic() - began


def _report(
    model: str,
    start_seconds: float,
    outputs: list[RequestOutput],
    seconds: float,
    stats: dict[str, Any],
    limit: int | None,
    processes_left: int,
) -> DemoReport:
    prompt_tokens = sum(len(out.prompt_token_ids) for out in outputs)
    output_tokens = sum(len(branch.token_ids) for out in outputs for branch in out.outputs)
    first_token_seconds = sorted(out.metrics.ttft_seconds for out in outputs)
    workers = stats["workers"].values()
    peak_slots = sum(worker["peak_blocks"] * worker["block_size"] for worker in workers)
    wasted_slots = sum(worker["peak_wasted_slots"] for worker in workers)
    return DemoReport(
        model=model,
        workers=len(workers),
        start_seconds=start_seconds,
        requests=len(outputs),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        seconds=seconds,
        output_tokens_per_second=output_tokens / seconds,
        total_tokens_per_second=(prompt_tokens + output_tokens) / seconds,
        ttft_p50_seconds=_quantile(first_token_seconds, 0.50),
        ttft_p95_seconds=_quantile(first_token_seconds, 0.95),
        cached_tokens=sum(out.metrics.cached_tokens for out in outputs),
        preemptions=sum(stats["preemptions"].values()),
        steps=stats["steps"],
        block_waste_at_peak=wasted_slots / peak_slots if peak_slots else 0.0,
        contiguous_waste=1 - (prompt_tokens + output_tokens) / (len(outputs) * (limit or 1)),
        processes_left=processes_left,
    )


def _quantile(ordered: list[float], share: float) -> float:
    """Nearest rank: with 32 values there is nothing to interpolate."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _print_table(report: DemoReport) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{report.model}, {report.workers} workers", show_header=False)
    table.add_column(justify="left")
    table.add_column(justify="right")
    for label, value in (
        ("start to ready", f"{report.start_seconds:.1f} s"),
        ("requests", f"{report.requests}"),
        ("prompt tokens", f"{report.prompt_tokens:,}"),
        ("output tokens", f"{report.output_tokens:,}"),
        ("time for the batch", f"{report.seconds:.1f} s"),
        ("output tokens a second", f"{report.output_tokens_per_second:,.1f}"),
        ("all tokens a second", f"{report.total_tokens_per_second:,.1f}"),
        ("time to first token, p50", f"{report.ttft_p50_seconds:.2f} s"),
        ("time to first token, p95", f"{report.ttft_p95_seconds:.2f} s"),
        ("prompt tokens found in cache", f"{report.cached_tokens:,}"),
        ("preemptions", f"{report.preemptions}"),
        ("steps", f"{report.steps:,}"),
        ("KV slots wasted at the fullest moment", f"{report.block_waste_at_peak:.1%}"),
        ("with room reserved for the model's limit", f"{report.contiguous_waste:.1%}"),
        ("processes left running", f"{report.processes_left}"),
    ):
        table.add_row(label, value)
    Console().print(table)


def _processes_left() -> list[psutil.Process]:
    """Processes that came of this run and do not end within `EXIT_WAIT_SECONDS`."""
    started_here = [
        process for process in psutil.process_iter() if process.pid != os.getpid() and _is_marked(process)
    ]
    _, alive = psutil.wait_procs(started_here, timeout=EXIT_WAIT_SECONDS)
    return alive


def _is_marked(process: psutil.Process) -> bool:
    try:
        return process.environ().get(MARK) == os.environ[MARK]
    except psutil.Error:  # gone meanwhile, or somebody else's
        return False


if __name__ == "__main__":
    sys.exit(main())
