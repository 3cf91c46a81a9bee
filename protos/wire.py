"""The numbers both ends of a gRPC connection must agree on, and the channel options made from them.

Owns sizes, keepalive, deadlines and depths. Knows no grpc: options are plain (key, value) pairs, so that
looking a limit up costs no import.
"""

from __future__ import annotations

ChannelOptions = list[tuple[str, int]]

PROTOCOL_VERSION = 3
"""Goes into every hello. Raised by changes that an older peer would misread."""

MAX_MESSAGE_BYTES = 256 * 2**20
"""Largest message, both ways, on both ends. gRPC's own limit of 4 MiB is below one step that admits a
hundred long prompts; this is above what 256 rows of 128k tokens weigh."""

KEEPALIVE_SECONDS = 10.0
"""A quiet connection is probed this often, so that a vanished peer is noticed without traffic."""
KEEPALIVE_TIMEOUT_SECONDS = 5.0
"""A probe unanswered for so long ends the connection."""

RPC_DEADLINE_SECONDS = 5.0
"""Every unary call. Streams have none: heartbeats bound the worker's, keepalive the ingress's."""
COMPILE_DEADLINE_SECONDS = 30.0
"""To make ready what outputs must match: seconds for the largest schemas, and others may be before it."""
CONNECT_DEADLINE_SECONDS = 30.0
"""From opening a stream to its hello. A worker that is taken over finishes the running step first."""

HEARTBEAT_SECONDS = 0.5
LEASE_SECONDS_GPU = 2.0
LEASE_SECONDS_CPU = 5.0
"""A worker that says nothing for so long is lost. On CPU workers the step's own threads fight for the cores
with the thread that sends heartbeats."""

PIPELINE_DEPTH = 2
"""Plans out at once: one running, one ready to follow without a gap."""
PLANS_IN_FLIGHT_MAX = 4
"""Plans a worker queues before it refuses the next as a broken peer."""


def lease_seconds(device: str) -> float:
    """How long a worker on `device` ("cpu", "cuda:0") may be silent."""
    return LEASE_SECONDS_CPU if device == "cpu" else LEASE_SECONDS_GPU


def _sizes() -> ChannelOptions:
    return [
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ]


def _keepalive(interval_seconds: float) -> ChannelOptions:
    return [
        ("grpc.keepalive_time_ms", int(interval_seconds * 1000)),
        ("grpc.keepalive_timeout_ms", int(KEEPALIVE_TIMEOUT_SECONDS * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        # Without this a sender that has nothing to say stops probing after two pings.
        ("grpc.http2.max_pings_without_data", 0),
    ]


def client_options(keepalive_seconds: float = KEEPALIVE_SECONDS) -> ChannelOptions:
    """Options of every channel inside the cluster."""
    return [
        *_sizes(),
        *_keepalive(keepalive_seconds),
        # Peers are named by node address; a proxy of the user's shell has no business between them.
        ("grpc.enable_http_proxy", 0),
    ]


def server_options(keepalive_seconds: float = KEEPALIVE_SECONDS) -> ChannelOptions:
    """Options of every server: it accepts what `client_options` of the same interval sends.

    The server counts pings that come faster than its minimum and ends the connection (`too_many_pings`) after
    a few; the minimum is 300 s unless `min_ping_interval_without_data_ms` says otherwise. That is core's name
    for it: unknown names are ignored without a word, hence a test by behaviour.
    """
    return [
        *_sizes(),
        *_keepalive(keepalive_seconds),
        ("grpc.http2.min_ping_interval_without_data_ms", int(keepalive_seconds * 1000 / 2)),
        # Two processes that share a port by accident would each get half of the calls.
        ("grpc.so_reuseport", 0),
    ]
