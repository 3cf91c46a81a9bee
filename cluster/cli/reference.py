"""Writes docs/cli.md from the commands themselves.

python -m octavo.cluster.cli.reference > docs/cli.md
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from typer.main import get_command

from octavo.cluster.cli.app import app

_HEAD = """# Command line

Every command and its flags. This page is made by `python -m octavo.cluster.cli.reference`; a test keeps it true.
`octavo --install-completion` sets up the shell; `--json` prints one JSON object for programs; a mistake ends with one
line that says what to change, and exit code 2; what failed ends with 1. Options of `octavo serve` are explained in
[configuration.md](configuration.md).
"""


def page() -> str:
    """The page, Markdown."""
    return "\n".join([_HEAD, *_commands(get_command(app), "octavo")]) + "\n"


def _commands(group: Any, prefix: str) -> Iterator[str]:
    for name, command in sorted(group.commands.items()):
        path = f"{prefix} {name}"
        if hasattr(command, "commands"):
            yield from _commands(command, path)
            continue
        yield f"## {path}\n"
        yield f"{_text(command.help)}\n"
        arguments = [one for one in command.params if one.param_type_name == "argument"]
        usage = " ".join(
            (one.name or "").upper() if one.required else f"[{(one.name or '').upper()}]" for one in arguments
        )
        yield f"`{path}{' [OPTIONS]' if len(arguments) < len(command.params) else ''}{' ' + usage if usage else ''}`\n"
        yield "| | default | |\n|---|---|---|"
        for one in command.params:
            yield _row(one)
        yield ""


def _row(one: Any) -> str:
    if one.param_type_name == "argument":
        names = f"`{(one.name or '').upper()}`"
    else:
        names = ", ".join(f"`{flag}`" for flag in (*one.opts, *one.secondary_opts))
    default = one.default
    shown = "" if default is None or callable(default) or default in ((), [], "") else f"`{default}`"
    if default is True or default is False:
        shown = "on" if default else "off"
    help_text = getattr(one, "help", None)
    return f"| {names} | {shown} | {_text(help_text)} |"


def _text(text: str | None) -> str:
    return " ".join((text or "").replace("\b", "").replace("|", "\\|").split())


if __name__ == "__main__":
    sys.stdout.write(page())
