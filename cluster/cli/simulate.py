"""`octavo simulate`: a trace through a fleet that does not exist, with the scheduler and router of production."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cluster.cli.console import JsonOption, print_json, reports_errors

if TYPE_CHECKING:
    from octavo.cluster.simulator.fleet import FleetConfig, RunRecord
    from octavo.cluster.simulator.hardware import Device
    from octavo.cluster.simulator.report import Summary
    from octavo.cluster.simulator.traces import Trace

SWEPT = {
    "block-size": "block_size",
    "budget": "max_num_batched_tokens",
    "workers": "num_workers",
    "policy": "policy",
    "preemption": "preemption",
    "system": "system",
}
"""Name on the command line -> field of `FleetConfig`."""
NAMED = ("policy", "preemption", "system")
"""Of these, whose values are no numbers."""
RUNS_MAX = 200
"""Of one `--sweep`."""


@reports_errors
def simulate(
    trace: Annotated[
        Path, typer.Argument(help="A trace: Mooncake, Azure, ServeGen, agentic or plain JSONL.")
    ],
    *,
    workers: Annotated[int, typer.Option(min=1, help="Simulated workers.")] = 8,
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
    policy: Annotated[
        str, typer.Option(help="Router: predicted_ttft, prefix, least_loaded or round_robin.")
    ] = "predicted_ttft",
    block_size: Annotated[int, typer.Option(help="Tokens in one KV block.")] = 16,
    budget: Annotated[int, typer.Option(help="Tokens in one step (max_num_batched_tokens).")] = 2048,
    max_num_seqs: Annotated[int, typer.Option(help="Branches that run at once on a worker.")] = 256,
    max_model_len: Annotated[
        int, typer.Option(help="Prompt and output tokens; longer ones are refused.")
    ] = 131_072,
    host_blocks: Annotated[int, typer.Option(min=0, help="Host blocks of each worker.")] = 0,
    preemption: Annotated[str, typer.Option(help="auto, swap or recompute.")] = "auto",
    system: Annotated[
        str,
        typer.Option(
            help="How far the history has come: static, continuous, paged, chunked, cached or octavo."
        ),
    ] = "octavo",
    itl_target: Annotated[float | None, typer.Option(help="Seconds a step may take.")] = None,
    scale_max: Annotated[
        int | None, typer.Option(help="Let the number of workers follow the load, up to so many.")
    ] = None,
    scale_min: Annotated[int, typer.Option(help="Fewest workers then.")] = 1,
    scale_wait_target: Annotated[
        float, typer.Option(help="Seconds that a request may wait before more workers are asked for.")
    ] = 2.0,
    worker_start: Annotated[
        float, typer.Option(help="Seconds from asking for a worker to its first step.")
    ] = 60.0,
    trace_format: Annotated[
        str | None,
        typer.Option(
            "--format", help="mooncake, azure, servegen, agentic or plain. Default: by its first line."
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many requests.")] = None,
    speed: Annotated[float, typer.Option(min=1e-6, help="So many times the trace's rate of arrivals.")] = 1.0,
    ttft_slo: Annotated[float, typer.Option(help="Seconds to the first token that count as good.")] = 2.0,
    itl_slo: Annotated[
        float, typer.Option(help="Seconds between tokens, on average, that count as good.")
    ] = 0.1,
    seed: Annotated[int, typer.Option(help="Of the router's ties.")] = 0,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            help=f"NAME=A,B,... with NAME one of {', '.join(SWEPT)}; may be repeated: all combinations."
        ),
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Write an HTML page with table and plots here.")] = None,
    progress: Annotated[bool, typer.Option(help="Show progress.")] = True,
    json: JsonOption = False,
) -> None:
    """Replay a trace on simulated workers and tell latencies, hit rate, waste and cost.

    Every decision is made by the scheduler and router that serve real requests; only the time of a step is computed.
    Speeds of --gpu come from data sheets (a roofline); those of --calibration were measured.
    """
    from octavo.cluster.simulator.fleet import FleetConfig
    from octavo.cluster.simulator.html_report import Curves, page
    from octavo.cluster.simulator.report import Slo, summarise
    from octavo.cluster.simulator.traces import read_trace
    from octavo.scheduler.autoscaling import AutoscalingConfig

    device = choose_device(model, gpu, tp, calibration, price)
    requests = read_trace(trace, trace_format)
    requests = requests.cut(limit or len(requests.requests)).faster(speed)
    autoscaling = None
    if scale_max is not None:
        autoscaling = AutoscalingConfig(
            workers_min=scale_min, workers_max=scale_max, wait_target=scale_wait_target
        )
    base: dict[str, Any] = {
        "num_workers": workers,
        "policy": policy,
        "block_size": block_size,
        "max_num_batched_tokens": budget,
        "preemption": preemption,
        "system": system,
    }
    configs = [
        FleetConfig(
            device=device,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            host_blocks=host_blocks,
            itl_target=itl_target,
            seed=seed,
            autoscaling=autoscaling,
            worker_start_seconds=worker_start,
            **base | choice,
        )
        for choice in _choices(sweep or [])
    ]
    slo = Slo(ttft_seconds=ttft_slo, itl_seconds=itl_slo)
    summaries, curves = [], []
    for config in configs:
        record = _run(config, requests, progress and not json)
        summaries.append(summarise(record, slo))
        curves.append(Curves.of(record))
    if report is not None:
        report.write_text(page(summaries, curves), encoding="utf-8")
    if json:
        print_json({"runs": [one.as_dict() for one in summaries]})
    else:
        _print(summaries)


def choose_device(model: str, gpu: str, tp: int, calibration: str | None, price: float | None) -> Device:
    """A preset or a calibration file, at this price. Raises `ConfigError`."""
    from dataclasses import replace

    from octavo.cluster.simulator.calibration import read_calibration
    from octavo.cluster.simulator.hardware import preset

    device = preset(model, gpu, num_gpus=tp) if calibration is None else read_calibration(calibration)
    return device if price is None else replace(device, dollars_per_hour=price)


def _choices(sweep: Sequence[str]) -> list[dict[str, Any]]:
    """All combinations of what is swept, as fields of `FleetConfig`."""
    from octavo.protos.errors import ConfigError

    axes: list[list[tuple[str, Any]]] = []
    for text in sweep:
        name, _, values = text.partition("=")
        if name not in SWEPT or not values:
            raise ConfigError(
                f"sweep must be NAME=A,B,... with NAME one of {', '.join(SWEPT)}, got {text!r}", param="sweep"
            )
        try:
            parsed = [value if name in NAMED else int(value) for value in values.split(",")]
        except ValueError:
            raise ConfigError(
                f"sweep over {name} takes whole numbers, got {values!r}", param="sweep"
            ) from None
        axes.append([(SWEPT[name], value) for value in parsed])
    choices = [dict(pairs) for pairs in product(*axes)]
    if len(choices) > RUNS_MAX:
        raise ConfigError(f"the sweep has {len(choices)} runs; the limit is {RUNS_MAX}", param="sweep")
    return choices


def _run(config: FleetConfig, trace: Trace, show: bool) -> RunRecord:
    from rich.console import Console
    from rich.progress import Progress

    from octavo.cluster.simulator.run import simulate as run

    console = Console(stderr=True)
    with Progress(console=console, disable=not (show and console.is_terminal), transient=True) as bar:
        task = bar.add_task(
            f"{config.num_workers} workers, {config.system}, {config.policy}", total=len(trace.requests)
        )
        return run(config, trace, on_progress=lambda done: bar.update(task, completed=done))


def _print(summaries: Sequence[Summary]) -> None:
    from rich.console import Console
    from rich.table import Table

    from octavo.cluster.simulator.report import SHOWN, rows

    first = summaries[0]
    speed = "speeds computed from data sheets" if first.device_source == "roofline" else "speeds measured"
    print(f"{first.trace}: {first.requests} requests on workers of {first.device} ({speed})")
    table = Table(box=None, pad_edge=False, show_header=False)
    # A column a run: as many as there are, they are read side by side.
    for _ in range(len(summaries) + 1):
        table.add_column(justify="right", no_wrap=True)
    for (_, heading, _), *cells in zip(SHOWN, *rows(summaries), strict=True):
        table.add_row(heading, *cells)
    console = Console()
    if not console.is_terminal:
        console = Console(width=20 + 16 * (len(summaries) + 1))
    console.print(table)
    for one in summaries:
        for change in one.size_changes:
            print(f"{change.at_seconds:.0f} s: {change.num_workers} workers: {change.reason}")
    if refused := max(one.refused for one in summaries):
        print(f"{refused} requests were refused: longer than --max-model-len or than a worker's pool.")
