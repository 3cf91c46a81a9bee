"""What an output must match: a JSON schema, any JSON object, a regular expression, a choice or a grammar.

Owns the five kinds and their one written form, which is the key of every cache of compiled grammars. Whether a text
means anything is its compiler's to say (`octavo.worker.grammars`); only its type and size are checked here.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.protos.errors import InvalidRequestError

MAX_TEXT_BYTES = 256 * 1024
MAX_CHOICES = 4096
MAX_NESTING = 64
"""Of a schema: compilers recurse."""
MAX_PROPERTIES = 512
"""Of one object of a schema: xgrammar takes time with the cube of those that may be left out, half a second for 512."""
PARAM = "structured_output"


class OutputKind(enum.StrEnum):
    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """Made by one of the class methods, which raise `InvalidRequestError` (param "structured_output")."""

    kind: OutputKind
    text: str
    """The schema as JSON, the pattern, the choices as a JSON list, or the grammar; "" for any JSON object."""

    def __post_init__(self) -> None:
        size = len(self.text.encode())
        if size > MAX_TEXT_BYTES:
            raise InvalidRequestError(
                f"a {self.kind.value} has at most {MAX_TEXT_BYTES} bytes, got {size}", param=PARAM
            )

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str) -> StructuredOutput:
        """An object of JSON Schema, or its text. Properties come in the order in which the schema has them."""
        try:
            value = json.loads(schema) if isinstance(schema, str) else schema
            text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRequestError(f"the JSON schema is not JSON: {error}", param=PARAM) from None
        if not isinstance(value, Mapping):
            raise InvalidRequestError(f"a JSON schema is an object, got {type(value).__name__}", param=PARAM)
        depth, widest = _measure(value)
        if depth > MAX_NESTING:
            raise InvalidRequestError(f"the JSON schema nests deeper than {MAX_NESTING}", param=PARAM)
        if widest > MAX_PROPERTIES:
            raise InvalidRequestError(
                f"an object of a JSON schema has at most {MAX_PROPERTIES} properties, got {widest}",
                param=PARAM,
            )
        return cls(OutputKind.JSON_SCHEMA, text)

    @classmethod
    def json_object(cls) -> StructuredOutput:
        """Any JSON object."""
        return cls(OutputKind.JSON_OBJECT, "")

    @classmethod
    def regex(cls, pattern: str) -> StructuredOutput:
        """The whole output matches `pattern`."""
        return cls(OutputKind.REGEX, _text("a regular expression", pattern))

    @classmethod
    def choice(cls, options: Sequence[str]) -> StructuredOutput:
        """One of `options`, as it is."""
        if isinstance(options, (str, bytes)) or not isinstance(options, Sequence):
            raise InvalidRequestError(f"choices are a list of strings, got {options!r:.80}", param=PARAM)
        if not 1 <= len(options) <= MAX_CHOICES:
            raise InvalidRequestError(f"choices are 1 to {MAX_CHOICES}, got {len(options)}", param=PARAM)
        return cls(
            OutputKind.CHOICE, json.dumps([_text("a choice", one) for one in options], ensure_ascii=False)
        )

    @classmethod
    def grammar(cls, text: str) -> StructuredOutput:
        """A context-free grammar in GBNF (`root ::= ...`)."""
        return cls(OutputKind.GRAMMAR, _text("a grammar", text))

    @property
    def value(self) -> Any:
        """What it was made of, as JSON has it: true for any JSON object."""
        if self.kind is OutputKind.JSON_OBJECT:
            return True
        return (
            json.loads(self.text) if self.kind in (OutputKind.JSON_SCHEMA, OutputKind.CHOICE) else self.text
        )


def _text(what: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidRequestError(f"{what} is a string that is not empty, got {value!r:.80}", param=PARAM)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidRequestError(f"{what} has a character that is none", param=PARAM) from None
    return value


def _measure(value: Any) -> tuple[int, int]:
    """Levels of objects and lists within each other, and entries of the largest object; without recursion."""
    depth, widest, level = 0, 0, [value]
    while level := [one for one in level if isinstance(one, (Mapping, list, tuple))]:
        depth += 1
        widest = max(widest, *(len(one) if isinstance(one, Mapping) else 0 for one in level), 0)
        level = [child for one in level for child in (one.values() if isinstance(one, Mapping) else one)]
    return depth, widest
