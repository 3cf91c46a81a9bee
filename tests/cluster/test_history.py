"""The history of such servers on one trace; measured machines; a live run beside its simulation."""

import dataclasses
import itertools
import json
import random

import pytest
from typer.testing import CliRunner

from octavo.cluster.cli.app import app
from octavo.cluster.recording import read_recording
from octavo.cluster.replay import MeasuredStep, replay
from octavo.cluster.simulator.calibration import calibrate, fit, read_calibration, shipped, write_calibration
from octavo.cluster.simulator.fleet import FleetConfig
from octavo.cluster.simulator.hardware import Device
from octavo.cluster.simulator.history import SYSTEMS
from octavo.cluster.simulator.live import beside, fleet_of, recorded_trace
from octavo.cluster.simulator.report import Slo, summarise
from octavo.cluster.simulator.run import simulate
from octavo.cluster.simulator.traces import Trace, TraceRequest
from octavo.protos.errors import ConfigError, InvalidRequestError

from .test_recording import recording  # noqa: F401

DEVICE = Device(
    name="toy",
    source="measured",
    fixed_seconds=0.01,
    token_seconds=1e-4,
    row_seconds=1e-4,
    context_token_seconds=1e-7,
    kv_bytes_per_token=1000,
    kv_tokens=16_384,
    host_link_bytes_per_second=1e9,
)


def trace(count=300, rate=8.0, seed=3):
    rng, at = random.Random(seed), 0.0
    requests = []
    for number in range(count):
        at += rng.expovariate(rate)
        prompt = rng.randint(30, 600)
        # Every third begins like the others of its ten.
        blocks = [
            number % 10 if number % 3 == 0 else 1000 + number,
            *range(10_000 + 10 * number, 10_010 + 10 * number),
        ]
        requests.append(TraceRequest(at, prompt, rng.randint(8, 200), _ids(blocks, prompt), 256))
    return Trace("made up", requests)


def _ids(blocks, prompt):
    import numpy as np

    return np.array(blocks[: -(-prompt // 256)], np.int32)


@pytest.fixture(scope="module")
def runs():
    config = FleetConfig(device=DEVICE, max_model_len=2048, max_num_batched_tokens=256, host_blocks=500)
    return {
        name: summarise(simulate(dataclasses.replace(config, system=name), trace()), Slo())
        for name in SYSTEMS
    }


def test_every_system_answers_every_request(runs):
    assert all((one.requests, one.refused) == (300, 0) for one in runs.values())


def test_each_step_of_the_history_buys_what_it_is_known_for(runs):
    assert runs["continuous"].ttft_mean < runs["static"].ttft_mean
    assert runs["continuous"].seconds < runs["static"].seconds
    assert runs["paged"].waste < 0.05 < 0.7 < runs["continuous"].waste
    assert runs["paged"].ttft_mean < runs["continuous"].ttft_mean / 2
    assert runs["chunked"].itl_p99 < runs["paged"].itl_p99
    assert runs["cached"].hit_rate > 0.1 > runs["chunked"].hit_rate == 0
    assert runs["octavo"].ttft_mean <= 1.02 * min(one.ttft_mean for one in runs.values())


def test_static_batches_take_the_known_steps():
    rng = random.Random(42)
    requests = [TraceRequest(0.0, 1, rng.randint(10, 120)) for _ in range(16)]
    device = dataclasses.replace(
        DEVICE, fixed_seconds=1.0, token_seconds=0, row_seconds=0, context_token_seconds=0, kv_tokens=4 * 512
    )
    config = FleetConfig(device=device, system="static", max_model_len=512)
    record = simulate(config, Trace("lab", requests))
    assert record.end_seconds == 338
    # The slowest of each four ends with its batch, the others before.
    ends = [one.total_seconds for one in record.outcomes]
    for batch in range(4):
        rows = record.outcomes[4 * batch : 4 * batch + 4]
        assert (
            max(ends[4 * batch : 4 * batch + 4])
            == rows[0].ttft_seconds + max(one.num_output_tokens for one in rows) - 1
        )


def test_a_reservation_must_fit():
    with pytest.raises(ConfigError, match="max_model_len"):
        FleetConfig(device=DEVICE, system="continuous", max_model_len=20_000)
    with pytest.raises(ConfigError, match="static, continuous"):
        FleetConfig(device=DEVICE, system="futuristic")


def test_the_history_in_one_table(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(
        "".join(json.dumps({"at": i / 9, "prompt_tokens": 90, "output_tokens": 9}) + "\n" for i in range(30))
    )
    names = ",".join(SYSTEMS)
    asked = ["simulate", str(path), "--max-model-len", "4096", "--workers", "1", "--sweep", f"system={names}"]
    found = json.loads(CliRunner().invoke(app, [*asked, "--json"]).stdout)
    assert [one["system"] for one in found["runs"]] == list(SYSTEMS)
    assert found["runs"][0]["block_size"] == 4096
    text = CliRunner().invoke(app, asked).stdout
    assert all(name in text for name in SYSTEMS)


# --- measured machines -------------------------------------------------------------------------------------


def test_a_fit_finds_what_made_the_steps():
    rng = random.Random(1)
    true = (0.01, 2e-4, 0.0, 3e-7)
    steps = []
    for _ in range(400):
        rows = rng.randint(1, 32)
        tokens, context = rows + rng.choice((0, 200)), rng.randint(100, 9000)
        seconds = true[0] + true[1] * tokens + true[3] * context
        steps.append(MeasuredStep(tokens, rows, context, 0.0, seconds * rng.uniform(0.95, 1.05)))
    found = fit(steps)
    assert all(one >= 0 for one in found)
    for one, other in itertools.zip_longest(found, true):
        assert one == pytest.approx(other, rel=0.1, abs=3e-5)


def test_a_recorded_run_is_a_trace_a_fleet_and_a_machine(recording, tmp_path):  # noqa: F811
    found = replay(read_recording(recording))
    device = calibrate(found, "fake")
    write_calibration(device, tmp_path / "fake.json")
    assert read_calibration(str(tmp_path / "fake.json")) == device
    assert device.kv_tokens == 28 * 16
    config = fleet_of(found, device)
    assert (config.num_workers, config.max_num_batched_tokens, config.host_blocks) == (2, 64, 64)
    requests = recorded_trace(found, "run").requests
    assert requests[0].at_seconds == 0
    assert requests[0].prompt(0).tolist() == next(iter(found.requests.values())).prompt_token_ids.tolist()
    live, simulated = beside(found, device, "run")
    assert live.requests == simulated.requests == len(requests)
    assert live.off(live) == {"ttft_mean": 0, "ttft_p50": 0, "ttft_p99": 0, "itl_mean": 0}
    assert simulated.itl_mean > 0


def test_too_short_a_run_is_no_calibration(recording):  # noqa: F811
    found = replay(read_recording(recording))
    del found.steps[20:]
    with pytest.raises(InvalidRequestError, match="20 steps"):
        calibrate(found, "short")


@pytest.mark.parametrize("name", shipped())
def test_shipped_calibrations_are_measured(name):
    assert read_calibration(name).source == "measured"


def test_the_command_replays_and_compares(recording, tmp_path):  # noqa: F811
    asked = ["replay", str(recording), "--simulate", "--save-calibration", str(tmp_path / "c.json")]
    done = CliRunner().invoke(app, [*asked, "--json"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["steps"] == told["steps_same"] > 50
    assert told["differences"] == []
    assert set(told["simulated_off_by"]) == {"ttft_mean", "ttft_p50", "ttft_p99", "itl_mean"}
    again = CliRunner().invoke(
        app, ["replay", str(recording), "--simulate", "--calibration", str(tmp_path / "c.json")]
    )
    assert "came out the same" in again.stdout
    assert "off by" in again.stdout
    none = CliRunner().invoke(app, ["replay", str(tmp_path / "c.json")])
    assert none.exit_code != 0
    assert "no recording" in none.output
