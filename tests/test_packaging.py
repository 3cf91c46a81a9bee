"""What people install: the wheel is complete, its names are its own, and importing it is cheap."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

import octavo

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("protos", "scheduler", "kernels", "worker", "cluster", "deploy")
NOT_SOURCE = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info")
HEAVY = ("torch", "ray", "grpc", "transformers", "numba", "triton")


def python(code: str, *, executable: str = sys.executable, cwd: Path | None = None) -> str:
    """Standard output of `code`, run by a fresh interpreter that sees only what is installed."""
    done = subprocess.run(
        [executable, "-c", code],
        cwd=cwd,
        env=os.environ | {"PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def source_files(pattern: str) -> set[str]:
    """Files of ours as the wheel names them."""
    return {
        f"octavo/{path.relative_to(ROOT).as_posix()}"
        for folder in FOLDERS
        for path in (ROOT / folder).rglob(pattern)
        if "__pycache__" not in path.parts
    }


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that the working tree stays clean."""
    work = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT, work / "tree", symlinks=True, ignore=NOT_SOURCE)
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", work, work / "tree"],
        capture_output=True,
        check=True,
        timeout=240,
    )
    (built,) = work.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of an empty environment with the wheel; what it depends on is borrowed from this one."""
    venv = tmp_path_factory.mktemp("empty") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True, timeout=120)
    executable = venv / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", executable, "install", "--no-deps", "--no-index", wheel]
    subprocess.run(pip, capture_output=True, check=True, timeout=120)
    # A path file adds folders and nothing more: the editable install of ours in there stays inactive.
    site = venv / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    borrowed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (site / "borrowed.pth").write_text("\n".join(sorted(borrowed)))
    return executable


def test_wheel_has_every_module_and_data_file(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    for pattern in ("*.py", "*.pyi", "*.proto", "*.yaml", "*.json", "*.html", "*.js", "*.css"):
        assert source_files(pattern) <= names
    assert "octavo/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_wheel_brings_no_other_top_level_name(wheel):
    tops = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"octavo"}


def test_every_module_of_the_installed_wheel_imports(installed, tmp_path):
    code = """
import importlib, pkgutil, sys, octavo
assert octavo.__file__.startswith(sys.prefix), octavo.__file__
names = [m.name for m in pkgutil.walk_packages(octavo.__path__, "octavo.")]
for name in names:
    assert importlib.import_module(name).__file__.startswith(sys.prefix), name
print(*names)
"""
    imported = set(python(code, executable=str(installed), cwd=tmp_path).split())
    expected = {
        name[: -len(".py")].replace("/", ".").removesuffix(".__init__") for name in source_files("*.py")
    }
    assert expected <= imported


def test_console_script_of_the_installed_wheel(installed):
    script = installed.parent / "octavo"
    done = subprocess.run([script, "--version"], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == f"octavo {octavo.__version__}\n"


def bare_imports(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_bytes(), str(path))):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            modules = [node.module or ""]
        else:
            continue
        found += [f"{path}:{node.lineno} {name}" for name in modules if name.split(".")[0] in FOLDERS]
    return found


def test_nothing_imports_a_bare_name():
    files = [
        path
        for folder in (*FOLDERS, "octavo", "tests", "examples", "benchmarks", ".ci")
        for path in (ROOT / folder).rglob("*.py")
    ]
    assert len(files) > 50
    assert [line for path in files for line in bare_imports(path)] == []


@pytest.mark.skipif(sys.version_info < (3, 11), reason="PYTHONSAFEPATH is of Python 3.11")
@pytest.mark.parametrize("name", FOLDERS)
def test_bare_names_are_not_ours_in_the_repository_root(name):
    code = f"""
from importlib.util import find_spec
spec = find_spec({name!r})
print(spec and (spec.origin or list(spec.submodule_search_locations)))
"""
    assert str(ROOT / name) not in python(code, cwd=ROOT)


@pytest.mark.parametrize("name", [name for name in octavo.__all__ if name != "__version__"])
def test_public_names_import_nothing_heavy(name):
    code = f"import sys\nfrom octavo import {name}\nprint([m for m in {HEAVY} if m in sys.modules])"
    assert python(code) == "[]"


def test_command_line_help_imports_nothing_heavy():
    heavy = (*HEAVY, "httpx")
    code = f"import sys\nfrom octavo.cluster.cli import app\nprint([m for m in {heavy} if m in sys.modules])"
    assert python(code) == "[]"


def test_unknown_public_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        octavo.no_such_name  # noqa: B018


def test_changelog_knows_this_version():
    headings = [line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line.startswith("## [")]
    assert headings[0] == "## [Unreleased]"
    assert headings[1].startswith(f"## [{octavo.__version__}]")


def test_no_machine_path_is_in_the_constraints():
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and line[0] != "#"]
    assert len(lines) > 100
    assert all("==" in line and "/" not in line and "@" not in line and "+" not in line for line in lines)
