"""`octavo simulate` and `octavo lab`: known answers, and what is printed."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from octavo.cluster.cli.app import app
from octavo.cluster.simulator.labs import LABS

RUNNER = CliRunner()


@pytest.fixture(scope="module")
def results():
    return {name: lab() for name, lab in LABS.items() if name != "incident"}


def test_fragmentation_has_its_known_answer(results):
    figures = results["fragmentation"].figures
    assert figures["blocks"] == 2375
    assert round(100 * figures["paged_use"], 2) == 97.93
    assert round(100 * figures["contiguous_use"], 2) == 18.17
    assert round(figures["capacity_ratio"], 2) == 5.39


def test_batching_has_its_known_answer(results):
    figures = results["batching"].figures
    assert (figures["static_steps"], figures["continuous_steps"]) == (338, 279)


def test_paging_outlives_the_incident():
    figures = LABS["incident"]().figures
    assert figures["in_flight_ratio"] >= 6.6
    assert figures["paged_peak_waste"] < 0.032
    assert figures["contiguous_lost_share"] > 0.8


def test_the_price_crosses_once(results):
    kinds = list(results["crossover"].figures["kind"].values())
    assert kinds == sorted(kinds)
    assert set(kinds) == {"recompute", "swap"}


def test_chunks_shorten_the_pause_of_the_others(results):
    pauses = list(results["chunked"].figures["worst_pause_seconds"].values())
    assert pauses == sorted(pauses)
    assert pauses[-1] > 10 * pauses[2]


def test_the_reserve_prevents_thrash(results):
    figures = results["thrash"].figures
    assert figures["with reserve"]["preemptions"] < figures["without"]["preemptions"] / 2
    assert figures["with reserve"]["seconds"] < figures["without"]["seconds"]


def test_shared_branches_and_block_sizes(results):
    assert results["branches"].figures["saved"] > 0.7
    waste = list(results["block-size"].figures["waste"].values())
    assert waste == sorted(waste)


def test_every_lab_speaks_in_three_sentences_and_draws(results):
    for name, result in results.items():
        assert result.text.count(". ") in (2, 3), name
        ElementTree.fromstring(result.svg)


def test_lab_command(tmp_path):
    plot = tmp_path / "plot.svg"
    done = RUNNER.invoke(app, ["lab", "batching", "--json", "--plot", str(plot)])
    assert done.exit_code == 0
    assert json.loads(done.stdout)["figures"]["continuous_steps"] == 279
    assert plot.read_text().startswith("<svg")
    assert "279" in RUNNER.invoke(app, ["lab", "batching"]).stdout
    assert RUNNER.invoke(app, ["lab", "alchemy"]).exit_code != 0


def test_simulate_command(tmp_path):
    trace = tmp_path / "trace.jsonl"
    rows = [
        {"at": i / 5, "prompt_tokens": 900, "output_tokens": 20, "blocks": [0, i % 3 + 1]} for i in range(30)
    ]
    trace.write_text("\n".join(map(json.dumps, rows)))
    sweeps = ["--sweep", "workers=1,3", "--sweep", "block-size=16,32"]
    done = RUNNER.invoke(app, ["simulate", str(trace), *sweeps, "--json"])
    assert done.exit_code == 0, done.stderr
    runs = json.loads(done.stdout)["runs"]
    assert [(run["workers"], run["block_size"]) for run in runs] == [(1, 16), (1, 32), (3, 16), (3, 32)]
    for run in runs:
        assert run["device_source"] == "roofline"
        assert (run["requests"], run["refused"], run["index_exact"]) == (30, 0, 1.0)
        assert run["hit_rate"] > 0.5
        assert run["dollars_per_million_tokens"] > 0
    page = tmp_path / "report.html"
    text = RUNNER.invoke(app, ["simulate", str(trace), "--workers", "2", "--report", str(page)]).stdout
    assert page.read_text().count("<svg") == 2
    assert "predicted_ttft" in page.read_text()
    assert "TTFT p99" in text
    assert "data sheets" in text


def test_simulate_a_fleet_that_scales_itself(tmp_path):
    trace = tmp_path / "trace.jsonl"
    # A prompt takes 0.44 s of a worker and five come a second.
    rows = [{"at": i / 5, "prompt_tokens": 4000, "output_tokens": 5} for i in range(200)]
    trace.write_text("\n".join(map(json.dumps, rows)))
    options = ["simulate", str(trace), "--workers", "1", "--scale-max", "4", "--worker-start", "5"]
    done = RUNNER.invoke(app, [*options, "--json"])
    assert done.exit_code == 0, done.stderr
    [run] = json.loads(done.stdout)["runs"]
    assert (run["workers"], run["workers_peak"]) == (1, 4)
    assert 1 < run["workers_mean"] < 4
    assert [change["num_workers"] for change in run["size_changes"]] == [2, 4]
    assert "4 workers: a request waits" in RUNNER.invoke(app, options).stdout
    assert RUNNER.invoke(app, [*options, "--scale-min", "9"]).exit_code != 0


@pytest.mark.parametrize(
    "options",
    [["--sweep", "colour=red"], ["--sweep", "workers=many"], ["--gpu", "abacus"], ["--policy", "best"]],
)
def test_simulate_refuses_what_it_does_not_know(options, tmp_path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"at": 0, "prompt_tokens": 9, "output_tokens": 2}')
    assert RUNNER.invoke(app, ["simulate", str(trace), *options]).exit_code != 0


def test_plan_finds_the_smallest_fleet(tmp_path):
    trace = tmp_path / "trace.jsonl"
    rows = [{"at": i / 10, "prompt_tokens": 4000, "output_tokens": 5} for i in range(60)]
    trace.write_text("\n".join(map(json.dumps, rows)))
    # A prompt takes 0.44 s of a worker and ten come a second.
    done = RUNNER.invoke(app, ["plan", str(trace), "--ttft-slo", "1.0", "--json"])
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    tried = {one["workers"]: one["slo_share"] for one in found["tried"]}
    assert 4 <= found["workers"] <= 6
    assert tried[found["workers"]] >= 0.95
    assert tried[found["workers"] - 1] < 0.95, "one less was tried and is not enough"
    assert "hold it" in RUNNER.invoke(app, ["plan", str(trace), "--ttft-slo", "1.0"]).stdout
    short = RUNNER.invoke(app, ["plan", str(trace), "--ttft-slo", "0.1", "--max-workers", "4"])
    assert short.exit_code != 0
    assert "do not hold it" in short.stdout
