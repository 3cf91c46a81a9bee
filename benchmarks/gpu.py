"""How the GPU side runs: is it right, how near the hardware's limits, how fast are whole models.

    python benchmarks/gpu.py --out gpu.json              12 minutes at most, one GPU, no Ray, no network
    python benchmarks/gpu.py --only kernels,swap
    python benchmarks/gpu.py --dry-run                   the same code on tiny shapes, on a CPU, kernels interpreted

Every section runs in a process of its own with its share of the time, and writes what it has measured after each
case: a kernel that hangs or breaks the device costs its section's rest, no more. The sections are in `gpu_*.py`.
Shapes are those of Llama with 1 and 8 billion weights, which are random.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

SECTIONS = {
    "device": ("gpu_device", 60),
    "correctness": ("gpu_correctness", 150),
    "kernels": ("gpu_kernels", 150),
    "engine_1b": ("gpu_engine", 120),
    "engine_8b": ("gpu_engine", 150),
    "swap": ("gpu_swap", 50),
}
"""Module and seconds of each; together below 12 minutes."""
SECONDS_MAX = 690
_START_SECONDS = 15
"""What a section may need to end once its time is up: a case is not interrupted by itself."""


class Report:
    """Where a section puts what it finds. Written out after each case, so that a kill loses one case."""

    def __init__(self, path: Path, deadline: float, *, dry_run: bool) -> None:
        self.dry_run = dry_run
        self._path = path
        self._deadline = deadline
        self._found: dict[str, Any] = {}

    def case(self, name: str, run: Any) -> Any:
        """Note what `run()` returns, or how it failed; None when it failed or time is up."""
        if time.time() > self._deadline:
            self._found[name] = {"skipped": "out of time"}
            result = None
        else:
            started = time.time()
            try:
                result = run()
                self._found[name] = result
            except Exception as error:  # the edge: compilers, drivers and memory fail in every way
                result = None
                trace = traceback.format_exc().strip().splitlines()[-12:]
                self._found[name] = {"error": f"{type(error).__name__}: {error}"[:2000], "trace": trace}
            if time.time() - started > 5 and isinstance(self._found[name], dict):
                self._found[name]["case_seconds"] = round(time.time() - started, 1)
        self._path.write_text(json.dumps(self._found))
        return result


def run_section(name: str, path: Path, seconds: float, *, dry_run: bool) -> None:
    """In the section's own process."""
    if dry_run:
        # Before the kernels are imported.
        os.environ["TRITON_INTERPRET"] = "1"
    report = Report(path, time.time() + seconds, dry_run=dry_run)
    importlib.import_module(SECTIONS[name][0]).run(report, name)


def start_section(name: str, seconds: float, *, dry_run: bool) -> dict[str, Any]:
    """Run a section in a process of its own and return its findings, whatever becomes of it."""
    started = time.time()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "section.json"
        command = [sys.executable, __file__, "--section", name, "--out", str(path), "--seconds", str(seconds)]
        end, error = "ended", ""
        try:
            done = subprocess.run(
                command + ["--dry-run"] * dry_run,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=seconds + _START_SECONDS,
            )
            if done.returncode:
                end, error = f"exit code {done.returncode}", done.stdout[-3000:]
        except subprocess.TimeoutExpired as late:
            end = "killed, out of time"
            output = late.stdout or b""
            error = (output.decode(errors="replace") if isinstance(output, bytes) else output)[-3000:]
        try:
            cases = json.loads(path.read_text())
        except (OSError, ValueError):
            cases = {}
    found = {"end": end, "seconds": round(time.time() - started, 1), "cases": cases}
    return found | ({"output": error} if error else {})


def summary(section: dict[str, Any]) -> str:
    """One line: how it ended, and which cases failed or gave a wrong result."""
    found = {name: case for name, case in section["cases"].items() if isinstance(case, dict)}
    failed = [name for name, case in found.items() if "error" in case]
    wrong = [name for name, case in found.items() if case.get("right") is False]
    words = [section["end"], f"{section['seconds']} s", f"{len(found)} cases"]
    words += [f"failed: {', '.join(failed)}"] * bool(failed) + [f"wrong: {', '.join(wrong)}"] * bool(wrong)
    return ", ".join(words)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("gpu.json"))
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, separated by commas")
    parser.add_argument("--seconds", type=float, default=SECONDS_MAX, help="for all sections together")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--section", choices=SECTIONS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.section:
        run_section(arguments.section, arguments.out, arguments.seconds, dry_run=arguments.dry_run)
        return
    names = arguments.only.split(",")
    unknown = sorted(set(names) - set(SECTIONS))
    if unknown:
        parser.error(f"no section {', '.join(unknown)}; there are {', '.join(SECTIONS)}")
    deadline = time.time() + arguments.seconds
    started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    result: dict[str, Any] = {"dry_run": arguments.dry_run, "started": started}
    for name in names:
        left = deadline - time.time() - _START_SECONDS
        if left < 5:
            result[name] = {"end": "not started, out of time", "cases": {}}
        else:
            print(f"{name} ...", flush=True)
            result[name] = start_section(name, min(SECTIONS[name][1], left), dry_run=arguments.dry_run)
            print(f"  {summary(result[name])}", flush=True)
        arguments.out.write_text(json.dumps(result, indent=1))
    print(f"written to {arguments.out}")


if __name__ == "__main__":
    main()
