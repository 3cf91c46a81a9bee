"""The GPU benchmark's own logic, on tiny shapes: it runs where nobody watches, so it must not fail there first."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks" / "gpu.py"


def load():
    spec = importlib.util.spec_from_file_location("gpu_benchmark", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = before
    return module


def test_a_dry_run_measures_every_case_of_every_section(tmp_path):
    pytest.importorskip("triton")
    names = [name for name in load().SECTIONS if name != "engine_8b"]  # a dry run takes one model for both
    out = tmp_path / "gpu.json"
    done = subprocess.run(
        [sys.executable, SCRIPT, "--dry-run", "--out", out, "--only", ",".join(names)],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    for name in names:
        section = result[name]
        assert section["end"] == "ended", section
        assert section["cases"], name
        for case, found in section["cases"].items():
            assert "error" not in found, (name, case, found)
            assert "skipped" not in found, (name, case)
            assert found.get("right", True), (name, case, found)


def test_a_case_that_fails_and_a_case_too_late_cost_only_themselves(tmp_path):
    module = load()
    path = tmp_path / "section.json"
    report = module.Report(path, deadline=1e18, dry_run=True)
    assert report.case("fails", lambda: 1 // 0) is None
    assert report.case("works", lambda: {"value": 3}) == {"value": 3}
    late = module.Report(tmp_path / "late.json", deadline=0.0, dry_run=True)
    assert late.case("late", lambda: {"value": 3}) is None
    found = json.loads(path.read_text())
    assert found["fails"]["error"].startswith("ZeroDivisionError")
    assert found["works"] == {"value": 3}
    assert json.loads((tmp_path / "late.json").read_text()) == {"late": {"skipped": "out of time"}}
    assert "failed: fails" in module.summary({"end": "ended", "seconds": 1, "cases": found})


def test_a_section_that_hangs_is_killed_and_keeps_what_it_measured(tmp_path, monkeypatch):
    module = load()
    hanging = tmp_path / "hanging.py"
    hanging.write_text(
        "import pathlib, sys, time\n"
        "pathlib.Path(sys.argv[sys.argv.index('--out') + 1]).write_text('{\"first\": {}}')\n"
        "print('now', flush=True)\n"
        "time.sleep(60)\n"
    )
    monkeypatch.setattr(module, "__file__", str(hanging))
    monkeypatch.setattr(module, "_START_SECONDS", 0)
    found = module.start_section("swap", 2.0, dry_run=True)
    assert found["end"] == "killed, out of time"
    assert found["cases"] == {"first": {}}
    assert "now" in found["output"]


def test_a_case_that_breaks_the_device_ends_its_process_and_the_next_goes_on(tmp_path, monkeypatch):
    module = load()
    breaking = tmp_path / "breaking.py"
    breaking.write_text(
        "import importlib.util, pathlib, sys\n"
        f"spec = importlib.util.spec_from_file_location('gpu_benchmark', {str(SCRIPT)!r})\n"
        "module = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
        "path = pathlib.Path(sys.argv[sys.argv.index('--out') + 1])\n"
        "report = module.Report(path, 1e18, dry_run=False)\n"
        "report._device_broken = lambda: True\n"
        "report.case('limits', lambda: {'value': 1}, again=True)\n"
        "report.case('breaks', lambda: 1 // 0)\n"
        "report.case('works', lambda: {'value': 2})\n"
        "report.case('breaks too', lambda: 1 // 0)\n"
    )
    monkeypatch.setattr(module, "__file__", str(breaking))
    notes = []
    found = module.start_section("swap", 60.0, dry_run=True, note=notes.append)
    cases = found["cases"]
    assert found["end"] == "ended"
    assert list(cases) == ["limits", "breaks", "works", "breaks too"]
    assert cases["works"] == {"value": 2}
    assert "ZeroDivisionError" in cases["breaks"]["error"]
    assert "ZeroDivisionError" in cases["breaks too"]["error"]
