"""How the GPU side runs: is it right, how near the hardware's limits, how fast are whole models.

    python benchmarks/gpu.py --out gpu.json              12 minutes at most, one GPU, no Ray, no network
    python benchmarks/gpu.py --only kernels,swap
    python benchmarks/gpu.py --dry-run                   the same code on tiny shapes, on a CPU, kernels interpreted

Every section runs in a process of its own with its share of the time, and writes what it has measured after each
case, which the report takes over every few seconds. A case that fails costs itself; one that breaks the device ends its
process, and another one goes on with the next case; one that hangs costs its section's rest. The sections are in
`gpu_*.py`. Shapes are those of Llama with 1 and 8 billion weights, which are random.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
# Without an installation, `octavo` is found in the checkout; nothing else there is to be importable by its bare name.
sys.path[:0] = [str(HERE), str(HERE.parent)]
import octavo  # noqa: E402, F401

sys.path.remove(str(HERE.parent))

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
_BROKEN = 3
"""Exit code of a section whose device no longer answers: after an illegal access all later calls of a process fail."""
_STARTS_MAX = 4

Note = Callable[[dict[str, Any]], None]
"""Takes the findings so far of a section that is under way."""


class Report:
    """Where a section puts what it finds. Written out after each case, so that a kill loses one case."""

    def __init__(self, path: Path, deadline: float, *, dry_run: bool) -> None:
        self.dry_run = dry_run
        self._path = path
        self._deadline = deadline
        self._found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        self._earlier = frozenset(self._found)
        """Cases of processes before this one."""

    def case(self, name: str, run: Any, *, again: bool = False) -> Any:
        """Note what `run()` returns, or how it failed; None when it failed, time is up, or an earlier process had it.

        again: what later cases need, so every process must run it.
        """
        if name in self._earlier and not again:
            return None
        if time.time() > self._deadline:
            self._found[name] = {"skipped": "out of time"}
            result = None
        else:
            # Left so by a case that ends the process.
            self._found[name] = {"error": "did not return"}
            self._write()
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
        self._write()
        if "error" in (self._found[name] or {}) and self._device_broken():
            if again:
                raise RuntimeError(f"the device broke in {name}, without which the rest cannot run")
            os._exit(_BROKEN)
        return result

    def _write(self) -> None:
        # Replaced whole: the parent may read at any time.
        whole = self._path.with_suffix(".new")
        whole.write_text(json.dumps(self._found))
        whole.replace(self._path)

    def _device_broken(self) -> bool:
        import torch

        if self.dry_run or not torch.cuda.is_available():
            return False
        try:
            torch.cuda.synchronize()
            torch.ones(1, device="cuda").item()
        except Exception:
            return True
        return False


def run_section(name: str, path: Path, seconds: float, *, dry_run: bool) -> None:
    """In the section's own process."""
    if dry_run:
        # Before the kernels are imported.
        os.environ["TRITON_INTERPRET"] = "1"
    report = Report(path, time.time() + seconds, dry_run=dry_run)
    importlib.import_module(SECTIONS[name][0]).run(report, name)


def start_section(name: str, seconds: float, *, dry_run: bool, note: Note = lambda _: None) -> dict[str, Any]:
    """Run a section in processes of its own and return its findings, whatever becomes of it."""
    started = time.time()
    with tempfile.TemporaryDirectory() as folder:
        path, output = Path(folder) / "section.json", Path(folder) / "output"

        def findings(end: str) -> dict[str, Any]:
            try:
                cases = json.loads(path.read_text())
            except (OSError, ValueError):
                cases = {}
            return {"end": end, "seconds": round(time.time() - started, 1), "cases": cases}

        end = ""
        for _ in range(_STARTS_MAX):
            left = seconds - (time.time() - started)
            command = [
                sys.executable,
                __file__,
                "--section",
                name,
                "--out",
                str(path),
                "--seconds",
                str(left),
            ]
            end = _run(command + ["--dry-run"] * dry_run, output, left, lambda: note(findings("under way")))
            if end != f"exit code {_BROKEN}":
                break
        error = output.read_text(errors="replace")[-3000:] if end != "ended" and output.exists() else ""
        return findings(end) | ({"output": error} if error else {})


def _run(command: list[str], output: Path, seconds: float, note: Callable[[], None]) -> str:
    """How the process ended; it is killed when it has not ended by itself. `note` is called every two seconds."""
    deadline = time.time() + seconds + _START_SECONDS
    with (
        output.open("w") as file,
        subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT) as process,
    ):
        while time.time() < deadline:
            try:
                code = process.wait(timeout=min(2.0, max(0.1, deadline - time.time())))
            except subprocess.TimeoutExpired:
                note()
            else:
                return f"exit code {code}" if code else "ended"
        process.kill()
    return "killed, out of time"


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
    # Less time for all is less for each, not none for the last.
    share = min(1.0, (arguments.seconds - _START_SECONDS) / sum(SECTIONS[name][1] for name in names))
    started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    result: dict[str, Any] = {"dry_run": arguments.dry_run, "started": started}

    def write(name: str, found: dict[str, Any]) -> None:
        result[name] = found
        whole = arguments.out.with_suffix(".new")
        whole.write_text(json.dumps(result, indent=1))
        whole.replace(arguments.out)

    for name in names:
        left = deadline - time.time() - _START_SECONDS
        if left < 5:
            write(name, {"end": "not started, out of time", "cases": {}})
            continue
        print(f"{name} ...", flush=True)
        seconds = min(share * SECTIONS[name][1], left)
        found = start_section(
            name, seconds, dry_run=arguments.dry_run, note=lambda found, n=name: write(n, found)
        )
        write(name, found)
        print(f"  {summary(found)}", flush=True)
    print(f"written to {arguments.out}")


if __name__ == "__main__":
    main()
