"""`octavo batch submit|status|results|cancel`: batches that a server keeps and answers by itself."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from octavo.cluster.cli.batch import run
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
    from octavo.cluster.client import Client
    from octavo.cluster.client_jobs import Batch

BatchArgument = Annotated[str, typer.Argument(metavar="BATCH", help="Its id: batch_...")]
OutputOption = Annotated[
    Path | None, typer.Option("-o", "--output", help="Where results go. Default: standard output.")
]


class _RunByDefault(TyperGroup):
    """`octavo batch IN.JSONL -o OUT` is `octavo batch run IN.JSONL -o OUT`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] != "--help":
            args = ["run", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_RunByDefault,
    no_args_is_help=True,
    help="Answer files of requests: here and now (run), or on the server in its own time (submit).",
)
app.command()(run)


@app.command()
@reports_errors
def submit(
    input: Annotated[Path, typer.Argument(metavar="IN.JSONL", help="Requests, one OpenAI batch line each.")],
    *,
    url: ServerOption = DEFAULT_SERVER,
    api_key: ApiKeyOption = None,
    endpoint: Annotated[
        str | None, typer.Option(help="Default: the url of the lines, which all have the same.")
    ] = None,
    window: Annotated[str, typer.Option(help="Time to be done in, such as 90m, 24h or 7d.")] = "24h",
    metadata: Annotated[
        list[str] | None, typer.Option(help="KEY=VALUE to be kept with it; may be repeated.")
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Stay until it has ended.")] = False,
    json: JsonOption = False,
) -> None:
    """Hand a file of requests to the server, which answers them below everything that has a caller waiting.

    Prints the id of the batch. The file is checked first; nobody needs to stay, and a restart of the server loses
    nothing.
    """
    from octavo.cluster.client import Client
    from octavo.protos.errors import ConfigError

    pairs = dict(pair.partition("=")[::2] for pair in metadata or ())
    if wrong := [pair for pair in metadata or () if "=" not in pair]:
        raise ConfigError(f"metadata must be KEY=VALUE, got {wrong[0]!r}", param="metadata")
    with Client(url, api_key) as client:
        batch = client.batches.create(input, endpoint=endpoint, completion_window=window, metadata=pairs)
        if not json:
            print(batch.id, flush=True)
        if wait:
            batch = client.batches.wait(batch.id, on_change=lambda now: _say(_line(now)))
        if json:
            print_json(batch.fields)
    _exit(batch)


@app.command()
@reports_errors
def status(
    batch: Annotated[
        str | None, typer.Argument(metavar="[BATCH]", help="Its id. Default: the newest ones.")
    ] = None,
    *,
    url: ServerOption = DEFAULT_SERVER,
    api_key: ApiKeyOption = None,
    limit: Annotated[int, typer.Option(min=1, help="Show so many.")] = 20,
    wait: Annotated[bool, typer.Option("--wait", help="Stay until it has ended.")] = False,
    json: JsonOption = False,
) -> None:
    """Tell where a batch stands, or list the newest ones.

    Exit code 1: it has ended and not every line succeeded.
    """
    from octavo.cluster.client import Client

    with Client(url, api_key) as client:
        if batch is None:
            found: Sequence[Batch] = client.batches.list(limit)
        elif wait:
            found = [client.batches.wait(batch, on_change=lambda now: _say(_line(now)))]
        else:
            found = [client.batches.retrieve(batch)]
    if json:
        print_json({"batches": [one.fields for one in found]} if batch is None else found[0].fields)
    else:
        for one in found:
            print(_line(one))
            for problem in one.problems:
                print(f"  {problem}")
    if batch is not None:
        _exit(found[0])


@app.command()
@reports_errors
def results(
    batch: BatchArgument,
    output: OutputOption = None,
    *,
    url: ServerOption = DEFAULT_SERVER,
    api_key: ApiKeyOption = None,
    wait: Annotated[bool, typer.Option("--wait", help="Stay until it has ended.")] = False,
    json: JsonOption = False,
) -> None:
    """Fetch the results of a batch that has ended: answers in the order of the input, then errors.

    With --json the state of the batch is printed, and -o must say where the results go.
    """
    from octavo.cluster.client import Client
    from octavo.protos.errors import ConfigError

    if json and output is None:
        raise ConfigError("with --json, say by -o where the results go", param="output")
    with Client(url, api_key) as client:
        if wait:
            client.batches.wait(batch, on_change=lambda now: _say(_line(now)))
        files = client.batches.result_files(batch)
        if output is not None:
            client.files.download(files, output)
        else:
            _print_files(client, files)
        found = client.batches.retrieve(batch)
    if json:
        print_json(found.fields)
    else:
        _say(_line(found))
    _exit(found)


@app.command()
@reports_errors
def cancel(
    batch: BatchArgument,
    *,
    url: ServerOption = DEFAULT_SERVER,
    api_key: ApiKeyOption = None,
    json: JsonOption = False,
) -> None:
    """End a batch; what is answered stays answered."""
    from octavo.cluster.client import Client

    with Client(url, api_key) as client:
        found = client.batches.cancel(batch)
    if json:
        print_json(found.fields)
    else:
        print(_line(found))


def _line(batch: Batch) -> str:
    answered = f"{batch.completed} of {batch.total} succeeded, {batch.failed} failed" if batch.total else ""
    return f"{batch.id}  {batch.status:<11}  {answered}".rstrip()


def _print_files(client: Client, files: Sequence[str]) -> None:
    for file_id in files:
        sys.stdout.buffer.write(client.files.content(file_id))
    sys.stdout.buffer.flush()


def _exit(batch: Batch) -> None:
    if batch.ended and (batch.status != "completed" or batch.failed):
        for problem in batch.problems:
            _say(f"octavo: {problem}")
        raise typer.Exit(EXIT_FAILED)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
