"""What the client needs of httpx beside sending: its errors as ours, replies read whole, events one by one.

Owns every mention of httpx's exceptions. Knows nothing of retries or of what is in a reply.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx

from octavo.cluster import client_protocol as protocol
from octavo.protos import errors

T = TypeVar("T")
# Tries that fail this way would fail again: the caller's time is up, or the request itself cannot be sent.
FINAL_TRANSPORT_ERRORS = (
    httpx.ReadTimeout,
    httpx.WriteTimeout,
    httpx.UnsupportedProtocol,
    httpx.LocalProtocolError,
)


@dataclass(frozen=True, slots=True)
class Reply:
    """An HTTP answer of any status, read whole."""

    status: int
    body: Any
    """Decoded JSON, or the text when it is not JSON."""
    request_id: str
    """The server's `x-request-id`, or "" without one."""
    retry_after_seconds: float | None = None

    def raise_for_status(self) -> None:
        """Raise the error of `errors.py` that a status of 400 or more means."""
        if self.status >= 400:
            raise protocol.error_from_body(
                self.status, self.body, retry_after_seconds=self.retry_after_seconds
            )


def checked_base_url(base_url: str) -> str:
    try:
        url = httpx.URL(base_url)
    except (httpx.InvalidURL, TypeError) as problem:
        raise errors.ConfigError(f"base_url is not a URL: {base_url!r}", param="base_url") from problem
    if url.scheme not in ("http", "https") or not url.host:
        raise errors.ConfigError(
            f"base_url must start with http:// or https://, got {base_url!r}", param="base_url"
        )
    return str(url).rstrip("/").removesuffix("/v1")


async def mapped(awaitable: Awaitable[T], base_url: str) -> T:
    """Await something of httpx; its errors come out as ours, with httpx's as the cause."""
    try:
        return await awaitable
    except httpx.HTTPError as problem:
        raise _error_of(problem, base_url) from problem


def _error_of(problem: httpx.HTTPError, base_url: str) -> errors.OctavoError:
    reason = str(problem) or type(problem).__name__
    if isinstance(problem, (httpx.ConnectError, httpx.ConnectTimeout)):
        return errors.UnavailableError(f"no server at {base_url} ({reason})", code="unreachable")
    if isinstance(problem, httpx.TimeoutException):
        return errors.UnavailableError(f"{base_url} did not answer in time ({reason})", code="timeout")
    if isinstance(problem, httpx.TransportError):
        return errors.UnavailableError(
            f"the connection to {base_url} broke ({reason})", code="connection_lost"
        )
    return errors.RequestFailedError(f"no usable answer from {base_url} ({reason})")


async def events_of(response: httpx.Response, base_url: str) -> AsyncIterator[bytes]:
    decoder = protocol.EventDecoder()
    chunks = response.aiter_bytes()
    while (chunk := await mapped(anext(chunks, None), base_url)) is not None:
        for event in decoder.feed(chunk):
            yield event


def retry_after_of(response: httpx.Response) -> float | None:
    return protocol.parse_retry_after(response.headers.get("retry-after"), now=time.time())


def reply_of(response: httpx.Response) -> Reply:
    return Reply(
        status=response.status_code,
        body=protocol.parse_body(response.content),
        request_id=response.headers.get("x-request-id", ""),
        retry_after_seconds=retry_after_of(response),
    )
