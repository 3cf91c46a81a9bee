"""`octavo batch run`, or plain `octavo batch`: a file of requests in, a file of results out.

This process does the work, and its output file is what it goes on from. Batches that a server keeps are in
`batch_jobs.py`.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cluster.cli.console import (
    DEFAULT_SERVER,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_UNAVAILABLE,
    URL_VARIABLE,
    ApiKeyOption,
    JsonOption,
    UrlOption,
    print_json,
    reports_errors,
)

if TYPE_CHECKING:
    from octavo.cluster.batch import BatchSummary


DEFAULT_MODEL = "default"


@reports_errors
def run(
    input: Annotated[Path, typer.Argument(metavar="IN.JSONL", help="Requests, one OpenAI batch line each.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Results, in order of completion.")],
    *,
    url: UrlOption = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Without --url: run this model in this process ('default' for the default one). "
            "With --url: the model of lines that name none."
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda (without --url).")] = "auto",
    concurrency: Annotated[int, typer.Option(min=1, help="Requests under way at once.")] = 32,
    max_retries: Annotated[
        int | None, typer.Option(min=0, help="Further tries of a line that fails for a passing reason.")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds that one answer may take.")] = 600.0,
    api_key: ApiKeyOption = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Drop the results that the output file holds.")
    ] = False,
    progress: Annotated[bool, typer.Option(help="Show a progress bar.")] = True,
    json: JsonOption = False,
) -> None:
    """Answer a file of requests from here, each line exactly once. `run` may be left out.

    Lines are {"custom_id", "method": "POST", "url": "/v1/chat/completions", "body"}. The whole file is checked
    before the first request. Interrupt whenever you like: the same command goes on where it stopped.

    Exit codes: 0 every line succeeded, 1 some lines failed (their results say why), 2 the file or an option is
    wrong, 3 the server is gone, 130 interrupted.
    """
    from octavo.cluster.async_client import AsyncClient
    from octavo.cluster.batch import BATCH_MAX_RETRIES, run_batch
    from octavo.cluster.batch_file import num_unfinished

    async def answer(client: AsyncClient) -> BatchSummary:
        async with client:
            stop = _stop_on_signals()
            return await run_batch(input, output, client, overwrite=overwrite, progress=progress, stop=stop)

    options: dict[str, Any] = {
        "timeout": timeout,
        "max_concurrency": concurrency,
        "max_retries": BATCH_MAX_RETRIES if max_retries is None else max_retries,
    }
    # Loading a model takes a while: a wrong file is told before, and a finished one needs none.
    if url is None and model is not None and num_unfinished(input, output, overwrite=overwrite):
        from octavo.cluster.in_process import BASE_URL, in_process_transport

        with in_process_transport(None if model == DEFAULT_MODEL else model, device=device) as transport:
            summary = asyncio.run(answer(AsyncClient(BASE_URL, transport=transport, **options)))
    else:
        server = url or os.environ.get(URL_VARIABLE) or DEFAULT_SERVER
        summary = asyncio.run(answer(AsyncClient(server, api_key, model, **options)))
    _finish(summary, as_json=json)


def _stop_on_signals() -> asyncio.Event:
    """Set by SIGINT and SIGTERM, as long as the running loop runs."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


def _finish(summary: BatchSummary, *, as_json: bool) -> None:
    from octavo.cluster.batch import INTERRUPTED

    if as_json:
        print_json(summary.as_dict())
    else:
        print(_sentence(summary))
    if summary.stopped == INTERRUPTED:
        raise typer.Exit(EXIT_INTERRUPTED)
    if summary.stopped is not None:
        raise typer.Exit(EXIT_UNAVAILABLE)
    if summary.failed:
        raise typer.Exit(EXIT_FAILED)


def _sentence(summary: BatchSummary) -> str:
    parts = [f"{summary.succeeded} of {summary.total} succeeded, {summary.failed} failed"]
    if summary.resumed:
        parts.append(f"{summary.resumed} of them in earlier runs")
    parts.append(f"{summary.completion_tokens} tokens in {summary.seconds:.1f} s")
    text = "; ".join(parts) + f"; results in {summary.output}"
    if summary.stopped is not None:
        text += f"\nstopped ({summary.stopped}): {summary.remaining} left; the same command goes on from here"
    return text
