"""`octavo lab`: small experiments that show why serving is built as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from octavo.cluster.cli.console import JsonOption, print_json, reports_errors


@reports_errors
def lab(
    name: Annotated[
        str,
        typer.Argument(
            help="fragmentation, batching, block-size, chunked, crossover, incident, thrash or branches."
        ),
    ],
    *,
    plot: Annotated[Path | None, typer.Option(help="Write the plot to this file (SVG).")] = None,
    json: JsonOption = False,
) -> None:
    """Run one experiment on the real scheduler and say what came out.

    The same figures every time: each lab states its parameters and seeds.
    """
    from octavo.cluster.simulator.labs import LABS
    from octavo.protos.errors import ConfigError

    if name not in LABS:
        raise ConfigError(f"lab must be one of {', '.join(LABS)}, got {name!r}", param="name")
    result = LABS[name]()
    if plot is not None:
        plot.write_text(result.svg, encoding="utf-8")
    if json:
        print_json(
            {"lab": name, "parameters": result.parameters, "figures": result.figures, "text": result.text}
        )
        return
    print(f"{result.title}\n\n{result.text}\n")
    for heading, values in (("Parameters", result.parameters), ("Figures", result.figures)):
        print(heading)
        for key, value in values.items():
            print(f"  {key}: {value:.4g}" if isinstance(value, float) else f"  {key}: {value}")
