"""Which workers have made ready what an output must match.

Owns who is asked to compile what. A request goes to a worker that has its grammar: otherwise a step of that worker
would wait for it, and with the step everybody who runs there. New requests come after the front door has had every
worker compile; those that go on after a loss may meet workers that joined since.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Mapping

from octavo.cluster.worker_link import WorkerLink
from octavo.cluster.worker_slot import WorkerSlot
from octavo.protos.errors import InvalidRequestError, OctavoError, UnavailableError
from octavo.protos.structured_output import StructuredOutput


class GrammarRoom:
    """Of one coordinator, on its loop."""

    def __init__(self, slots: Mapping[str, WorkerSlot], on_ready: Callable[[], None]) -> None:
        """`on_ready`: some worker has what it was asked for in `having`."""
        self._slots = slots
        self._on_ready = on_ready
        self._preparing: dict[StructuredOutput, asyncio.Task[None]] = {}
        """Bounded as unfinished requests are."""

    async def compile(self, wanted: StructuredOutput) -> None:
        """Make `wanted` ready on every worker that serves: whichever gets the request, or takes it over, has it.

        Raises `InvalidRequestError` saying what is wrong with it, and the error of a worker when none could.
        """
        links = self._links()
        told = await asyncio.gather(*(link.compile_grammar(wanted) for link in links), return_exceptions=True)
        errors = [error for error in told if isinstance(error, OctavoError)]
        for error in errors:
            if isinstance(error, InvalidRequestError):
                raise error
        if len(errors) == len(told):
            raise next(iter(errors), UnavailableError("no worker is ready; try again in a few seconds"))

    def having(self, wanted: StructuredOutput, worker_ids: Iterable[str]) -> list[str]:
        """Those of `worker_ids`, which serve, that have `wanted`. Whoever has not is asked, and `on_ready` follows."""
        links = {worker_id: self._slots[worker_id].link for worker_id in worker_ids}
        ready = [name for name, link in links.items() if link is not None and link.has_grammar(wanted)]
        if len(ready) < len(links) and wanted not in self._preparing:
            self._preparing[wanted] = asyncio.create_task(self._prepare(wanted))
        return ready

    async def _prepare(self, wanted: StructuredOutput) -> None:
        async def one(link: WorkerLink) -> None:
            # One that cannot counts as ready: what is wrong is the request's to say, once it runs there.
            with contextlib.suppress(OctavoError):
                await link.compile_grammar(wanted)
            self._on_ready()

        try:
            await asyncio.gather(*(one(link) for link in self._links() if not link.has_grammar(wanted)))
        finally:
            del self._preparing[wanted]

    def _links(self) -> list[WorkerLink]:
        return [slot.link for slot in self._slots.values() if slot.link is not None and slot.serving]

    async def close(self) -> None:
        tasks = list(self._preparing.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
