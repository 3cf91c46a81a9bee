"""What goes to Ray's metric objects: absolute values as gauges, counters as what has been added."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from octavo.cluster.metrics import ray_export
from octavo.cluster.metrics.exposition import Family, backend_families
from octavo.cluster.metrics.ray_export import RayExporter, keep_publishing
from octavo.cluster.metrics.table import METRICS, Kind

WORKER = {
    "running": 3,
    "preemptions": {"swap": 5},
    "queue_time": {"counts": [0] * 16 + [2, 1], "sum": 600.0},
}


class FakeRay:
    """`ray.util.metrics`: one kind of object in the place of two."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        self.made: list[tuple[str, str, tuple[str, ...]]] = []

    def _kind(self, name: str, absolute: bool) -> Any:
        ray = self

        class Made:
            def __init__(self, metric: str, description: str, tag_keys: tuple[str, ...]) -> None:
                assert description
                ray.made.append((name, metric, tag_keys))
                self.metric, self.tag_keys = metric, tag_keys

            def set(self, value: float, tags: dict[str, str]) -> None:
                assert absolute
                ray.values[self.key(tags)] = value

            def inc(self, value: float, tags: dict[str, str]) -> None:
                assert not absolute
                assert value > 0
                ray.values[self.key(tags)] = ray.values.get(self.key(tags), 0) + value

            def key(self, tags: dict[str, str]) -> tuple[str, tuple[tuple[str, str], ...]]:
                assert set(tags) == set(self.tag_keys)
                return self.metric, tuple(sorted(tags.items()))

        return Made

    @property
    def Counter(self) -> Any:
        return self._kind("counter", False)

    @property
    def Gauge(self) -> Any:
        return self._kind("gauge", True)


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    monkeypatch.setattr(ray_export, "ray_metrics", fake)
    return fake


def families(**worker: Any) -> list[Family]:
    return backend_families({"workers": {"w0": {**WORKER, **worker}}})


def test_counters_tell_what_was_added_and_begin_anew_with_their_worker(ray: FakeRay) -> None:
    exporter = RayExporter()
    key = ("octavo_preemptions", (("kind", "swap"), ("worker", "w0")))
    for count, total in ((5, 5), (5, 5), (9, 9), (2, 11), (3, 12)):
        exporter.publish(families(preemptions={"swap": count}))
        assert ray.values[key] == total


def test_gauges_and_histograms_are_told_as_they_stand(ray: FakeRay) -> None:
    exporter = RayExporter()
    exporter.publish(families())
    exporter.publish(families(running=1))
    assert ray.values["octavo_requests_running", (("worker", "w0"),)] == 1
    bucket = "octavo_queue_time_seconds_bucket"
    assert ray.values[bucket, (("le", "300.0"), ("worker", "w0"))] == 2
    assert ray.values[bucket, (("le", "+Inf"), ("worker", "w0"))] == 3
    assert ray.values["octavo_queue_time_seconds_sum", (("worker", "w0"),)] == 600
    assert ray.values["octavo_queue_time_seconds_count", (("worker", "w0"),)] == 3
    assert len(set(ray.made)) == len(ray.made), "each object is made once"


def test_rays_names_are_those_of_the_table(ray: FakeRay) -> None:
    RayExporter().publish(families())
    known = {metric.name: metric.kind for metric in METRICS}
    for kind, name, _ in ray.made:
        if kind == "counter":
            assert known[f"{name}_total"] is Kind.COUNTER
        elif name in known:
            assert known[name] is Kind.GAUGE
        else:
            assert known[name.rpartition("_")[0]] is Kind.HISTOGRAM


def test_a_round_that_fails_is_followed_by_the_next(ray: FakeRay, caplog: pytest.LogCaptureFixture) -> None:
    rounds = 0

    async def collect() -> list[Family]:
        nonlocal rounds
        rounds += 1
        if rounds < 3:
            raise ConnectionError("gone")
        return families()

    async def scenario() -> None:
        task = asyncio.create_task(keep_publishing(collect, interval_seconds=0.001))
        while not ray.values:
            await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(scenario())
    assert len(caplog.records) == 1
