"""`octavo bench`: load on a running endpoint, and what its clients see."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from octavo.cluster.cli.console import (
    DEFAULT_SERVER,
    EXIT_FAILED,
    ApiKeyOption,
    JsonOption,
    ServerOption,
    print_json,
    reports_errors,
)

if TYPE_CHECKING:
    from octavo.cluster.load import Figures


@reports_errors
def bench(
    *,
    url: ServerOption = DEFAULT_SERVER,
    api_key: ApiKeyOption = None,
    model: Annotated[str | None, typer.Option(help="Default: the server's first.")] = None,
    requests: Annotated[int, typer.Option("-n", "--requests", help="How many.")] = 100,
    concurrency: Annotated[int, typer.Option(help="Under way at once; with --rate the most of them.")] = 16,
    rate: Annotated[
        float | None,
        typer.Option(help="Requests a second, at random moments. Default: the next when one ends."),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="One prompt a line: text, or JSON with prompt, question, text or messages."),
    ] = None,
    prompt_words: Annotated[int, typer.Option(help="Of synthetic prompts; about a token each.")] = 128,
    shared_words: Annotated[int, typer.Option(help="So many of them are the same in all prompts.")] = 0,
    max_tokens: Annotated[int, typer.Option(help="Of each answer.")] = 64,
    ignore_eos: Annotated[bool, typer.Option(help="Have every answer be as long as it may.")] = True,
    warmup: Annotated[int, typer.Option(min=0, help="Requests beforehand that are not counted.")] = 2,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds that one answer may be silent.")] = 600.0,
    seed: Annotated[int, typer.Option(help="Of prompts and moments.")] = 0,
    progress: Annotated[bool, typer.Option(help="Show a progress bar.")] = True,
    json: JsonOption = False,
) -> None:
    """Measure a running endpoint, of any server that speaks OpenAI's API: TTFT, ITL, throughput.

    Answers are streamed completions at temperature 0. Exit code 1: some requests failed.
    """
    from dataclasses import replace

    from octavo.cluster.async_client import API_KEY_VARIABLE
    from octavo.cluster.client import Client
    from octavo.cluster.load import Endpoint, Load, Sample, read_prompts, run_load
    from octavo.cluster.progress import progress_bar

    load = Load(
        num_requests=requests,
        concurrency=concurrency,
        rate=rate,
        max_tokens=max_tokens,
        prompt_words=prompt_words,
        shared_words=shared_words,
        ignore_eos=ignore_eos,
        seed=seed,
    )
    texts = None if prompts is None else read_prompts(prompts)
    api_key = api_key or os.environ.get(API_KEY_VARIABLE)
    if model is None:
        with Client(url, api_key, max_retries=1) as client:
            model = client.models()[0].id

    with progress_bar("bench", requests, enabled=progress and not json) as bar:

        async def go() -> Figures:
            endpoint = Endpoint(url, model, api_key, timeout)
            if warmup:
                first = replace(load, num_requests=warmup, rate=None, seed=seed + 1)
                await run_load(first, endpoint, prompts=texts)

            def done(sample: Sample) -> None:
                bar.advance(tokens=sample.output_tokens)

            return await run_load(load, endpoint, prompts=texts, on_done=done)

        figures = asyncio.run(go())
    if json:
        print_json({"url": url, "model": model, **figures.as_dict()})
    else:
        _print(figures)
    if figures.failed:
        raise typer.Exit(EXIT_FAILED)


def _print(figures: Figures) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.print(
        f"{figures.requests} requests, {figures.failed} failed, in {figures.seconds:.1f} s: "
        f"{figures.requests_per_second:.2f} requests/s, {figures.output_tokens_per_second:.1f} output tokens/s, "
        f"{figures.prompt_tokens_per_second:.1f} prompt tokens/s ({figures.cached_tokens} of {figures.prompt_tokens} "
        "cached)",
        soft_wrap=True,
    )
    table = Table(box=None, pad_edge=False)
    table.add_column("milliseconds")
    for heading in figures.latency:
        table.add_column(heading, justify="right")
    for name, values in (
        ("time to first token", figures.ttft),
        ("between tokens", figures.itl),
        ("longest pause", figures.gap),
        ("whole answer", figures.latency),
    ):
        table.add_row(name, *(f"{1000 * value:.1f}" for value in values.values()))
    console.print(table)
    for message, count in figures.errors.items():
        console.print(f"{count} x {message}", markup=False, soft_wrap=True)
