"""What every command shares: exit codes, one line for an error, and the two kinds of output.

Results go to standard output (`--json`: as JSON), everything for the eye alone goes to standard error.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import orjson
import typer

from octavo.protos import errors

EXIT_OK = 0
EXIT_FAILED = 1
"""The work was done and part of it failed; or an error of the server's."""
EXIT_USAGE = 2
"""An option, a file or a model is wrong; nothing was started."""
EXIT_UNAVAILABLE = 3
"""No server, or it takes no work now; the same command may succeed later."""
EXIT_INTERRUPTED = 130

Command = TypeVar("Command", bound=Callable[..., None])

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON on standard output, for programs.")]
URL_VARIABLE = "OCTAVO_URL"
ServerOption = Annotated[str, typer.Option(envvar=URL_VARIABLE, show_envvar=True, help="The running server.")]
DEFAULT_SERVER = "http://127.0.0.1:8000"
UrlOption = Annotated[str | None, typer.Option(help="A running server, such as http://127.0.0.1:8000.")]
ApiKeyOption = Annotated[
    str | None, typer.Option(envvar="OCTAVO_API_KEY", show_envvar=True, help="Key of the server.")
]


def exit_code(error: errors.OctavoError) -> int:
    """The exit code that tells a script what kind of error it was."""
    if isinstance(error, (errors.StartupError, errors.InvalidRequestError)):
        return EXIT_USAGE
    if isinstance(error, errors.UnavailableError):
        return EXIT_UNAVAILABLE
    return EXIT_FAILED


def reports_errors(command: Command) -> Command:
    """A command whose `OctavoError` becomes one line and an exit code. Its `json` argument adds the error as JSON.

    Any other exception is a bug of ours and keeps its traceback.
    """

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except errors.OctavoError as error:
            print_error(error, as_json=kwargs.get("json", False))
            raise typer.Exit(exit_code(error)) from None
        except KeyboardInterrupt:
            print("octavo: interrupted", file=sys.stderr)
            raise typer.Exit(EXIT_INTERRUPTED) from None

    return wrapped  # type: ignore[return-value] # functools.wraps keeps the signature


def print_error(error: errors.OctavoError, *, as_json: bool) -> None:
    """One line on standard error; with `as_json` also OpenAI's error object on standard output."""
    print(f"octavo: {error.message}", file=sys.stderr)
    if as_json:
        detail = {
            "message": error.message,
            "type": error.error_type,
            "param": error.param,
            "code": error.code,
        }
        print_json({"error": detail})


def print_json(value: Any) -> None:
    """One line of JSON on standard output, at once."""
    sys.stdout.buffer.write(
        orjson.dumps(value, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY)
    )
    sys.stdout.buffer.flush()
