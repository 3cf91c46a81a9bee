"""A recorded run makes every decision again: pressure, losses of a worker and of the coordinator, ends from outside."""

import asyncio
import contextlib
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from octavo.cluster.recording import FIRST_LINE, Recorder, read_recording
from octavo.cluster.replay import replay
from octavo.protos.errors import InvalidRequestError

from .fake_cluster import Cluster
from .support import collect, make_request, run, until
from .test_failures import lose_coordinator, mixed_requests, restart_coordinator

HOST = {"num_host_blocks": 64, "kv_bytes_per_block": 1024, "host_link_bytes_per_second": 1e9}


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    """Two workers short of blocks; requests that are aborted, time out, or end at a stop token; one worker lost and
    back, then the coordinator."""
    path = tmp_path_factory.mktemp("recording") / "run.rec"

    async def test():
        async with Cluster(
            2, step_seconds=0.002, budget=64, recording=str(path), info={"num_blocks": 28, **HOST}
        ) as cluster:
            backend = await cluster.backend()
            requests = mixed_requests(20, 60)
            tasks = [asyncio.create_task(collect(backend, request)) for request in requests]
            late = replace(make_request("late", max_tokens=400), timeout_seconds=0.05)
            tasks.append(asyncio.create_task(collect(backend, late)))
            await until(lambda: cluster.core.num_unfinished > 10)
            left = asyncio.create_task(collect(backend, make_request("left", max_tokens=500)))
            await until(lambda: cluster.scheduler("worker-1").snapshot()["sampled_tokens"] > 100)
            left.cancel()
            await cluster.kill_worker("worker-1")
            await until(lambda: cluster.core.stats()["moved"] > 0)
            await cluster.start_worker("worker-1")
            await lose_coordinator(cluster)
            await restart_coordinator(cluster)
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(*tasks, left, return_exceptions=True)
            await cluster.idle()

    run(test())
    return path


def test_every_decision_comes_out_the_same(recording):
    found = replay(read_recording(recording))
    assert found.differences == []
    assert found.num_coordinators == 2
    assert found.num_steps == found.num_steps_same > 50
    assert found.num_routed == found.num_routed_same >= 22
    assert found.num_others == found.num_others_same > 100
    assert sum(one.total_seconds > 0 for one in found.requests.values()) > 10
    assert all(one.seconds > 0 for one in found.steps)
    for scheduler in found.schedulers:
        scheduler.check_integrity()


def test_the_run_was_under_pressure(recording):
    """Or it would show little."""
    found = replay(read_recording(recording))
    assert sum(sum(one.snapshot()["preemptions"].values()) for one in found.schedulers) > 0


def test_nothing_rests_on_the_order_of_sets_in_this_process(recording):
    """Another seed of Python's string hashes, another process."""
    code = (
        "import sys; from pathlib import Path; from octavo.cluster.recording import read_recording\n"
        "from octavo.cluster.replay import replay\n"
        "found = replay(read_recording(Path(sys.argv[1]))); print(found.differences); sys.exit(not found.same)"
    )
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", code, str(recording)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_a_decision_that_differs_is_named(recording):
    records = list(read_recording(recording))
    planned = next(one.planned for one in records if one.HasField("planned") and one.planned.HasField("plan"))
    planned.plan.rows = b"\x07\x00\x00\x00"
    routed = next(one.routed for one in records if one.HasField("routed"))
    routed.outcome = "worker-9"
    found = replay(records)
    assert (found.num_steps_same, found.num_routed_same) == (found.num_steps - 1, found.num_routed - 1)
    assert any("rows differ" in one for one in found.differences)
    assert any("recorded worker-9" in one for one in found.differences)


def test_a_record_cut_short_ends_the_recording(recording, tmp_path):
    whole = list(read_recording(recording))
    cut = tmp_path / "cut.rec"
    cut.write_bytes(recording.read_bytes()[:-3])
    assert len(list(read_recording(cut))) == len(whole) - 1


def test_what_is_no_recording_is_refused(tmp_path):
    other = tmp_path / "other"
    other.write_bytes(b"TIMESTAMP,ContextTokens\n")
    with pytest.raises(InvalidRequestError, match="no recording"):
        list(read_recording(other))
    with pytest.raises(InvalidRequestError, match="cannot be read"):
        list(read_recording(tmp_path / "none"))
    headless = tmp_path / "headless"
    headless.write_bytes(FIRST_LINE + b"\x04\x3a\x02\x08\x01")
    with pytest.raises(InvalidRequestError, match="begins with"):
        replay(read_recording(headless))


def test_a_full_disk_ends_the_recording_and_nothing_else(tmp_path, caplog):
    recorder = Recorder(tmp_path / "run.rec")
    recorder._file.close()
    recorder._file = open("/dev/full", "wb")  # noqa: SIM115
    recorder.start(0, "predicted_ttft", {"text": "x" * 100_000})
    recorder.start(0, "predicted_ttft", {})
    assert "the recording ends here" in caplog.text
    recorder.close()
