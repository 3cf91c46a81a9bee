"""`octavo chat`: talk to a server from the terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Annotated

import typer

from octavo.cluster.cli.console import (
    DEFAULT_SERVER,
    ApiKeyOption,
    JsonOption,
    ServerOption,
    print_json,
    reports_errors,
)

MAX_TURN_CHARS = 1_000_000
"""Of one line typed or piped in; the server has its own, smaller limit in tokens."""


@reports_errors
def chat(
    *,
    url: ServerOption = DEFAULT_SERVER,
    model: Annotated[str | None, typer.Option(help="A model the server knows. Default: its first.")] = None,
    api_key: ApiKeyOption = None,
    system: Annotated[str | None, typer.Option(help="A first message that sets the tone.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens of one answer.")] = None,
    temperature: Annotated[float, typer.Option(help="0: always the likeliest token.")] = 0.7,
    seed: Annotated[int | None, typer.Option(help="Repeat the same choices.")] = None,
    json: JsonOption = False,
) -> None:
    """Chat; answers appear as they are written.

    /reset forgets the conversation, /exit or Ctrl-D ends it, Ctrl-C cuts an answer short. Lines on standard
    input are taken as turns; with --json each answer is one JSON line.
    """
    from octavo.cluster.client import Client
    from octavo.protos import errors
    from octavo.protos.types import SamplingParams

    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    opening = [] if system is None else [{"role": "system", "content": system}]
    messages = list(opening)
    # A person at a prompt would rather see "busy" than wait through many retries.
    with Client(url, api_key, model, max_retries=2) as client:
        if not json:
            _say(f"{model or client.models()[0].id} at {client.base_url}; /reset, /exit")
        for turn in _turns(silent=json):
            if turn == "/exit":
                break
            if turn == "/reset":
                messages = list(opening)
                _say("(forgotten)")
                continue
            messages.append({"role": "user", "content": turn})
            try:
                answer = _answer(client.stream(messages, params), show=not json)
            except errors.InvalidRequestError as error:
                # A conversation grown too long must not lose the session.
                messages.pop()
                _say(f"octavo: {error.message}")
                continue
            messages.append({"role": "assistant", "content": answer})
            if json:
                print_json(messages[-1])


def _answer(pieces: Iterator[str], *, show: bool) -> str:
    """The whole answer, shown as it comes. Ctrl-C ends it early and keeps what was said."""
    said: list[str] = []
    try:
        for piece in pieces:
            said.append(piece)
            if show:
                print(piece, end="", flush=True)
    except KeyboardInterrupt:
        _say(" (cut)")
    finally:
        close = getattr(pieces, "close", None)
        if close is not None:
            close()
    if show:
        print(flush=True)
    return "".join(said)


def _turns(*, silent: bool) -> Iterator[str]:
    interactive = sys.stdin.isatty() and not silent
    while True:
        if interactive:
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline(MAX_TURN_CHARS)
        if not line:
            return
        if line.strip():
            yield line.strip()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
