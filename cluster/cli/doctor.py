"""`octavo doctor`: can this machine serve that model, and if not, what is to be done."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from octavo.cluster.cli.console import EXIT_USAGE, JsonOption, print_json, reports_errors

if TYPE_CHECKING:
    from octavo.cluster.doctor import Finding

_SIGNS = {"ok": "[green]ok[/]  ", "warn": "[yellow]warn[/]", "fail": "[red]fail[/]"}


@reports_errors
def doctor(
    model: Annotated[
        str | None, typer.Argument(help="Folder, hub id or .gguf file. Default: as configured.")
    ] = None,
    *,
    config: Annotated[
        Path | None, typer.Option(help="The YAML file that `octavo serve` will be given.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Check devices, memory, versions, ports, Ray and the model for what `octavo serve` would do, and say what to mend.

    Options come from --config and the environment, as for serve. Nothing is started or downloaded. Exit code 2: serving
    would fail.
    """
    from octavo.cluster.config_sources import load_config
    from octavo.cluster.doctor import as_json, examine

    settings = load_config({} if model is None else {"model": model}, file=config)
    findings = examine(settings)
    if json:
        print_json(as_json(findings))
    else:
        _print(findings)
    if any(one.failed for one in findings):
        raise typer.Exit(EXIT_USAGE)


def _print(findings: list[Finding]) -> None:
    from rich.console import Console
    from rich.markup import escape

    console = Console()
    for one in findings:
        console.print(f"{_SIGNS[one.status]}  {one.name:<9} {escape(one.text)}", soft_wrap=True)
        if one.remedy:
            console.print(f"      {'':<9} -> {escape(one.remedy)}", soft_wrap=True)
