"""Workers that go: because fewer are wanted, or because their node is about to be taken away.

Owns the way of a worker out of the system. It takes nothing new from the first moment and finishes what it runs until a
deadline; what is left then goes on elsewhere, as if the worker had been lost. One that is no longer wanted is
forgotten; one whose node goes has its process ended, and whoever watches it starts it anew on another node.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping

from octavo.cluster.open_requests import OpenRequests
from octavo.cluster.worker_slot import WorkerSlot
from octavo.protos.errors import ConfigError

logger = logging.getLogger(__name__)

_CHECK_SECONDS = 0.05


class Departures:
    """Works on the coordinator's own `slots`. `end_process` is told the id of a worker that should start elsewhere."""

    def __init__(
        self,
        slots: dict[str, WorkerSlot],
        requests: OpenRequests,
        *,
        clock: Callable[[], float],
        end_process: Callable[[str], None],
    ) -> None:
        self._slots = slots
        self._requests = requests
        self._clock = clock
        self._end_process = end_process
        self._leaving_nodes: dict[str, float] = {}
        """When each must be empty, by the clock."""

    async def expect(self, worker_ids: Collection[str], grace_seconds: float) -> None:
        """From now on these workers should be there. Those that should not finish what they run, for `grace_seconds`
        at most; what is left then goes on elsewhere. Returns when they are gone; may be called again meanwhile.

        Raises `ConfigError` for no worker at all.
        """
        if not worker_ids:
            raise ConfigError("at least one worker is needed", param="worker_ids")
        for worker_id in worker_ids:
            slot = self._slots.setdefault(worker_id, WorkerSlot(worker_id))
            slot.retiring = False
        retiring = [slot for slot in self._slots.values() if slot.worker_id not in worker_ids]
        for slot in retiring:
            slot.retiring = True
            _stop_leaving(slot)
        await self._let_finish(retiring, self._clock() + grace_seconds)
        for slot in retiring:
            if slot.retiring and self._slots.get(slot.worker_id) is slot:
                logger.info("worker %s is let go", slot.worker_id)
                await _let_go(slot)
                del self._slots[slot.worker_id]

    def leave_nodes(self, nodes: Mapping[str, float]) -> None:
        """These nodes, and no others, are about to go: each id with the seconds until it must be empty. Their workers
        finish what they run until then, and go elsewhere. May be called as often as one likes."""
        now = self._clock()
        self._leaving_nodes = {
            node_id: self._leaving_nodes.get(node_id, now + seconds) for node_id, seconds in nodes.items()
        }
        for slot in self._slots.values():
            if slot.takes_requests and slot.node_id in self._leaving_nodes:
                self._move_away(slot)

    def refuses(self, slot: WorkerSlot) -> bool:
        """Whether a worker that announces itself should not be attached, since its node is about to go. It is sent
        elsewhere. One that has come elsewhere is no longer on its way."""
        if slot.node_id in self._leaving_nodes:
            if slot.leaving is None:
                self._move_away(slot)
            return True
        _stop_leaving(slot)
        return False

    def _move_away(self, slot: WorkerSlot) -> None:
        assert slot.node_id is not None
        slot.leaving = asyncio.create_task(self._evacuate(slot, self._leaving_nodes[slot.node_id]))

    async def _evacuate(self, slot: WorkerSlot, deadline: float) -> None:
        logger.warning("the node of worker %s is about to go", slot.worker_id)
        await self._let_finish([slot], deadline)
        await _let_go(slot)
        slot.detail = "its node is about to go"
        self._end_process(slot.worker_id)

    async def _let_finish(self, slots: Collection[WorkerSlot], deadline: float) -> None:
        """Wait until these run nothing, until `deadline` at most."""
        while self._clock() < deadline and any(map(self._runs_anything, slots)):
            await asyncio.sleep(_CHECK_SECONDS)

    def _runs_anything(self, slot: WorkerSlot) -> bool:
        return slot.link is not None and any(entry.link is slot.link for entry in self._requests)


def _stop_leaving(slot: WorkerSlot) -> None:
    if slot.leaving is not None:
        slot.leaving.cancel()
        slot.leaving = None


async def _let_go(slot: WorkerSlot) -> None:
    """End the stream to a worker; what it still runs goes on elsewhere."""
    if slot.task is not None:
        slot.task.cancel()
        await asyncio.gather(slot.task, return_exceptions=True)
