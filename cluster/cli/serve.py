"""`octavo serve`: the whole system on this machine, or on a Ray cluster that is already there."""

from __future__ import annotations

import inspect
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from octavo.cluster.cli.console import EXIT_FAILED, Command, JsonOption, print_json, reports_errors
from octavo.cluster.config_sources import CONFIG_VARIABLE, load_config, misspelt_variables
from octavo.cluster.service_config import ServiceConfig, group_of, names_of

if TYPE_CHECKING:
    from octavo.cluster.service import Service

HEALTH_INTERVAL_SECONDS = 2.0

ConfigOption = Annotated[
    Path | None,
    typer.Option(help=f"A YAML file of options; docs/configuration.md lists them. [env: {CONFIG_VARIABLE}]"),
]


def _parameters() -> list[inspect.Parameter]:
    """Of the command: the options of `ServiceConfig`, each None unless it is given, and two of its own."""
    found = []
    for name, field in ServiceConfig.model_fields.items():
        flag, variable = names_of(name, field)
        text = (field.description or "").replace("`", "")
        kind: Any = field.annotation
        if kind == tuple[str, ...]:
            kind = list[str]
            text += " May be repeated."
        elif type(None) in get_args(kind):
            kind = get_args(kind)[0]
        else:
            text += f" [default: {str(field.default).lower() if kind is bool else field.default}]"
        if name == "model":
            info: Any = typer.Argument(help=text, show_default=False)
        else:
            flags = f"{flag}/--no-{flag.removeprefix('--')}" if kind is bool else flag
            info = typer.Option(
                flags,
                help=f"{text} [env: {variable}]",
                show_default=False,
                rich_help_panel=group_of(field),
            )
        place = inspect.Parameter.POSITIONAL_OR_KEYWORD if name == "model" else inspect.Parameter.KEYWORD_ONLY
        found.append(inspect.Parameter(name, place, default=None, annotation=Annotated[kind | None, info]))
    for name, annotation, default in (("config", ConfigOption, None), ("json", JsonOption, False)):
        found.append(
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        )
    return found


def _with_options(command: Command) -> Command:
    """`command` with the signature that typer makes flags of."""
    parameters = _parameters()
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined] # typer asks for it
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


@_with_options
@reports_errors
def serve(*, config: Path | None = None, json: bool = False, **options: Any) -> None:
    """Serve a model over an OpenAI-compatible HTTP endpoint until interrupted.

    An option counts from the command line before the environment before the file (--config) before its default.
    With --json, one JSON line when ready ({"event": "ready", "url", "model"}) and one when stopped.
    """
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
    settings = load_config({name: value for name, value in given.items() if value is not None}, file=config)
    for line in misspelt_variables(os.environ):
        _say(f"octavo: {line}")
    from octavo.cluster.service import Service

    service = Service(settings)
    with _stop_signals() as stop:
        failed = True
        try:
            service.start(on_progress=_say)
            stop.started = True
            if json:
                print_json({"event": "ready", "url": service.url, "model": service.model_name})
            else:
                print(f"{service.model_name} is ready at {service.url}/v1 (Ctrl-C ends it)", flush=True)
            failed = not _wait(service, stop)
        finally:
            _say("stopping")
            service.stop(grace_seconds=0.0 if failed else settings.grace_seconds)
            if json:
                print_json({"event": "stopped", "failed": failed})
    if failed:
        raise typer.Exit(EXIT_FAILED)


def _wait(service: Service, stop: _Stop) -> bool:
    """Until somebody asks to stop (True), or the system is beyond repair (False)."""
    while not stop.asked.wait(HEALTH_INTERVAL_SECONDS):
        if not service.alive():
            _say("octavo: the system has stopped working and does not recover")
            return False
    return True


class _Stop:
    """What SIGTERM and SIGINT do: interrupt a start that is under way; once started, ask for a graceful end; the
    second time, interrupt that too.
    """

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.started = False

    def on_signal(self, number: int, frame: object) -> None:
        if not self.started or self.asked.is_set():
            raise KeyboardInterrupt
        self.asked.set()


@contextmanager
def _stop_signals() -> Iterator[_Stop]:
    stop = _Stop()
    before = {number: signal.signal(number, stop.on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
