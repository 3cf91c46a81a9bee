"""`octavo plan`: how many workers does this workload need?"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from octavo.cluster.cli.console import EXIT_FAILED, JsonOption, print_json, reports_errors


@reports_errors
def plan(
    trace: Annotated[
        Path, typer.Argument(help="A trace: Mooncake, Azure, ServeGen, agentic or plain JSONL.")
    ],
    *,
    ttft_slo: Annotated[float, typer.Option(help="Seconds to the first token.")] = 2.0,
    itl_slo: Annotated[float, typer.Option(help="Seconds between tokens, on average.")] = 0.1,
    share: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Of all requests that must be within both.")
    ] = 0.95,
    max_workers: Annotated[int, typer.Option(min=1, help="Give up beyond so many.")] = 256,
    model: Annotated[str, typer.Option(help="Shape of the model, by name.")] = "llama-3.1-8b",
    gpu: Annotated[str, typer.Option(help="GPU of each worker, by name.")] = "a100-80gb",
    tp: Annotated[int, typer.Option(min=1, help="GPUs that share one worker's model.")] = 1,
    calibration: Annotated[
        str | None,
        typer.Option(
            help="A measured machine instead of --model and --gpu: a JSON file, or a shipped one by name."
        ),
    ] = None,
    price: Annotated[float | None, typer.Option(help="Dollars an hour of one worker.")] = None,
    policy: Annotated[str, typer.Option(help="Policy of the router.")] = "predicted_ttft",
    block_size: Annotated[int, typer.Option(help="Tokens in one KV block.")] = 16,
    budget: Annotated[int, typer.Option(help="Tokens in one step (max_num_batched_tokens).")] = 2048,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many requests.")] = None,
    speed: Annotated[float, typer.Option(min=1e-6, help="So many times the trace's rate of arrivals.")] = 1.0,
    json: JsonOption = False,
) -> None:
    """Find the smallest fleet that holds an SLO on a trace.

    Each candidate is a whole simulation, as `octavo simulate` makes it.
    """
    from octavo.cluster.cli.simulate import choose_device
    from octavo.cluster.simulator.fleet import FleetConfig
    from octavo.cluster.simulator.planning import smallest_fleet
    from octavo.cluster.simulator.report import Slo, Summary
    from octavo.cluster.simulator.traces import read_trace

    requests = read_trace(trace)
    requests = requests.cut(limit or len(requests.requests)).faster(speed)
    config = FleetConfig(
        device=choose_device(model, gpu, tp, calibration, price),
        policy=policy,
        block_size=block_size,
        max_num_batched_tokens=budget,
    )

    def tell(one: Summary) -> None:
        if not json:
            print(
                f"{one.workers:4} workers: {one.slo_share:6.1%} within the SLO, TTFT p99 {one.ttft_p99:.2f} s, "
                f"busy {one.utilisation:.0%}",
                file=sys.stderr,
            )

    slo = Slo(ttft_seconds=ttft_slo, itl_seconds=itl_slo)
    found = smallest_fleet(config, requests, slo, share=share, workers_max=max_workers, on_run=tell)
    answer = found.answer
    if json:
        print_json(
            {
                "workers": None if answer is None else answer.workers,
                "answer": None if answer is None else answer.as_dict(),
                "tried": [one.as_dict() for one in found.tried],
            }
        )
    elif answer is None:
        best = max(found.tried, key=lambda one: one.slo_share)
        print(
            f"{max_workers} workers do not hold it: {best.slo_share:.1%} of the requests are within the SLO."
        )
        if best.refused:
            print(
                f"{best.refused} of {best.requests} were refused: longer than a worker's pool or model length."
            )
    else:
        how = "speeds computed from data sheets" if answer.device_source == "roofline" else "speeds measured"
        print(
            f"{answer.workers} workers of {answer.device} ({how}) hold it: {answer.slo_share:.1%} of {answer.requests} "
            f"requests, at {answer.dollars_per_million_tokens:.3f} dollars per million tokens."
        )
    if answer is None:
        raise typer.Exit(EXIT_FAILED)
