"""Who may speak to the gRPC ports of a system: whoever knows its token.

Owns how the token travels and how it is checked. Each system draws its own at start and hands it to its processes with
their configuration, which goes through Ray; no one else on the machine or the network can plan for a worker, read what
it answers or submit requests past the front door. Health checks need none.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

METADATA_KEY = "authorization"
OPEN_METHODS = "/grpc.health.v1.Health/"
"""Prefix of what may be called without a token: it tells nothing but that the port serves."""

Metadata = tuple[tuple[str, str], ...]


def new_token() -> str:
    return secrets.token_urlsafe(32)


def call_metadata(token: str | None) -> Metadata:
    """What a call carries; nothing without a token."""
    return () if token is None else ((METADATA_KEY, f"Bearer {token}"),)


class _TokenCheck(grpc.aio.ServerInterceptor):  # type: ignore[misc] # grpc ships no types
    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}".encode()

        async def deny(_: Any, context: grpc.aio.ServicerContext) -> None:
            await context.abort(
                grpc.StatusCode.UNAUTHENTICATED, "the call does not carry this system's token"
            )

        self._denied = grpc.stream_stream_rpc_method_handler(deny)
        self._denied_unary = grpc.unary_unary_rpc_method_handler(deny)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(details)
        if handler is None or details.method.startswith(OPEN_METHODS) or self._knows(details):
            return handler
        return self._denied if handler.request_streaming else self._denied_unary

    def _knows(self, details: grpc.HandlerCallDetails) -> bool:
        """Compares in constant time, so that the answer's delay tells nothing."""
        given = [value for key, value in details.invocation_metadata if key == METADATA_KEY]
        return len(given) == 1 and hmac.compare_digest(str(given[0]).encode(), self._expected)


def interceptors(token: str | None) -> list[grpc.aio.ServerInterceptor]:
    """Of a server that takes only calls with `token`; None takes all."""
    return [] if token is None else [_TokenCheck(token)]
