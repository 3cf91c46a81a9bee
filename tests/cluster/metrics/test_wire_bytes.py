"""Bytes of messages are counted where they become bytes, on a real channel."""

from __future__ import annotations

import asyncio

import grpc

from octavo.cluster.metrics.wire_bytes import WireBytes
from octavo.protos import coordinator_pb2, coordinator_pb2_grpc

from ..fake_cluster import Cluster
from ..support import run


def test_both_directions_are_counted() -> None:
    async def scenario() -> None:
        async with Cluster() as cluster:
            counts = WireBytes()
            async with grpc.aio.insecure_channel(cluster.address) as channel:
                stub = coordinator_pb2_grpc.CoordinatorServiceStub(counts.channel(channel))
                request = coordinator_pb2.GetTimelineRequest(request_id="x" * 100)
                metadata = cluster.config.access.metadata
                answers = await asyncio.gather(
                    *(stub.GetTimeline(request, metadata=metadata) for _ in range(3))
                )
            assert counts.snapshot() == {
                "sent": 3 * request.ByteSize(),
                "received": sum(answer.ByteSize() for answer in answers),
            }

    run(scenario())


def test_worker_streams_count_plans_and_results() -> None:
    async def scenario() -> None:
        async with Cluster() as cluster:
            link = cluster.core._slots["worker-0"].link
            assert link is not None
            attached = link.stats()["wire_bytes"]
            assert attached["sent"] > 0
            await asyncio.sleep(0.2)
            beaten = link.stats()
            assert beaten["wire_bytes"]["received"] > attached["received"], "heartbeats"
            total, available = (beaten["host_memory"][key] for key in ("total", "available"))
            assert 0 < available <= total

    run(scenario())
