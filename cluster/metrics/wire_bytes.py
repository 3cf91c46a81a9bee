"""Counts the bytes of a gRPC channel's messages where they are turned into bytes anyhow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class WireBytes:
    """Payload of messages, without HTTP/2's own frames, since the start."""

    def __init__(self) -> None:
        self._sent = 0
        self._received = 0

    def snapshot(self) -> dict[str, int]:
        """By direction, as the owner of the channel sees it."""
        return {"sent": self._sent, "received": self._received}

    def channel(self, channel: Any) -> Any:
        """What a generated stub takes in `channel`'s place: each call made of it counts here."""
        return _CountedChannel(self, channel)

    def serializer(self, serialize: Callable[[Any], bytes]) -> Callable[[Any], bytes]:
        def counted(message: Any) -> bytes:
            data = serialize(message)
            self._sent += len(data)
            return data

        return counted

    def deserializer(self, deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
        def counted(data: bytes) -> Any:
            self._received += len(data)
            return deserialize(data)

        return counted


class _CountedChannel:
    """The two methods of a channel that our stubs call."""

    def __init__(self, counts: WireBytes, channel: Any) -> None:
        self._counts = counts
        self._channel = channel

    def unary_unary(self, *args: Any, **options: Any) -> Any:
        return self._channel.unary_unary(*args, **self._counted(options))

    def stream_stream(self, *args: Any, **options: Any) -> Any:
        return self._channel.stream_stream(*args, **self._counted(options))

    def _counted(self, options: dict[str, Any]) -> dict[str, Any]:
        return {
            **options,
            "request_serializer": self._counts.serializer(options["request_serializer"]),
            "response_deserializer": self._counts.deserializer(options["response_deserializer"]),
        }
