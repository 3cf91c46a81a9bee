"""Chat messages to prompt text, rendered the way Hugging Face's `apply_chat_template` renders them.

Owns the sandbox in which a model's Jinja template runs. Knows nothing of tokens or HTTP. A template comes with
the model and is not trusted: it sees plain JSON values only, in Jinja's immutable sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from octavo.protos.errors import InvalidRequestError, ModelLoadError

RESERVED_NAMES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
"""Template variables that a caller's own keyword arguments may not replace."""


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks assistant text for training; here it renders its body."""

    tags = {"generation"}  # noqa: RUF012 - the name and type that jinja2.ext.Extension declares

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML characters, which a prompt must not have.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class ChatTemplate:
    """One compiled template. Rendering is thread-safe and, but for `strftime_now`, a pure function."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        *,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """`special_tokens` ("bos_token": "<s>", ...) are visible to the template.

        Raises `ModelLoadError` when the template does not compile.
        """
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda format: now().strftime(format)
        self.source = source
        self._special_tokens = dict(special_tokens)
        self.source = source
        try:
            self._template = environment.from_string(source)
            self.knows_tools = "tools" in jinja2.meta.find_undeclared_variables(environment.parse(source))
            """Whether it shows tools to the model."""
        except jinja2.TemplateSyntaxError as error:
            raise ModelLoadError(f"the model's chat template does not compile: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The prompt text of `messages`, whose contents are strings; `tools` as OpenAI's API has them.

        Raises `InvalidRequestError` (param "messages") when the template refuses or cannot render them.
        """
        variables = {**self._special_tokens, **(kwargs or {})}
        try:
            return self._template.render(
                **{name: value for name, value in variables.items() if name not in RESERVED_NAMES},
                messages=[dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] if tools else None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
            )
        except jinja2.TemplateError as error:
            raise InvalidRequestError(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from error
        except (TypeError, ValueError, KeyError, ArithmeticError, AttributeError) as error:
            raise InvalidRequestError(
                f"the model's chat template cannot render these messages: {error}", param="messages"
            ) from error
