"""Memory of the machine, or of its container where that is less. Knows nothing of what it is used for."""

from __future__ import annotations

from pathlib import Path

import psutil

_LIMITS = (
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)
"""Files of control groups, version 2 and 1."""
_ROOT = Path("/sys/fs/cgroup")


def host_memory_bytes() -> tuple[int, int]:
    """(all that there is, what this process may still take)."""
    memory = psutil.virtual_memory()
    total, available = int(memory.total), int(memory.available)
    for limit_file, usage_file in _LIMITS:
        try:
            limit = int((_ROOT / limit_file).read_text())
            left = limit - int((_ROOT / usage_file).read_text())
        except (OSError, ValueError):  # not this kind of control group, or "max": no limit
            continue
        total, available = min(total, limit), min(available, max(0, left))
    return total, available
