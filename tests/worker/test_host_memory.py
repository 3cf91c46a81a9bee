"""Memory of the machine as the worker may use it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from octavo.worker import host_memory


@pytest.mark.parametrize(
    ("limit", "expected"),
    [("max", (400, 100)), ("80", (80, 30)), ("40", (40, 0)), ("300", (300, 100)), ("500", (400, 100))],
)
def test_memory_heeds_the_container(monkeypatch, limit, expected):
    files = {"/sys/fs/cgroup/memory.max": limit, "/sys/fs/cgroup/memory.current": "50"}

    def read_text(path):
        if str(path) not in files:
            raise FileNotFoundError(path)
        return files[str(path)]

    monkeypatch.setattr(host_memory.Path, "read_text", read_text)
    monkeypatch.setattr(
        host_memory.psutil, "virtual_memory", lambda: SimpleNamespace(total=400, available=100)
    )
    assert host_memory.host_memory_bytes() == expected
