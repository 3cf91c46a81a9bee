"""Requests that were accepted and are on no worker, and how long each may stay so.

Owns the clocks of their waits: one ends with an error when no worker has come back in time, or when its own deadline
has passed and nobody waits for its answer. Knows nothing of workers: `coordinator_core.py` takes out who gets one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from octavo.cluster.open_requests import OpenRequest
from octavo.protos.errors import DeadlineExceededError, OctavoError, UnavailableError


class WaitingRoom:
    """Bounded as all unfinished requests are."""

    def __init__(
        self,
        wait_seconds: float,
        clock: Callable[[], float],
        on_expiry: Callable[[OpenRequest, OctavoError], None],
    ) -> None:
        self._wait_seconds = wait_seconds
        self._clock = clock
        self._on_expiry = on_expiry
        self._expiries: dict[OpenRequest, asyncio.TimerHandle] = {}

    def enter(self, entry: OpenRequest) -> None:
        """Until it is taken out, or its time is up."""
        error: OctavoError = UnavailableError(f"no worker came back within {self._wait_seconds:g} s")
        seconds, deadline = self._wait_seconds, entry.so_far.deadline
        if deadline is not None and deadline - self._clock() < seconds:
            seconds = max(0.0, deadline - self._clock())
            error = DeadlineExceededError(
                f"the request did not finish within its timeout of {entry.request.timeout_seconds:.3g} s "
                f"(no worker was there, {entry.so_far.num_outputs} tokens made)"
            )
        self._expiries[entry] = asyncio.get_running_loop().call_later(seconds, self._expire, entry, error)

    def take_all(self) -> list[OpenRequest]:
        """In the order in which they came. Some may have ended meanwhile."""
        entries = list(self._expiries)
        self.close()
        return entries

    def close(self) -> None:
        """Let everybody go, without a word."""
        for expiry in self._expiries.values():
            expiry.cancel()
        self._expiries.clear()

    def _expire(self, entry: OpenRequest, error: OctavoError) -> None:
        del self._expiries[entry]
        self._on_expiry(entry, error)
