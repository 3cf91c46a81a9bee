"""Real deaths of processes: whatever dies, every stream has the tokens of an undisturbed run. The short version."""

from __future__ import annotations

import asyncio
import random
import time

from .faults import FAULTS, run_fault
from .system import System, until
from .traffic import Traffic, make_requests, reference

MAX_TOKENS = 64


async def every_fault(system: System, repeats: int) -> None:
    calm = Traffic(make_requests("undisturbed", max_tokens=MAX_TOKENS))
    calm.start(system.backend)
    await calm.finish(60)
    want = calm.outputs()
    # Of these a few by the plain sampler, which takes its time.
    few = [stream.request for stream in calm.streams[::6]]
    assert want[::6] == reference(few)
    for repeat in range(repeats):
        for name in FAULTS:
            outcome = await run_fault(system, name, seed=repeat, max_tokens=MAX_TOKENS)
            assert outcome.traffic.outputs() == want, name
            await system.idle()


async def ingress_killed(system: System) -> None:
    """D20: what it had open is aborted and its blocks are free within 2 s; others' streams go on."""
    others = Traffic(make_requests("others", greedy=4, sampled=2, max_tokens=300))
    others.start(system.backend)
    system.start_ingress(num_requests=12)

    async def unfinished() -> int:
        return (await system.backend.stats())["unfinished"]

    async def all_open() -> bool:
        return await unfinished() == 18

    await until(all_open, 30, "both ingresses have their requests open")
    before = (await system.backend.stats())["requests"]["aborted"]
    system.kill("ingress")
    killed = time.monotonic()

    async def aborted() -> bool:
        return (await system.backend.stats())["requests"]["aborted"] == before + 12

    await until(aborted, 2, "the dead ingress's requests are aborted")
    assert time.monotonic() - killed < 2
    assert await unfinished() == 6
    await others.finish(60)
    assert others.outputs() == reference([stream.request for stream in others.streams])
    await system.idle()


async def clients_gone(system: System) -> None:
    """D20: 200 clients leave at random moments, queued, in prefill or decoding; the others are not harmed."""
    rng = random.Random(7)
    stays = Traffic(make_requests("stays", greedy=8, sampled=4, max_tokens=120))
    leaves = Traffic(make_requests("leaves", greedy=200, sampled=0, max_tokens=300))
    stays.start(system.backend)
    leaves.start(system.backend)
    await until(lambda: stays.num_tokens > 100, 30, "streams run")
    before = (await system.backend.stats())["requests"]["aborted"]
    tasks = list(leaves.tasks)
    rng.shuffle(tasks)
    for number, task in enumerate(tasks):
        task.cancel()
        if number % 20 == 0:
            await asyncio.sleep(0.02)

    async def only_stays_left() -> bool:
        stats = await system.backend.stats()
        return stats["requests"]["aborted"] == before + 200 and stats["running"] + stats["waiting"] <= 12

    await until(only_stays_left, 2, "what nobody waits for is gone")
    await stays.finish(60)
    assert stays.outputs() == reference([stream.request for stream in stays.streams])
    await system.idle()


def test_d20_d22_whatever_dies_all_streams_equal_their_undisturbed_run():
    """40 greedy and 20 sampled streams over three workers; the faults one after the other on the same system."""

    async def test():
        async with System(3, lease_seconds=1.5) as system:
            await every_fault(system, repeats=3)
            await ingress_killed(system)
            await clients_gone(system)

    asyncio.run(asyncio.wait_for(test(), 200))
