"""A request's timeout holds wherever it is: nobody computes, and nobody waits, for an answer that is too late."""

import asyncio
import time

import pytest

from octavo.cluster.backend import HealthStatus
from octavo.cluster.coordinator_client import GrpcBackend
from octavo.protos.errors import DeadlineExceededError, by_name

from .fake_cluster import Cluster
from .support import MODEL, make_request, run, until

TIMEOUT = 0.4
SOON = 2.5
"""Seconds in which the caller has its error: far from all that it could otherwise wait for."""


def late_request(name="late", **changes):
    request = make_request(name, max_tokens=400, **changes)
    return request.__class__(
        **{field: getattr(request, field) for field in request.__slots__} | {"timeout_seconds": TIMEOUT}
    )


async def ends_late(backend, request):
    """Runs to the error; returns how many tokens came before it."""
    began, tokens = time.monotonic(), 0
    error = None
    try:
        async for delta in backend.submit(request):
            tokens += len(delta.token_ids)
            if delta.error is not None:
                error = by_name(delta.error_name)
    except DeadlineExceededError as raised:
        error = type(raised)
    assert error is DeadlineExceededError
    assert TIMEOUT * 0.9 < time.monotonic() - began < SOON
    return tokens


def test_while_it_runs():
    async def test():
        async with Cluster(step_seconds=0.01) as cluster:
            assert await ends_late(await cluster.backend(), late_request()) > 0
            await cluster.idle()

    run(test())


@pytest.mark.parametrize("place", ["in the running step", "in the queue"])
def test_while_a_step_takes_long(place):
    """Nothing comes from the worker that could wake anybody."""

    async def test():
        async with Cluster(info={"max_num_seqs": 1}) as cluster:
            backend = await cluster.backend()
            cluster.executors["worker-0"].gate.clear()
            first = None
            if place == "in the queue":
                first = asyncio.create_task(anext(backend.submit(make_request("first"))))
                await until(lambda: cluster.scheduler().num_in_flight)
            await ends_late(backend, late_request())
            await until(lambda: not cluster.scheduler().runs("late"), 2.0)
            assert cluster.core.num_unfinished == (first is not None)
            cluster.executors["worker-0"].gate.set()
            if first is not None:
                await first
            await cluster.idle()

    run(test())


def test_while_it_waits_for_a_worker():
    async def test():
        async with Cluster(step_seconds=0.01) as cluster:
            backend = await cluster.backend()
            late = asyncio.create_task(ends_late(backend, late_request()))
            await until(lambda: cluster.core.stats()["sampled_tokens"])
            await cluster.kill_worker("worker-0")
            await late
            assert cluster.core.num_unfinished == 0
            # Whoever has the time goes on when a worker is back.
            assert cluster.core.health().status is HealthStatus.DEAD

    run(test())


def test_while_the_coordinator_is_away():
    async def test():
        async with Cluster(step_seconds=0.01) as cluster:
            backend = await cluster.backend()
            late = asyncio.create_task(ends_late(backend, late_request()))
            await until(lambda: cluster.core.stats()["sampled_tokens"])
            await cluster.server.stop(0)
            assert await late > 0
            await cluster.core.close()
            await cluster.start_coordinator()

    run(test())


def test_before_a_coordinator_was_found():
    async def find():
        raise OSError("nobody")

    async def test():
        backend = GrpcBackend(MODEL, find)
        backend.start()
        assert await ends_late(backend, late_request()) == 0
        await backend.close()

    run(test())
