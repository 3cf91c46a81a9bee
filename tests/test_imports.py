"""Who may know whom (DESIGN 1), and that every module is known by somebody."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import grimp
import pytest

import octavo

ROOT = Path(__file__).resolve().parent.parent

ENTRY_POINTS = {
    "octavo.cluster.cli",  # the console script
    "octavo.cluster.cli.reference",  # writes docs/cli.md
    "octavo.cluster.config_docs",  # writes docs/configuration.md
    "octavo.cluster.metrics.dashboards",  # writes deploy/grafana
    "octavo.cluster.metrics.reference",  # writes the tables of docs/metrics.md
    "octavo.cluster.serve_app",  # named by Serve configs
    "octavo.kernels.aot",  # prints what each kernel needs of each GPU, without one
    "octavo.kernels.reference",  # the oracles of tests and benchmarks
    "octavo.kernels.reference_quantised",
    "octavo.kernels.reference_sampling",
    "octavo.protos.generate",  # make protos
    "octavo.protos.reference",  # writes docs/protos.md
}
"""Modules that are started by name and so need no importer."""


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph("octavo", cache_dir=None)


def test_import_rules_hold():
    script = Path(sys.executable).parent / "lint-imports"
    done = subprocess.run(
        [script, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout


def test_no_module_is_dead(graph):
    public = {octavo._HOME[name] for name in octavo._HOME}
    dead = {
        module
        for module in graph.modules
        if not graph.find_modules_that_directly_import(module)
        and not graph.find_children(module)
        and module not in ENTRY_POINTS | public
        and not (ROOT / module.removeprefix("octavo.").replace(".", "/") / "__init__.py").exists()
    }
    assert dead - {"octavo", "octavo._version"} == set()


@pytest.mark.parametrize(
    ("module", "never"),
    [
        ("octavo.cluster.engine", ("ray", "grpc")),
        ("octavo.scheduler.scheduler", ("ray", "grpc", "torch", "asyncio")),
        ("octavo.protos.types", ("google.protobuf", "grpc", "torch")),
    ],
)
def test_importing_pulls_in_nothing_it_must_not(module, never):
    code = f"import sys, {module}\nprint([name for name in {never} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
