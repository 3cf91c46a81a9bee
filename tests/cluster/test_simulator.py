"""The simulator: readers of each format, the short cut over steady steps, and a fleet in virtual time."""

from __future__ import annotations

import dataclasses
import gzip
import json
import random
from collections import Counter

import numpy as np
import pytest

from octavo.cluster.simulator.calibration import read_calibration
from octavo.cluster.simulator.fleet import FleetConfig, Simulation
from octavo.cluster.simulator.hardware import GPUS, MODELS, Device, preset, roofline
from octavo.cluster.simulator.traces import Trace, TraceRequest, read_trace
from octavo.protos.errors import ConfigError, InvalidRequestError
from octavo.scheduler.autoscaling import AutoscalingConfig
from octavo.scheduler.events import Event, RepredictionCause
from octavo.scheduler.router import ROUTER_POLICIES

DEVICE = Device(
    name="test",
    source="measured",
    fixed_seconds=0.01,
    token_seconds=1e-4,
    row_seconds=1e-5,
    context_token_seconds=1e-7,
    kv_bytes_per_token=1000,
    kv_tokens=4000,
    host_link_bytes_per_second=1e8,
)


def made_up_trace(seed: int, num_requests: int = 120) -> Trace:
    rng = random.Random(seed)
    at, requests = 0.0, []
    for _ in range(num_requests):
        at += rng.expovariate(3.0)
        blocks = [rng.randrange(3), *rng.sample(range(10, 400), rng.randint(1, 6))]
        size = 32 * len(blocks) - rng.randrange(32)
        requests.append(TraceRequest(at, size, rng.randint(1, 80), np.asarray(blocks, np.int32), 32))
    return Trace("made up", requests)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("host_blocks", [0, 60])
def test_the_short_cut_over_steady_steps_changes_nothing(seed, host_blocks):
    trace = made_up_trace(seed)
    runs = []
    for collapse in (True, False):
        config = FleetConfig(
            device=DEVICE,
            num_workers=2,
            kv_tokens=(4000, 1200, 700)[seed],
            max_num_seqs=(64, 64, 6)[seed],
            max_num_batched_tokens=128,
            host_blocks=host_blocks,
            collapse=collapse,
        )
        simulation = Simulation(config, trace)
        record = simulation.run()
        for worker in simulation.workers.values():
            worker.scheduler.check_integrity()
            assert not worker.scheduler.has_work
        runs.append((record, simulation))
    (short, _), (whole, _) = runs
    assert len(short.step_seconds) < 0.7 * len(whole.step_seconds)
    for one, other in zip(short.outcomes, whole.outcomes, strict=True):
        for field in dataclasses.fields(one):
            assert getattr(one, field.name) == pytest.approx(getattr(other, field.name), rel=1e-9), field.name
    for one, other in zip(short.schedulers, whole.schedulers, strict=True):
        # Sums of floats come out in another order.
        assert one.pop("step_seconds") <= other.pop("step_seconds")
        assert one == other
    assert sum(short.busy_seconds) == pytest.approx(sum(whole.busy_seconds))
    assert (
        sum(short.step_tokens) == sum(whole.step_tokens) == sum(o.num_output_tokens for o in short.outcomes)
    )


@pytest.mark.parametrize("policy", ROUTER_POLICIES)
def test_a_fleet_runs_a_trace_to_its_end_and_twice_the_same(policy):
    trace = made_up_trace(5).faster(4.0)
    runs = [
        Simulation(FleetConfig(device=DEVICE, num_workers=5, policy=policy, seed=3), trace).run()
        for _ in range(2)
    ]
    assert runs[0].outcomes == runs[1].outcomes
    assert len(runs[0].outcomes) == len(trace.requests)
    for one in runs[0].outcomes:
        assert 0 < one.ttft_seconds <= one.total_seconds
        assert one.index_exact
        assert one.cached_tokens < one.num_prompt_tokens
    if policy != "prefix":
        assert {one.worker for one in runs[0].outcomes} == set(range(5))


class CheckedSimulation(Simulation):
    """After every event: whatever waits is predicted to find what its worker's tree holds now."""

    def _take(self, events: list[Event]) -> None:
        super()._take(events)
        for scheduler in self.schedulers.values():
            scheduler.check_integrity()


def test_a_prediction_of_cached_tokens_is_kept_or_changed_by_something_with_a_name():
    """Of every request: what the router told when it reserved is what is found at its turn, or the events between say
    what it became and why."""
    causes: Counter[RepredictionCause] = Counter()
    told = 0
    for seed in range(6):
        config = FleetConfig(
            device=DEVICE,
            num_workers=2,
            kv_tokens=(4000, 1200, 700)[seed % 3],
            max_num_batched_tokens=128,
            host_blocks=(0, 60)[seed % 2],
        )
        for one in CheckedSimulation(config, made_up_trace(seed).faster(6.0)).run().outcomes:
            assert one.index_exact
            assert one.cached_tokens == one.predicted_cached_tokens
            if one.repredictions:
                causes.update(one.repredictions)
            else:
                told += 1
    assert told > 100
    assert causes.keys() >= {RepredictionCause.COMPUTED, RepredictionCause.EVICTED}


def test_an_idle_fleet_starts_when_it_was_predicted_to():
    trace = Trace("one", [TraceRequest(1.0, 300, 3)])
    config = FleetConfig(device=DEVICE, num_workers=2, max_num_batched_tokens=512)
    [one] = Simulation(config, trace).run().outcomes
    assert one.ttft_seconds == pytest.approx(0.01 + 300e-4 + 1e-5 + 300e-7)
    assert one.predicted_ttft_seconds == pytest.approx(one.ttft_seconds, rel=0.01)


def test_what_can_never_fit_is_refused_and_counted():
    trace = Trace("two", [TraceRequest(0.0, 5000, 3), TraceRequest(0.0, 50, 3)])
    record = Simulation(FleetConfig(device=DEVICE), trace).run()
    assert (record.refused, len(record.outcomes)) == (1, 1)


# --- a fleet that scales itself ---------------------------------------------------------------------------------


def load_step(seed: int) -> Trace:
    """A request a second, for two minutes six, then one again."""
    rng = random.Random(seed)
    at, requests = 0.0, []
    while at < 640:
        at += rng.expovariate(6.0 if 100 <= at < 220 else 1.0)
        requests.append(TraceRequest(at, rng.randint(100, 300), rng.randint(5, 15)))
    return Trace("step", requests)


def scaling_config(**changes) -> FleetConfig:
    times = {"up_after": 5.0, "cooldown_up": 5.0, "down_after": 60.0, "cooldown_down": 60.0}
    return FleetConfig(
        **{
            "device": dataclasses.replace(DEVICE, token_seconds=2e-3, kv_tokens=20_000),
            "max_num_batched_tokens": 512,
            "autoscaling": AutoscalingConfig(workers_max=8, **times),
            "worker_start_seconds": 10.0,
            **changes,
        }
    )


def test_a_load_step_adds_workers_and_its_end_lets_them_go_without_a_turn_between():
    trace = load_step(1)
    record = Simulation(scaling_config(), trace).run()
    assert len(record.outcomes) == len(trace.requests)
    assert min(one.total_seconds for one in record.outcomes) > 0, (
        "who was on a worker that went finished there"
    )
    sizes = [1, *(change.num_workers for change in record.size_changes)]
    peak = sizes.index(max(sizes))
    assert 4 <= sizes[peak] <= 8
    assert sizes[: peak + 1] == sorted(sizes[: peak + 1])
    assert sizes[peak:] == sorted(sizes[peak:], reverse=True)
    assert sizes[-1] <= 2
    assert 105 <= record.size_changes[0].at_seconds <= 125
    settled = [one.ttft_seconds for one in record.outcomes if 180 <= one.at_seconds < 220]
    assert sum(settled) / len(settled) < 2.0
    always = Simulation(scaling_config(autoscaling=None, num_workers=8), trace).run()
    assert record.worker_seconds < 0.5 * always.worker_seconds
    again = Simulation(scaling_config(collapse=False), trace.cut(500)).run()
    short = Simulation(scaling_config(), trace.cut(500)).run()
    assert [one.num_workers for one in again.size_changes] == [one.num_workers for one in short.size_changes]
    assert all(one.index_exact for one in record.outcomes)


def test_a_steady_load_never_takes_the_number_back():
    requests = [one for one in load_step(3).requests if one.at_seconds >= 220]
    record = Simulation(scaling_config(num_workers=8), Trace("steady", requests)).run()
    sizes = [8, *(change.num_workers for change in record.size_changes)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] <= 2


# --- readers ---------------------------------------------------------------------------------------------------

SAMPLES = {
    "mooncake": [
        {"timestamp": 3000, "input_length": 700, "output_length": 9, "hash_ids": [0, 7]},
        {"timestamp": 0, "input_length": 600, "output_length": 0, "hash_ids": [0, 1]},
    ],
    "plain": [
        {"at": 10.0, "prompt_tokens": 600, "output_tokens": 1, "blocks": [0, 1]},
        {"at": 13.0, "prompt_tokens": 700, "output_tokens": 9, "blocks": [0, 7]},
    ],
    "agentic": [
        {
            "id": "s",
            "block_size": 512,
            "requests": [
                {"t": 0.0, "type": "n", "in": 600, "out": 1, "hash_rle": [0, 2]},
                {
                    "t": 1.0,
                    "type": "subagent",
                    "requests": [{"t": 2.0, "type": "s", "in": 700, "out": 9, "hash_rle": [0, 1, 7, 1]}],
                },
            ],
        }
    ],
}


@pytest.mark.parametrize("kind", SAMPLES)
@pytest.mark.parametrize("packed", [False, True])
def test_formats_that_know_what_is_shared(kind, packed, tmp_path):
    text = "\n".join(map(json.dumps, SAMPLES[kind]))
    path = tmp_path / ("trace.jsonl.gz" if packed else "trace.jsonl")
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    trace = read_trace(path)
    assert [one.at_seconds for one in trace.requests] == [0.0, 3.0]
    assert [one.num_output_tokens for one in trace.requests] == [1, 9]
    first, second = (one.prompt(number) for number, one in enumerate(trace.requests))
    assert (len(first), len(second)) == (600, 700)
    assert (first[:512] == second[:512]).all()
    assert (first[512:] != second[512:600]).all()


def test_azure(tmp_path):
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.0319600,3180,8\n"
    )
    trace = read_trace(path)
    assert [one.num_prompt_tokens for one in trace.requests] == [4808, 3180]
    assert trace.seconds == pytest.approx(0.052)
    first, second = (one.prompt(number) for number, one in enumerate(trace.requests))
    assert first[0] != second[0], "nothing is shared"


def test_servegen_is_drawn_from_its_laws_by_the_seed(tmp_path):
    path = tmp_path / "servegen.jsonl"
    windows = [
        [0, 0.0, 0, "", 0, 0],
        [600, 0.5, 1.0, "Gamma", 1.0, 2.0],
        [1200, 0.5, 1.0, "Weibull", 1.0, 2.0],
    ]
    pdf = {"0": {"input_tokens": [[10, 0.5], [30, 0.5]], "output_tokens": [[5, 1.0]]}}
    path.write_text(
        json.dumps({"client": 0, "windows": windows, "pdf": pdf})
        + "\n"
        + json.dumps(
            {"client": 1, "windows": windows, "pdf": {"0": {"input_tokens": [], "output_tokens": []}}}
        )
    )
    one, other = read_trace(path), read_trace(path)
    assert one == other
    assert 500 < len(one.requests) < 700
    assert {request.num_prompt_tokens for request in one.requests} == {10, 30}


@pytest.mark.parametrize("text", ["", "{}\n", "hello\n", '{"hash_ids": [1]}\n'])
def test_what_is_no_trace_is_refused(text, tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(InvalidRequestError):
        read_trace(path)


def test_cutting_and_speeding_up_a_trace():
    trace = made_up_trace(1)
    assert len(trace.cut(10).requests) == 10
    assert trace.faster(2.0).seconds == pytest.approx(trace.seconds / 2)
    assert max(one.num_prompt_tokens + one.num_output_tokens for one in trace.at_most(150).requests) <= 150


# --- hardware --------------------------------------------------------------------------------------------------


def test_presets_say_that_they_are_computed_and_hold_what_the_memory_allows():
    device = preset("llama-2-13b", "a100-80gb")
    assert device.source == "roofline"
    # 819,200 bytes a token: 40 layers x 2 x 40 heads x 128 x 2 bytes.
    assert device.kv_bytes_per_token == 819_200
    assert device.kv_tokens * device.kv_bytes_per_token < 80e9 * 0.9 - 26e9
    with pytest.raises(ConfigError):
        roofline(MODELS["llama-3.1-70b"], GPUS["l4"])
    with pytest.raises(ConfigError):
        preset("llama-2-13b", "abacus")


def test_a_calibration_file_is_a_device(tmp_path):
    path = tmp_path / "cpu.json"
    path.write_text(json.dumps(dataclasses.asdict(DEVICE)))
    assert read_calibration(str(path)) == DEVICE
    path.write_text("{}")
    with pytest.raises(ConfigError):
        read_calibration(str(path))
