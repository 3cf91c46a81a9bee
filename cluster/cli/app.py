"""Puts the commands together. Starting must be quick: no command's own imports happen before it runs."""

from __future__ import annotations

import platform
from importlib import metadata
from typing import Annotated

import typer

from octavo._version import __version__
from octavo.cluster.cli import batch_jobs
from octavo.cluster.cli.bench import bench
from octavo.cluster.cli.chat import chat
from octavo.cluster.cli.console import JsonOption, print_json
from octavo.cluster.cli.doctor import doctor
from octavo.cluster.cli.generate import generate
from octavo.cluster.cli.lab import lab
from octavo.cluster.cli.plan import plan
from octavo.cluster.cli.replay import replay
from octavo.cluster.cli.scale import scale
from octavo.cluster.cli.serve import serve
from octavo.cluster.cli.simulate import simulate
from octavo.cluster.cli.status import status

# What decides how a run behaves; named by `octavo version` so that a report can be acted on.
REPORTED_PACKAGES = ("torch", "transformers", "ray", "grpcio", "numba", "triton", "numpy")

app = typer.Typer(
    name="octavo",
    help="Serves large language models, from a laptop's CPU to a cluster of GPUs.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def version(*, json: JsonOption = False) -> None:
    """Print the versions of Octavo and of what it stands on."""
    versions: dict[str, str | None] = {"octavo": __version__, "python": platform.python_version()}
    versions.update({package: _installed_version(package) for package in REPORTED_PACKAGES})
    if json:
        print_json(versions)
    else:
        for package, found in versions.items():
            print(f"{package} {found or 'not installed'}")


def _installed_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"octavo {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


for command in (serve, status, scale, generate, chat, bench, doctor, simulate, replay, plan, lab, version):
    app.command()(command)
app.add_typer(batch_jobs.app, name="batch")


def run() -> None:
    """Run the command line of this process; does not return."""
    app(prog_name="octavo")
