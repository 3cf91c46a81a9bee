"""The contest's own logic: what is still to run, ratios and verdicts, agreement; `make bench` forgets no benchmark."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import a module of `benchmarks/`, which is a folder of scripts and no package."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(BENCHMARKS)])

    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)  # dataclasses look their module up
        spec.loader.exec_module(module)
        return module

    return load


def make_run(contestant: str, round_number: int, others: float = 0.0, **seconds: float) -> dict[str, Any]:
    figures = {
        name: {"seconds": value, "output_tokens_per_second": 100 / value, "others": others}
        for name, value in seconds.items()
    }
    return {
        "contestant": contestant,
        "round": round_number,
        "start_seconds": 1.0,
        "figures": figures,
        "answers": {},
    }


def test_what_the_file_has_is_not_run_again(load: Any) -> None:
    contest = load("contest")
    half_done = make_run("octavo", 0, w1=10.0)
    half_done["figures"]["w2 new tails"] = {"others": 0.0}
    assert contest.missing("octavo", 0, ["w1", "w2", "w5"], [half_done]) == ["w5"]
    assert contest.missing("octavo", 1, ["w1", "w2", "w5"], [half_done]) == ["w1", "w2", "w5"]
    assert contest.missing("vllm", 0, ["w1"], [half_done]) == ["w1"]
    assert contest.missing("hf static", 0, ["w1", "w2", "w5"], []) == ["w1", "w5"]


def test_what_others_disturbed_is_run_again_and_counts_only_for_want_of_better(load: Any) -> None:
    contest, report = load("contest"), load("contest_report")
    runs = [make_run("octavo", 0, others=0.5, w1=20.0, w5=2.0), make_run("octavo", 1, w1=10.0)]
    assert contest.missing("octavo", 0, ["w1", "w5"], runs) == ["w1", "w5"]
    assert contest.missing("octavo", 1, ["w1"], runs) == []
    cells = report.figures_table(runs, ["octavo"])[2].split(" | ")
    runs += [make_run("vllm", 0, w1=20.0, w5=1.0)]
    verdicts = [row.split(" | ")[-1] for row in report.targets_table(runs)[2:]]
    assert verdicts == ["met |", "~missed |"]
    assert cells[1] == "10"
    assert "~50" in cells


def test_a_ratio_is_one_of_medians_against_the_best_peer(load: Any) -> None:
    report = load("contest_report")
    runs = [make_run("octavo", i, w1=seconds, w5=1.0) for i, seconds in enumerate((9.0, 10.0, 30.0))]
    runs += [make_run("vllm", i, w1=seconds, w5=0.5) for i, seconds in enumerate((11.0, 12.0, 13.0))]
    runs += [make_run("hf static", 0, w1=50.0, w5=5.0)]
    rows = report.targets_table(runs)
    assert "| octavo | W1, s | vllm | 1.20 | 1.25 | missed |" in rows
    assert "| octavo | W5, tokens/s | vllm | 0.50 | 1.00 | missed |" in rows
    assert not any("W4" in row or "int8" in row for row in rows), (
        "nothing is claimed where one side did not run"
    )
    figures = report.figures_table(runs, ["octavo", "hf static"])
    assert [row.split(" | ")[:2] for row in figures[2:]] == [
        ["| octavo", "10 (9 to 30)"],
        ["| hf static", "50"],
    ]


def test_every_target_names_contestants_and_figures_that_exist(load: Any) -> None:
    contest, report = load("contest"), load("contest_report")
    for target in report.TARGETS:
        assert {target.ours, *target.peers} <= set(contest.CONTESTANTS)
        for name in (target.ours, *target.peers):
            assert (BENCHMARKS / contest.CONTESTANTS[name].script).exists()


def test_agreement_counts_tokens_before_the_first_difference(load: Any) -> None:
    agreement = load("agreement").agreement
    ours = {"w1/a/0": [1, 2, 3, 4], "w1/b/0": [5, 6, 7, 8], "w4/a/0": [1]}
    theirs = {"w1/a/0": [1, 2, 3, 4], "w1/b/0": [5, 6, 9, 8], "w4/a/0": [2]}
    assert agreement(ours, theirs) == {"equal_answers": "1/2", "share_before_difference": 0.75}


def test_agreement_with_an_engine_that_streams_text(load: Any) -> None:
    agreement = load("agreement").agreement

    def decode(ids: list[int]) -> str:
        return "".join(chr(token) for token in ids)

    ours = {"w1/a/0": [97, 98, 0xFFFD], "w1/b/0": [97, 98, 99, 100]}
    theirs = {"w1/a/0": ["ab", ""], "w1/b/0": ["ab", "x", "", ""]}
    assert agreement(ours, theirs, decode) == {"equal_answers": "1/2", "share_before_difference": 0.667}


def test_every_benchmark_is_run_or_left_out_for_a_reason(load: Any) -> None:
    listed = load("all")
    names = listed.scripts()
    assert names[-1] == "contest"
    assert {"startup", "profile_step", "host_tier", "router_speed"} <= set(names)
    assert not set(names) & {*listed.PARTS, *listed.LEFT_OUT, "drive", "agreement", "contest_report"}
    for name in (*listed.PARTS, *listed.LEFT_OUT):
        assert (BENCHMARKS / f"{name}.py").exists()
