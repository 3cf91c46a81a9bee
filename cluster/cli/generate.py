"""`octavo generate`: complete prompts, in this process or on a server."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from octavo.cluster.cli.console import ApiKeyOption, JsonOption, UrlOption, print_json, reports_errors
from octavo.protos import errors


@reports_errors
def generate(
    prompts: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PROMPT]...", help="Default: standard input, as one prompt."),
    ] = None,
    *,
    file: Annotated[Path | None, typer.Option("-f", "--file", help="A file with one prompt a line.")] = None,
    model: Annotated[
        str | None, typer.Option(help="Folder, hub id or .gguf file; with --url a name the server knows.")
    ] = None,
    url: UrlOption = None,
    api_key: ApiKeyOption = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda (without --url).")] = "auto",
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate for a prompt.")] = 64,
    temperature: Annotated[float, typer.Option(help="0: always the likeliest token.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Choose among the likeliest tokens of this total.")] = 1.0,
    n: Annotated[int, typer.Option("-n", help="Answers for each prompt.")] = 1,
    seed: Annotated[int | None, typer.Option(help="Repeat the same choices.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be given again.")] = None,
    progress: Annotated[bool, typer.Option(help="Show a progress bar.")] = True,
    json: JsonOption = False,
) -> None:
    """Complete prompts and print what comes of them.

    Without --url the model runs in this process.
    """
    from octavo.protos.types import SamplingParams

    texts = _read_prompts(prompts or [], file)
    params = SamplingParams(
        n=n,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        stop=tuple(stop or ()),
    )
    show = progress and len(texts) > 1
    if url is not None:
        from octavo.cluster.client import Client

        with Client(url, api_key, model) as client:
            outputs = client.generate(texts, params, progress=show)
    else:
        from octavo.cluster.engine import Engine

        with Engine(model, device=device) as engine:
            outputs = engine.generate(texts, params, progress=show)
    if json:
        print_json({"outputs": [_as_dict(text, out) for text, out in zip(texts, outputs, strict=True)]})
    else:
        _print_texts(texts, outputs)


def _read_prompts(prompts: Sequence[str], file: Path | None) -> list[str]:
    if file is not None:
        if prompts:
            raise errors.ConfigError("give prompts or --file, not both", param="file")
        try:
            text = file.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as problem:
            raise errors.ConfigError(f"cannot read {file}: {problem}", param="file") from problem
        prompts = [line for line in text.split("\n") if line.strip()]
        if not prompts:
            raise errors.ConfigError(f"{file} holds no prompts", param="file")
    elif not prompts:
        if sys.stdin is None or sys.stdin.isatty():
            raise errors.ConfigError("give a prompt, --file, or text on standard input", param="prompts")
        prompts = [sys.stdin.read()]
    return list(prompts)


def _print_texts(texts: Sequence[str], outputs: Sequence[Any]) -> None:
    several = len(texts) > 1 or len(outputs[0].outputs) > 1
    for number, (text, out) in enumerate(zip(texts, outputs, strict=True), start=1):
        for branch in out.outputs:
            if several:
                print(f"--- {number}.{branch.index + 1} {text[:60]!r}")
            print(branch.text)


def _as_dict(text: str, out: Any) -> dict[str, Any]:
    branches = [{**asdict(branch), "token_ids": list(branch.token_ids)} for branch in out.outputs]
    return {
        "prompt": text,
        "prompt_token_ids": list(out.prompt_token_ids),
        "outputs": branches,
        "metrics": asdict(out.metrics),
    }
