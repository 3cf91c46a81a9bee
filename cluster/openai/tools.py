"""Tools of a chat: what a call may say of them, and what follows for prompt, sampling and parsing.

Owns `tools`, `tool_choice` and `parallel_tool_calls`. A call that must come (`required`, or a tool by name) is held to
the tools' schemas, whatever the model's template; one that may come is read from what the template has taught the
model to write (`tool_parsers.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from octavo.cluster.openai.body import Body
from octavo.cluster.openai.errors import UnsupportedParameterError
from octavo.cluster.openai.tool_parsers import (
    TOOL_PARSERS,
    ArrayParser,
    NamedParser,
    ToolParser,
    parser_of_template,
)
from octavo.cluster.tokenizer import Tokenizer
from octavo.protos.errors import InvalidRequestError
from octavo.protos.structured_output import StructuredOutput

TOOLS_MAX = 128
_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,64}")
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """Those that a call may use; without any, or with `tool_choice` "none", there is no such object."""

    definitions: tuple[Mapping[str, Any], ...]
    """As given, for the template."""
    must: bool
    """A call has to come."""
    name: str | None = None
    """Of the one tool that has to be called."""
    parallel: bool = True
    """There may be several calls."""

    @property
    def asks_strictness_in_vain(self) -> bool:
        """What a model writes of its own accord is not held to the tools' schemas."""
        return not self.must and any(tool["function"].get("strict") for tool in self.definitions)

    def structured_output(self) -> StructuredOutput | None:
        """What the output must match where a call has to come."""
        if not self.must:
            return None
        if self.name is not None:
            return StructuredOutput.json_schema(_parameters(self._named(self.name)))
        calls = [
            {
                "type": "object",
                "properties": {
                    "name": {"const": tool["function"]["name"]},
                    "arguments": _moved(_parameters(tool), f"#/items/anyOf/{index}/properties/arguments"),
                },
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for index, tool in enumerate(self.definitions)
        ]
        limit = {} if self.parallel else {"maxItems": 1}
        return StructuredOutput.json_schema(
            {"type": "array", "items": {"anyOf": calls}, "minItems": 1, **limit}
        )

    def _named(self, name: str) -> Mapping[str, Any]:
        return next(tool for tool in self.definitions if tool["function"]["name"] == name)

    def parser(self, tokenizer: Tokenizer, configured: str) -> Callable[[], ToolParser]:
        """Makes the parser of one choice. `configured`: see `HttpConfig.tool_call_parser`.

        Raises `UnsupportedParameterError` for a model that has not learnt to call tools.
        """
        name = self.name
        if name is not None:
            return lambda: NamedParser(name)
        if self.must:
            return ArrayParser
        template = tokenizer.chat_template
        if template is None or not template.knows_tools:
            raise UnsupportedParameterError(
                "tools", "are not supported by this model: its chat template shows it none"
            )
        found = parser_of_template(template.source) if configured == "auto" else configured
        if found is None:
            raise UnsupportedParameterError(
                "tools",
                "are written by this model in a form that is not known here; name it with --tool-call-parser "
                f"({', '.join(TOOL_PARSERS)}), or use tool_choice required or a tool's name",
            )
        return TOOL_PARSERS[found]


def tools_of(body: Body) -> Tools | None:
    """Raises `InvalidRequestError` naming the field."""
    given = body.any("tools")
    choice = body.any("tool_choice")
    parallel = body.flag("parallel_tool_calls", True)
    if given is not None and not isinstance(given, list):
        raise InvalidRequestError(f"tools must be a list, got {given!r:.80}", param="tools")
    if given and len(given) > TOOLS_MAX:
        raise InvalidRequestError(f"tools has at most {TOOLS_MAX} entries, got {len(given)}", param="tools")
    definitions = tuple(_definition(tool, f"tools[{index}]") for index, tool in enumerate(given or ()))
    names = [tool["function"]["name"] for tool in definitions]
    if len(set(names)) < len(names):
        raise InvalidRequestError("tools must have different names", param="tools")
    name = _chosen(choice, names)
    if choice == "none" or not definitions:
        return None
    return Tools(
        definitions=definitions,
        must=name is not None or choice == "required",
        name=name,
        parallel=parallel,
    )


def _chosen(choice: Any, names: list[str]) -> str | None:
    """The tool that `choice` names."""
    if choice in (None, "none", "auto"):
        return None
    if choice == "required":
        if not names:
            raise InvalidRequestError("tool_choice required needs tools", param="tool_choice")
        return None
    function = (
        choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    )
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise InvalidRequestError(
            'tool_choice must be "none", "auto", "required" or {"type": "function", "function": {"name": ...}}, got '
            f"{choice!r:.80}",
            param="tool_choice",
        )
    if name not in names:
        raise InvalidRequestError(
            f"tool_choice names {name!r:.80}, which is none of tools", param="tool_choice"
        )
    return name


def _definition(tool: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(tool, dict) or not isinstance(tool.get("type"), str):
        raise InvalidRequestError(f'{where} must be an object with a "type", got {tool!r:.80}', param=where)
    if tool["type"] != "function":
        raise UnsupportedParameterError(
            where, f"is of type {tool['type']!r:.80}, and only functions are supported"
        )
    function = tool.get("function")
    if not isinstance(function, dict):
        raise InvalidRequestError(f"{where}.function must be an object", param=f"{where}.function")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequestError(
            f"{where}.function.name must be 1 to 64 letters, digits, _, - or ., got {name!r:.80}",
            param=f"{where}.function.name",
        )
    if not isinstance(function.get("description", ""), (str, type(None))):
        raise InvalidRequestError(
            f"{where}.function.description must be a string", param=f"{where}.function.description"
        )
    if not isinstance(function.get("parameters"), (dict, type(None))):
        raise InvalidRequestError(
            f"{where}.function.parameters must be a JSON schema", param=f"{where}.function.parameters"
        )
    return tool


def _parameters(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    return tool["function"].get("parameters") or _NO_PARAMETERS


def _moved(schema: Any, root: str) -> Any:
    """A schema that now stands at `root`: what it refers to within itself has moved along."""
    if isinstance(schema, dict):
        return {
            key: root + value[1:]
            if key == "$ref" and isinstance(value, str) and value.startswith("#")
            else _moved(value, root)
            for key, value in schema.items()
        }
    return [_moved(value, root) for value in schema] if isinstance(schema, list) else schema
