"""Section of `gpu.py`: the machine, and the limits that other sections measure against. Also their common tools."""

from __future__ import annotations

import importlib.metadata
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch


def device_of(report: Any) -> torch.device:
    return torch.device("cpu" if report.dry_run else "cuda")


class Timer:
    """Medians of repeated calls, caches of the device flushed before each."""

    def __init__(self, report: Any, *, repeats: int = 20, seconds_max: float = 1.0) -> None:
        self._device = device_of(report)
        self._repeats = 1 if report.dry_run else repeats
        self._seconds_max = seconds_max
        flushed = 0 if report.dry_run else 256 << 20
        self._flush = torch.empty(flushed, dtype=torch.int8, device=self._device)

    def median(self, run: Callable[[], Any], *, flush: bool = True) -> float:
        """Seconds of one call. At least three are timed, more while there is time."""
        run()
        if self._device.type != "cuda":
            started = time.perf_counter()
            run()
            return time.perf_counter() - started
        run()
        torch.cuda.synchronize()
        found = []
        ends = time.perf_counter() + self._seconds_max
        while len(found) < 3 or (len(found) < self._repeats and time.perf_counter() < ends):
            if flush:
                self._flush.zero_()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            run()
            end.record()
            end.synchronize()
            found.append(start.elapsed_time(end) / 1e3)
        return statistics.median(found)


def run(report: Any, _: str) -> None:
    report.case("machine", lambda: machine(report))
    report.case("limits", lambda: limits(report))


def machine(report: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"python": platform.python_version(), "cuda": torch.version.cuda}
    for package in ("torch", "triton", "transformers", "numpy"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "absent"
    if not report.dry_run:
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "name": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
            "free_bytes": torch.cuda.mem_get_info()[0],
        }
    return found


def limits(report: Any) -> dict[str, float]:
    """Bytes a second of a copy on the device (read plus written) and over the host link; flops of a product."""
    device, timer = device_of(report), Timer(report)
    size = 1 << (16 if report.dry_run else 30)
    source = torch.empty(size, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    pinned = torch.empty(size // 4, dtype=torch.int8, pin_memory=device.type == "cuda")
    width = 64 if report.dry_run else 8192
    a, b = (torch.randn(width, width, device=device).bfloat16() for _ in range(2))
    return {
        "copy_bytes_per_second": 2 * size / timer.median(lambda: target.copy_(source)),
        "to_host_bytes_per_second": len(pinned)
        / timer.median(lambda: pinned.copy_(source[: len(pinned)], non_blocking=True)),
        "to_device_bytes_per_second": len(pinned)
        / timer.median(lambda: target[: len(pinned)].copy_(pinned, non_blocking=True)),
        "bfloat16_flops_per_second": 2 * width**3 / timer.median(lambda: a @ b),
    }
