"""What every HTTP exchange passes through, before and after its route.

Owns header limits, bearer keys, the count of calls at once, the echo of X-Request-Id, metrics of exchanges, and the
last catch of exceptions. Plain ASGI, because a wrapper that owned `receive` would hide a client that leaves.
"""

from __future__ import annotations

import hmac
import time
import uuid
from collections.abc import Iterable, MutableMapping
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.cluster.metrics.http import HttpMetrics
from octavo.cluster.openai.config import HttpConfig
from octavo.cluster.openai.errors import HeadersTooLargeError, as_octavo_error, error_response
from octavo.cluster.openai.sse import CLIENT_GONE, SCOPE_KEY
from octavo.protos.errors import AuthenticationError, OverloadedError

OPEN_PATHS = frozenset({"/health", "/ready", "/metrics", "/ui", "/ui/live.js", "/ui/live.css"})
"""Reached without a key and never refused for load. The page itself tells nothing: its data needs the key."""
GENERATING_PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/fork"})
UNKNOWN_ROUTE = "unknown"
"""Metrics label of paths that lead nowhere: a client must not be able to make new labels."""
UNKNOWN_METHOD = "OTHER"
METHODS = frozenset({"GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH"})


TENANT_KEY = "octavo.tenant"
"""In the ASGI scope: who asks, where API keys are set."""


def tenant_of(scope: MutableMapping[str, Any]) -> str:
    """Who shares fairly with whom; all are one where no API keys are set."""
    return str(scope.get(TENANT_KEY, ""))


class FrontDoor:
    """ASGI middleware around the whole app."""

    def __init__(self, app: ASGIApp, config: HttpConfig, metrics: HttpMetrics) -> None:
        self._app = app
        self._config = config
        self._metrics = metrics
        self._keys = tuple(key.encode() for key in config.api_keys)
        self._num_generating = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()
        reply = _Reply(send, self._request_id(scope))
        generating = scope["path"] in GENERATING_PATHS and scope["method"] == "POST"
        self._metrics.in_flight.inc()
        self._num_generating += generating
        try:
            self._admit(scope, generating)
            await self._app(scope, receive, reply.send)
        except ClientDisconnect:
            scope[SCOPE_KEY] = CLIENT_GONE  # before its body was whole; there is nobody to answer
        except Exception as error:
            ours = as_octavo_error(error)
            if reply.status is not None:
                raise  # the reply is cut; only closing the connection can tell the client so
            await error_response(ours, self._config.retry_after_seconds)(scope, receive, reply.send)
        finally:
            self._num_generating -= generating
            self._metrics.in_flight.dec()
            status = scope.get(SCOPE_KEY) or reply.status or CLIENT_GONE
            method = scope["method"] if scope["method"] in METHODS else UNKNOWN_METHOD
            self._metrics.on_request(method, _route(scope), status, time.perf_counter() - began)

    def _request_id(self, scope: Scope) -> bytes:
        """What to echo: the client's own, unless it is too long, else a new one. Never used as a key."""
        theirs = _header(scope["headers"], b"x-request-id")
        if theirs and len(theirs) <= self._config.request_id_bytes_max:
            return theirs
        return b"req-" + uuid.uuid4().hex.encode()

    def _admit(self, scope: Scope, generating: bool) -> None:
        """Raises the error that keeps this exchange out."""
        headers, config = scope["headers"], self._config
        if sum(len(name) + len(value) for name, value in headers) > config.header_bytes_max:
            raise HeadersTooLargeError(
                f"the headers are larger than the limit of {config.header_bytes_max} bytes"
            )
        theirs = _header(headers, b"x-request-id") or b""
        if len(theirs) > config.request_id_bytes_max:
            raise HeadersTooLargeError(
                f"X-Request-Id has {len(theirs)} bytes; the limit is {config.request_id_bytes_max}"
            )
        if self._keys and scope["path"] not in OPEN_PATHS:
            scope[TENANT_KEY] = self._check_key(headers)
        if generating and self._num_generating > config.requests_in_flight_max:
            raise OverloadedError(
                f"{config.requests_in_flight_max} requests are running here, which is the limit; try again later",
                retry_after_seconds=config.retry_after_seconds,
            )

    def _check_key(self, headers: Iterable[tuple[bytes, bytes]]) -> str:
        """The tenant whose key it is, by its place in the configuration: the key itself goes no further."""
        scheme, _, key = (_header(headers, b"authorization") or b"").partition(b" ")
        if scheme.lower() != b"bearer" or not key.strip():
            raise AuthenticationError("an API key is needed: send it as Authorization: Bearer KEY")
        # Every key is compared, in constant time, so that the answer's delay tells nothing.
        equal = [hmac.compare_digest(key.strip(), known) for known in self._keys]
        if not any(equal):
            raise AuthenticationError("the API key is not valid")
        return f"key-{equal.index(True)}"


class _Reply:
    """Notes a reply's status on its way out and adds the echoed id."""

    def __init__(self, send: Send, request_id: bytes) -> None:
        self._send = send
        self._request_id = request_id
        self.status: int | None = None

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message.get("headers", ()), (b"x-request-id", self._request_id)]
        await self._send(message)


def _header(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> bytes | None:
    return next((value for known, value in headers if known == name), None)


def _route(scope: Scope) -> str:
    """The route's pattern, which the router left in the scope."""
    return getattr(scope.get("route"), "path", UNKNOWN_ROUTE)
