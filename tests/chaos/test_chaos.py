"""Real deaths of processes: whatever dies, every stream has the tokens of an undisturbed run. The short version."""

from __future__ import annotations

import asyncio

from .faults import FAULTS, run_fault
from .system import System
from .traffic import Traffic, make_requests, reference


def test_d22_whatever_dies_all_streams_equal_their_undisturbed_run():
    """40 greedy and 20 sampled streams over three workers; the faults one after the other on the same system."""

    async def test():
        async with System(3, lease_seconds=1.5) as system:
            requests = make_requests("reference", max_tokens=90)
            want = reference(requests)
            calm = Traffic(requests)
            calm.start(system.backend)
            await calm.finish(60)
            assert calm.outputs() == want
            for name in FAULTS:
                outcome = await run_fault(system, name, max_tokens=90)
                assert outcome.traffic.outputs() == want, name
                await system.idle()

    asyncio.run(asyncio.wait_for(test(), 200))
