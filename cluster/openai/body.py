"""The body of a request: read within limits, parsed strictly, its fields taken one by one.

Owns what is JSON here and what a wrong type is told. Knows nothing of what the fields mean. `null` counts as left
out, everywhere.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Collection, Mapping
from typing import Any

import orjson
from starlette.requests import Request

from octavo.cluster.openai.config import HttpConfig
from octavo.cluster.openai.errors import BodyTimeoutError, BodyTooLargeError, UnsupportedParameterError
from octavo.protos.errors import InvalidRequestError

_JSON_TYPE = re.compile(r"application/(?:[\w.+-]+\+)?json\s*(?:;.*)?", re.IGNORECASE)
_SAFE_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,64}")
IGNORED_NAMES_MAX = 20


async def read_json(request: Request, config: HttpConfig) -> Body:
    """The request's body as an object.

    Raises `InvalidRequestError` for another content type, JSON that is none (NaN, Infinity and numbers beyond
    float64 included) or no object; `BodyTooLargeError`; `BodyTimeoutError`; Starlette's `ClientDisconnect`.
    """
    content_type = request.headers.get("content-type")
    if content_type is not None and not _JSON_TYPE.fullmatch(content_type.strip()):
        raise InvalidRequestError(
            f"the content type must be application/json, got {content_type:.100}",
            code="unsupported_media_type",
        )
    try:
        async with asyncio.timeout(config.body_seconds_max):
            raw = await _read(request, config.body_bytes_max)
    except TimeoutError:
        raise BodyTimeoutError(f"the body did not come within {config.body_seconds_max:g} s") from None
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise InvalidRequestError("the body must be a JSON object", code="invalid_json")
    return Body(value)


async def _read(request: Request, bytes_max: int) -> bytes:
    too_large = BodyTooLargeError(f"the body is larger than the limit of {bytes_max} bytes")
    length = request.headers.get("content-length", "")
    if length.isascii() and length.isdigit() and int(length) > bytes_max:
        raise too_large
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > bytes_max:
            raise too_large
        parts.append(part)
    return b"".join(parts)


class Body:
    """The fields of a JSON object, taken by name with a type; what nobody took is left to report.

    All methods raise `InvalidRequestError` with `param` for a value of the wrong type. Types are strict: "16" and
    true are no integers, and 1 is no flag.
    """

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields = {name: value for name, value in fields.items() if value is not None}
        self._known: set[str] = set()
        self._objects: dict[str, Body] = {}
        """Fields that are objects, taken as such."""

    def __contains__(self, name: str) -> bool:
        """Whether `name` was given, and not as null."""
        return name in self._fields

    def any(self, name: str) -> Any:
        """The value as it is, or None."""
        self._known.add(name)
        return self._fields.get(name)

    def text(self, name: str, default: str | None = None, chars_max: int = 1024) -> str | None:
        value = self.any(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise InvalidRequestError(f"{name} must be a string, got {value!r:.80}", param=name)
        if len(value) > chars_max:
            raise InvalidRequestError(
                f"{name} must have at most {chars_max} characters, got {len(value)}", param=name
            )
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.any(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise InvalidRequestError(f"{name} must be true or false, got {value!r:.80}", param=name)
        return value

    def integer(self, name: str, default: int, low: int, high: int) -> int:
        value = self.any(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise InvalidRequestError(f"{name} must be an integer, got {value!r:.80}", param=name)
        if not low <= value <= high:
            raise InvalidRequestError(f"{name} must be in [{low}, {high}], got {value}", param=name)
        return value

    def seconds(self, name: str, high: float) -> float | None:
        value = self.any(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= high:
            raise InvalidRequestError(
                f"{name} must be a number of seconds in (0, {high:g}], got {value!r:.80}", param=name
            )
        return float(value)

    def object(self, name: str) -> Body | None:
        value = self.any(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise InvalidRequestError(f"{name} must be an object, got {value!r:.80}", param=name)
        taken = self._objects[name] = Body(value)
        return taken

    def refuse(self, unsupported: Mapping[str, Collection[Any]]) -> None:
        """Raise `UnsupportedParameterError` for a given field of `unsupported`, whose values are those that ask
        for nothing."""
        for name, harmless in unsupported.items():
            value = self.any(name)
            # `in` alone would take 0 for false.
            if value is not None and not any(type(value) is type(one) and value == one for one in harmless):
                raise UnsupportedParameterError(name)

    def unknown(self) -> list[str]:
        """Names of fields that nobody asked for, fit for a header: at most `IGNORED_NAMES_MAX`, odd ones as "?".
        Those of an object within are "outer.inner"."""
        names = sorted(self._fields.keys() - self._known)
        told = [name if _SAFE_NAME.fullmatch(name) else "?" for name in names[:IGNORED_NAMES_MAX]]
        for outer, taken in self._objects.items():
            told += [f"{outer}.{inner}" for inner in taken.unknown()]
        return told[:IGNORED_NAMES_MAX]
