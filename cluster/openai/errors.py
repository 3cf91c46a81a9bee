"""Errors as OpenAI's API words them: `{"error": {"message", "type", "param", "code"}}`.

Owns the one place where an exception becomes an HTTP reply. Knows nothing of routes. The statuses that only HTTP
has (body too large, wrong method, ...) are types here, below `InvalidRequestError`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

import orjson
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from octavo.protos.errors import (
    AuthenticationError,
    InvalidRequestError,
    NotFoundError,
    OctavoError,
    OverloadedError,
    RequestFailedError,
    UnavailableError,
)

logger = logging.getLogger(__name__)

JSON = "application/json"


class UnsupportedParameterError(InvalidRequestError):
    """The field is known to OpenAI's API or vLLM's, and not served here."""

    code = "unsupported_parameter"

    def __init__(self, name: str, why: str = "is not supported by this server") -> None:
        super().__init__(f"{name} {why}", param=name)


class MethodNotAllowedError(InvalidRequestError):
    http_status = 405
    code = "method_not_allowed"


class BodyTimeoutError(InvalidRequestError):
    http_status = 408
    code = "body_timeout"


class BodyTooLargeError(InvalidRequestError):
    http_status = 413
    code = "body_too_large"


class HeadersTooLargeError(InvalidRequestError):
    http_status = 431
    code = "headers_too_large"


def envelope(error: OctavoError) -> dict[str, Any]:
    """The JSON object that says `error`, for a reply's body or an event of a stream."""
    return {
        "error": {
            "message": error.message,
            "type": error.error_type,
            "param": error.param,
            "code": error.code,
        }
    }


def error_response(error: OctavoError, retry_after_seconds: float = 1.0) -> Response:
    """The reply that says `error`; `retry_after_seconds` where it is worth trying again and says no time."""
    headers: dict[str, str] = {}
    if isinstance(error, (OverloadedError, UnavailableError)):
        seconds = getattr(error, "retry_after_seconds", retry_after_seconds)
        headers["retry-after"] = str(max(1, math.ceil(seconds)))
    if isinstance(error, AuthenticationError):
        headers["www-authenticate"] = "Bearer"
    return Response(orjson.dumps(envelope(error)), error.http_status, headers, media_type=JSON)


def as_octavo_error(error: Exception) -> OctavoError:
    """`error` if it is ours; else it is logged with its trace and becomes a plain internal error."""
    if isinstance(error, OctavoError):
        return error
    logger.error("unexpected %s in a request", type(error).__name__, exc_info=error)
    return RequestFailedError("internal error; the server's log has the details", code="internal_error")


def _from_http_exception(error: HTTPException, method: str, path: str) -> OctavoError:
    if error.status_code == 404:
        return NotFoundError(f"unknown path {path:.200}", code="unknown_path")
    if error.status_code == 405:
        return MethodNotAllowedError(f"{method} is not allowed on {path:.200}")
    wrapped = (InvalidRequestError if error.status_code < 500 else RequestFailedError)(str(error.detail))
    wrapped.http_status = error.status_code
    return wrapped


def install(app: FastAPI, retry_after_seconds: float) -> None:
    """Make every error of `app`'s routes, unknown paths and wrong methods included, an envelope."""

    async def on_octavo_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, OctavoError)
        return error_response(error, retry_after_seconds)

    async def on_http_exception(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        response = error_response(
            _from_http_exception(error, request.method, request.url.path), retry_after_seconds
        )
        _copy_headers(error.headers, response)
        return response

    async def on_validation_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        param = ".".join(str(part) for part in first["loc"][1:]) or None
        return error_response(InvalidRequestError(first["msg"], param=param), retry_after_seconds)

    app.add_exception_handler(OctavoError, on_octavo_error)
    app.add_exception_handler(HTTPException, on_http_exception)
    app.add_exception_handler(RequestValidationError, on_validation_error)


def _copy_headers(headers: Mapping[str, str] | None, response: Response) -> None:
    for name, value in (headers or {}).items():
        response.headers[name] = value
