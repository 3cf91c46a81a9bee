"""What a call says its output must match, in all the ways that clients have of saying it.

Owns the fields and what each means. Whether a schema or grammar can be followed is asked of the workers, before
anything runs (`Backend.compile_grammar`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from octavo.cluster.openai.body import Body
from octavo.cluster.openai.errors import UnsupportedParameterError
from octavo.protos.errors import InvalidRequestError
from octavo.protos.structured_output import PARAM, StructuredOutput


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the output must match, and the field that said so."""

    output: StructuredOutput
    param: str


def wanted_output(body: Body) -> Wanted | None:
    """Of a chat or text completion: `response_format`, vLLM's `guided_*` and `structured_outputs`.

    Raises `InvalidRequestError` naming the field, also for two at once.
    """
    found = [
        *_response_format(body.object("response_format"), "response_format"),
        *_kinds(body, "guided_"),
    ]
    options = body.object("structured_outputs")
    if options is not None:
        for name in ("structural_tag", "whitespace_pattern"):
            if options.any(name) is not None:
                raise UnsupportedParameterError(f"structured_outputs.{name}")
        for name in ("disable_fallback", "disable_any_whitespace", "disable_additional_properties"):
            options.flag(name)  # how vLLM goes about it; here it is so anyhow
        found += _kinds(options, "", "structured_outputs.")
        if options.flag("json_object"):
            found.append(Wanted(StructuredOutput.json_object(), "structured_outputs.json_object"))
    if len(found) > 1:
        raise InvalidRequestError(
            f"{found[1].param} cannot be combined with {found[0].param}: one output matches one thing",
            param=found[1].param,
        )
    return found[0] if found else None


def wanted_text(text: Body) -> Wanted | None:
    """Of a response: `text.format`. Raises as `wanted_output`."""
    form = text.object("format")
    if form is not None and form.any("type") == "json_schema":
        # The schema stands beside the type here, not in an object of its own.
        form.text("name"), form.text("description"), form.flag("strict")
        return _made("text.format.schema", StructuredOutput.json_schema, form.any("schema"))
    return next(iter(_response_format(form, "text.format")), None)


def _response_format(form: Body | None, where: str) -> list[Wanted]:
    if form is None:
        return []
    kind = form.any("type")
    if kind == "text":
        return []
    if kind == "json_object":
        return [Wanted(StructuredOutput.json_object(), where)]
    if kind != "json_schema":
        raise InvalidRequestError(
            f"{where}.type must be text, json_object or json_schema, got {kind!r:.80}", param=f"{where}.type"
        )
    given = form.object("json_schema")
    if given is None:
        raise InvalidRequestError(f"{where}.json_schema is missing", param=f"{where}.json_schema")
    given.text("name"), given.text("description"), given.flag("strict")
    return [_made(f"{where}.json_schema.schema", StructuredOutput.json_schema, given.any("schema"))]


def _kinds(body: Body, prefix: str, where: str = "") -> list[Wanted]:
    makers: dict[str, Callable[[Any], StructuredOutput]] = {
        "json": StructuredOutput.json_schema,
        "regex": StructuredOutput.regex,
        "choice": StructuredOutput.choice,
        "grammar": StructuredOutput.grammar,
    }
    return [
        _made(f"{where}{prefix}{kind}", make, value)
        for kind, make in makers.items()
        if (value := body.any(f"{prefix}{kind}")) is not None
    ]


def _made(param: str, make: Callable[[Any], StructuredOutput], value: Any) -> Wanted:
    if value is None:
        raise InvalidRequestError(f"{param} is missing", param=param)
    try:
        return Wanted(make(value), param)
    except InvalidRequestError as error:
        raise named(error, param) from None


def named(error: InvalidRequestError, param: str) -> InvalidRequestError:
    """`error`, in the name of the field that the caller used."""
    if error.param != PARAM:
        return error
    return InvalidRequestError(f"{param}: {error.message}", param=param)
