"""Who may speak to the gRPC ports of a system: whoever knows its token and, where certificates are used, holds one.

Owns how the token travels, how it is checked, and how channels and ports are secured. Each system draws its own token
at start and hands it to its processes with their configuration, through Ray; no one else on the machine or the
network can plan for a worker, read what it answers or submit requests past the front door. Health checks need none.

With `TlsFiles` every connection is encrypted and both ends show a certificate of the system's own authority (mTLS).
Keys stay in files: what travels through Ray is where each node has them.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc

from octavo.protos import wire
from octavo.protos.errors import StartupError
from octavo.protos.interface import Interface
from octavo.protos.tls import TlsFiles

METADATA_KEY = "authorization"
OPEN_METHODS = "/grpc.health.v1.Health/"
"""Prefix of what may be called without a token: it tells nothing but that the port serves."""
TLS_NAME = "octavo"
"""DNS name that every certificate carries: who has one of the system's authority is a part of it, at whatever address.
Addresses of nodes come and go, and a certificate need not be made anew with them."""

Metadata = tuple[tuple[str, str], ...]


def new_token() -> str:
    return secrets.token_urlsafe(32)


@dataclass(frozen=True, slots=True)
class Access:
    """How the processes of one system call each other. None of either: everybody may call, in the clear."""

    token: str | None = field(default=None, repr=False)
    tls: TlsFiles | None = None

    def channel(self, address: str, keepalive_seconds: float = wire.KEEPALIVE_SECONDS) -> grpc.aio.Channel:
        """To a port of the system. Raises `StartupError` for certificate files that cannot be read."""
        options: list[tuple[str, Any]] = [*wire.client_options(keepalive_seconds)]
        if self.tls is None:
            return grpc.aio.insecure_channel(address, options=options)
        options.append(("grpc.ssl_target_name_override", TLS_NAME))
        cert, key, authority = _read(self.tls)
        credentials = grpc.ssl_channel_credentials(authority, key, cert)
        return grpc.aio.secure_channel(address, credentials, options=options)

    def server(self, keepalive_seconds: float = wire.KEEPALIVE_SECONDS) -> grpc.aio.Server:
        """One that takes only calls with the token; None takes all."""
        checks = [] if self.token is None else [_TokenCheck(self.token)]
        return grpc.aio.server(options=wire.server_options(keepalive_seconds), interceptors=checks)

    def listen(self, server: grpc.aio.Server, interface: Interface) -> str:
        """Open a free port; returns its address for others. Raises `StartupError` when that cannot be."""
        try:
            if self.tls is None:
                port = server.add_insecure_port(interface.any_port)
            else:
                cert, key, authority = _read(self.tls)
                credentials = grpc.ssl_server_credentials([(key, cert)], authority, require_client_auth=True)
                port = server.add_secure_port(interface.any_port, credentials)
        except RuntimeError as error:
            raise StartupError(f"cannot listen at {interface.bind}: {error}") from error
        return interface.address(port)

    @property
    def metadata(self) -> Metadata:
        """What a call carries; nothing without a token."""
        return () if self.token is None else ((METADATA_KEY, f"Bearer {self.token}"),)


OPEN = Access()
"""For tests, and for machines where nobody else can reach the ports."""


def _read(files: TlsFiles) -> tuple[bytes, bytes, bytes]:
    try:
        return files.read()
    except OSError as error:
        raise StartupError(
            f"the certificate file {error.filename} cannot be read: {error.strerror}"
        ) from None


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
