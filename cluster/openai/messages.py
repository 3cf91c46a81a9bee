"""Chat messages as OpenAI's API has them, made into what a chat template can render: every content a string.

Owns roles, content parts and null. Knows nothing of templates or tokens. Templates of text models join strings, so
a list of parts or null that reached them would fail or be written out as Python.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from octavo.cluster.openai.errors import UnsupportedParameterError
from octavo.protos.errors import InvalidRequestError

ROLES = {
    "system": "system",
    "developer": "system",  # OpenAI's newer word for it, which templates do not know
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "function",
}
_TEXT_FIELD = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Part type to the field that has its text."""
_PASSED_ON = ("name", "tool_call_id", "reasoning_content")


def normalise_messages(messages: Any, messages_max: int, name: str = "messages") -> list[dict[str, Any]]:
    """Messages whose "role" is one of `ROLES`' values and whose "content" is a string.

    Text parts are joined in order with nothing between them; null content is "". Raises `InvalidRequestError`
    naming the place ("messages[1].content") for anything else, and for parts that a text model cannot take. `name` is
    the field's.
    """
    if not isinstance(messages, list):
        raise InvalidRequestError(f"{name} must be a list, got {messages!r:.80}", param=name)
    if not 1 <= len(messages) <= messages_max:
        raise InvalidRequestError(
            f"{name} must have 1 to {messages_max} entries, got {len(messages)}", param=name
        )
    return [_message(message, f"{name}[{index}]") for index, message in enumerate(messages)]


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise InvalidRequestError(f"{where} must be an object, got {message!r:.80}", param=where)
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise InvalidRequestError(
            f"{where}.role must be one of {', '.join(ROLES)}, got {role!r:.80}", param=f"{where}.role"
        )
    calls = message.get("tool_calls")
    if "content" not in message and not (role == "assistant" and (calls or message.get("function_call"))):
        raise InvalidRequestError(f"{where}.content is missing", param=f"{where}.content")
    clean: dict[str, Any] = {
        "role": ROLES[role],
        "content": _content(message.get("content"), f"{where}.content"),
    }
    for name in _PASSED_ON:
        if (value := message.get(name)) is not None:
            if not isinstance(value, str):
                raise InvalidRequestError(f"{where}.{name} must be a string", param=f"{where}.{name}")
            clean[name] = value
    if calls:
        clean["tool_calls"] = _tool_calls(calls, f"{where}.tool_calls")
    return clean


def _content(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequestError(
            f"{where} must be a string or a list of parts, got {content!r:.80}", param=where
        )
    return "".join([_part(part, f"{where}[{index}]") for index, part in enumerate(content)])


def _part(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        raise InvalidRequestError(f'{where} must be an object with a "type", got {part!r:.80}', param=where)
    if kind not in _TEXT_FIELD:
        raise UnsupportedParameterError(where, f"is of type {kind!r:.80}, and this model takes text only")
    text = part.get(_TEXT_FIELD[kind])
    if not isinstance(text, str):
        raise InvalidRequestError(
            f"{where}.{_TEXT_FIELD[kind]} must be a string, got {text!r:.80}", param=where
        )
    return text


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Earlier calls of a conversation. Templates want the arguments as an object; the API has them as JSON text."""
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise InvalidRequestError(f"{where} must be a list of objects", param=where)
    clean = []
    for call in calls:
        function = call.get("function")
        if isinstance(function, Mapping) and isinstance(function.get("arguments"), str):
            try:
                # Not orjson, which makes a float of an integer beyond 64 bits.
                arguments = json.loads(function["arguments"] or "{}")
            except (ValueError, RecursionError):
                arguments = function["arguments"]  # a model wrote it; it may be broken, and is shown as it is
            call = {**call, "function": {**function, "arguments": arguments}}
        clean.append(dict(call))
    return clean
