"""The text of one streamed call of the client, piece by piece, and what is known of the call while it runs.

Owns the two kinds of iterator that `AsyncClient` and `Client` give out. Knows nothing of HTTP.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Generator, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class StreamFacts:
    """What the server has told of a call beside its text; filled in before the first piece."""

    request_id: str = ""
    """What the server knows the running request by, for `fork`; "" before the first piece, and where the server has
    no such thing."""
    forked_at: int | None = None
    """Of a fork: output tokens of the parent that it goes on from."""


class AsyncTextStream(AsyncIterator[str]):
    """Pieces of text as they are generated. Closing it, or dropping it, stops the request on the server."""

    def __init__(self, pieces: AsyncGenerator[str, None], facts: StreamFacts) -> None:
        self._pieces = pieces
        self.facts = facts

    @property
    def request_id(self) -> str:
        """See `StreamFacts`."""
        return self.facts.request_id

    @property
    def forked_at(self) -> int | None:
        """See `StreamFacts`."""
        return self.facts.forked_at

    async def __anext__(self) -> str:
        return await anext(self._pieces)

    async def aclose(self) -> None:
        """Close the connection. Does nothing at the end."""
        await self._pieces.aclose()


Runner = Callable[[Coroutine[Any, Any, Any]], Any]
"""Runs a coroutine to its end and gives its result."""


class TextStream(Iterator[str]):
    """`AsyncTextStream` for plain code."""

    def __init__(self, stream: AsyncTextStream, run: Runner) -> None:
        self._stream = stream
        # A generator, because leaving a `for` loop must close the connection at once.
        self._pieces = _pieces(stream, run)

    @property
    def request_id(self) -> str:
        """See `StreamFacts`."""
        return self._stream.request_id

    @property
    def forked_at(self) -> int | None:
        """See `StreamFacts`."""
        return self._stream.forked_at

    def __next__(self) -> str:
        return next(self._pieces)

    def close(self) -> None:
        """Close the connection, which stops the request on the server. Does nothing at the end."""
        self._pieces.close()


def _pieces(stream: AsyncTextStream, run: Runner) -> Generator[str, None, None]:
    async def step() -> str | None:
        return await anext(stream, None)

    try:
        while (piece := run(step())) is not None:
            yield piece
    finally:
        run(stream.aclose())
