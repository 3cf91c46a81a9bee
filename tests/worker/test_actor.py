"""The parts of the worker's Ray shell that need no Ray; the rest is in tests/cluster/test_service.py."""

import sys
from pathlib import Path

import octavo
from octavo.worker import actor

ROOT = Path(octavo.__file__).resolve().parent.parent


def test_the_checkout_is_taken_off_the_path(monkeypatch, tmp_path):
    """Otherwise `import kernels` in a worker would find ours, as transformers does when it probes."""
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(ROOT), *sys.path])
    before = list(sys.path)
    actor.hide_checkout()
    assert str(ROOT) not in sys.path
    assert [entry for entry in before if Path(entry or ".").resolve() != ROOT] == sys.path


def test_an_installed_package_leaves_the_path_alone(monkeypatch, tmp_path):
    (tmp_path / "octavo").mkdir()
    monkeypatch.setattr(octavo, "__file__", str(tmp_path / "octavo" / "__init__.py"))
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    before = list(sys.path)
    actor.hide_checkout()
    assert sys.path == before
