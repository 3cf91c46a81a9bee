"""The faults of a chaos run, one function each: what is done to a system in the middle of its streams."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from .system import System, until
from .traffic import Traffic, make_requests

BOTH_WITHIN_SECONDS = 0.5
NEW_NODE_SECONDS = 1.0


async def worker_killed(system: System, rng: random.Random) -> None:
    system.kill(rng.choice(system.worker_names))


async def coordinator_killed(system: System, rng: random.Random) -> None:
    system.kill("coordinator")


async def both_killed(system: System, rng: random.Random) -> None:
    names = ["coordinator", rng.choice(system.worker_names)]
    rng.shuffle(names)
    system.kill(names[0])
    await asyncio.sleep(rng.uniform(0.0, BOTH_WITHIN_SECONDS))
    system.kill(names[1])


async def worker_frozen(system: System, rng: random.Random) -> None:
    """It wakes once it has been given up, and nothing of what it had under way may count."""
    name = rng.choice(system.worker_names)
    system.freeze(name)

    async def given_up() -> bool:
        return await system.worker_status(name) == "dead"

    await until(given_up, 30, "the frozen worker is given up")
    system.wake(name)


async def node_lost(system: System, rng: random.Random) -> None:
    """The machine of a worker is gone: all that its peers notice is silence, no connection is reset. A new one comes
    after a while."""
    name = rng.choice(system.worker_names)
    system.freeze(name)

    async def given_up() -> bool:
        return await system.worker_status(name) == "dead"

    await until(given_up, 30, "the lost node's worker is given up")
    system.kill(name, restart_seconds=NEW_NODE_SECONDS)


FAULTS: dict[str, Callable[[System, random.Random], Awaitable[None]]] = {
    "worker killed": worker_killed,
    "coordinator killed": coordinator_killed,
    "coordinator and worker killed": both_killed,
    "worker frozen": worker_frozen,
    "node lost": node_lost,
}


@dataclass
class Outcome:
    fault: str
    traffic: Traffic

    @property
    def gap_seconds(self) -> float:
        """The longest pause that any client saw."""
        return self.traffic.gap_seconds


async def run_fault(system: System, fault: str, *, seed: int = 0, max_tokens: int = 160) -> Outcome:
    """All streams to their end, with the fault when about a quarter of all tokens have come."""
    rng = random.Random(f"{fault} {seed}")
    traffic = Traffic(make_requests(f"{fault} {seed}", max_tokens=max_tokens))
    traffic.start(system.backend)
    at = int(rng.uniform(0.1, 0.4) * max_tokens * len(traffic.streams))
    await until(lambda: traffic.num_tokens >= at, 60, f"{at} tokens have come")
    await FAULTS[fault](system, rng)
    await traffic.finish(90)
    return Outcome(fault, traffic)
