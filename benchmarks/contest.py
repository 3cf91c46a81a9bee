"""Octavo and other engines on the same requests, in turn: medians, ratios, targets, agreement of answers.

    OCTAVO_GSM8K=FILE python benchmarks/contest.py [--rounds 3] [--contestants octavo,vllm] [--workloads w1,w5]
    python benchmarks/contest.py --results FILE --report                               print what FILE has

A round runs every contestant once on requests of the same lengths and of other text than the rounds before, each in
a process of its own and alone. Every workload is one line of the results file as soon as it is done, and what is in the
file is not run again, unless other processes disturbed it: a contest can be broken off, gone on with, and run in
parts. A contestant that cannot be installed or fails is told and left out. Peers install themselves on first use (see
`peers/environment.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # which PYTHONSAFEPATH leaves out

import contest_report
from drive import NAMES
from workloads import MAX_REPETITIONS

from octavo.worker.default_model import fetch_gguf
from octavo.worker.loader import resolve_model
from octavo.worker.model_cache import cache_root

HERE = Path(__file__).parent
ROUNDS = 3


@dataclass(frozen=True)
class Contestant:
    script: str
    arguments: tuple[str, ...] = ()
    workloads: tuple[str, ...] = NAMES
    rounds: int = ROUNDS
    """At most; fewer for those that take minutes and are far behind."""

    @property
    def is_peer(self) -> bool:
        return self.script.startswith("peers/")


CONTESTANTS = {
    "octavo": Contestant("serving.py"),
    "octavo budget 512": Contestant("serving.py", ("--budget", "512"), ("w1", "w3")),
    "octavo int8": Contestant("serving.py", ("--quantization", "int8")),
    "vllm": Contestant("peers/vllm_cpu.py"),
    "vllm zen": Contestant("peers/vllm_cpu.py", ("--zen",)),
    "vllm budget 256": Contestant("peers/vllm_cpu.py", ("--budget", "256"), ("w3",)),
    "vllm zen budget 256": Contestant("peers/vllm_cpu.py", ("--zen", "--budget", "256"), ("w3",)),
    "llama.cpp q4_1": Contestant("peers/llama_cpp.py"),
    "llama.cpp f32": Contestant("peers/llama_cpp.py", ("--f32",), rounds=1),
    "hf continuous": Contestant("peers/hf_continuous.py", workloads=("w1", "w2", "w3", "w5"), rounds=1),
    "hf static": Contestant("peers/hf_static.py", workloads=("w1", "w5"), rounds=1),
}

Run = dict[str, Any]
"""A line of the results file: contestant, round, engine, start_seconds, figures, answers."""


def read_results(path: Path) -> list[Run]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def missing(name: str, round_number: int, wanted: list[str], runs: list[Run]) -> list[str]:
    """Workloads that `name` still has to run in this round, or run again because it was disturbed."""
    done = {
        workload
        for run in runs
        if (run["contestant"], run["round"]) == (name, round_number)
        for workload in wanted
        if (rows := [row for key, row in run["figures"].items() if key.split()[0] == workload])
        and all(map(contest_report.is_quiet, rows))
    }
    return [
        workload for workload in CONTESTANTS[name].workloads if workload in wanted and workload not in done
    ]


def run_once(name: str, round_number: int, workloads: list[str]) -> Iterator[Run]:
    """One process; the figures of each workload as it is done. Raises `CalledProcessError` if the process failed."""
    contestant = CONTESTANTS[name]
    command = [sys.executable, str(HERE / contestant.script), *contestant.arguments, "--json"]
    command += ["--repetition", str(round_number), "--workloads", ",".join(workloads)]
    environment = dict(os.environ)
    if contestant.is_peer:
        command += ["--model-dir", str(resolve_model().folder)]
        environment.pop("PYTHONSAFEPATH", None)  # they find what they share beside themselves
        environment.pop("PYTHONPATH", None)
    if contestant.script == "peers/llama_cpp.py":
        command += ["--gguf", str(_gguf())]
    print(f"== round {round_number + 1}: {name} {','.join(workloads)}", flush=True)
    with subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith('{"engine"'):
                yield {
                    "contestant": name,
                    "round": round_number,
                    "time": int(time.time()),
                    **json.loads(line),
                }
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)


def _gguf() -> Path:
    """The default model's quantised weights, from which the folder of the others was made."""
    folder = cache_root() / "peers" / "gguf"
    found = sorted(folder.glob("*.Q4_1.gguf"))
    if found:
        return found[0]
    folder.mkdir(parents=True, exist_ok=True)
    return fetch_gguf(folder)


def hold(names: list[str], workloads: list[str], rounds: int, results: Path) -> None:
    """Run what is missing of the contest and append it to `results`."""
    runs = read_results(results)
    failed: set[str] = set()
    for round_number in range(rounds):
        for name in names:
            todo = missing(name, round_number, workloads, runs)
            if name in failed or not todo or round_number >= CONTESTANTS[name].rounds:
                continue
            try:
                for run in run_once(name, round_number, todo):
                    with results.open("a", encoding="utf-8") as stream:
                        stream.write(json.dumps(run) + "\n")
            except subprocess.CalledProcessError as error:
                print(f"{name} failed with {error.returncode}", flush=True)
                failed.add(name)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--contestants", default=",".join(CONTESTANTS), help="default: all")
    parser.add_argument("--workloads", default=",".join(NAMES))
    parser.add_argument("--rounds", type=int, choices=range(1, MAX_REPETITIONS + 1), default=ROUNDS)
    parser.add_argument("--results", type=Path, help="default: a new file in the cache folder")
    parser.add_argument("--report", action="store_true", help="run nothing")
    args = parser.parse_args()
    names = args.contestants.split(",")
    if unknown := set(names) - set(CONTESTANTS):
        parser.error(f"no such contestant: {', '.join(sorted(unknown))}; there are {', '.join(CONTESTANTS)}")
    results = args.results or cache_root() / "contests" / time.strftime("%Y%m%d-%H%M%S.jsonl")
    if not args.report:
        results.parent.mkdir(parents=True, exist_ok=True)
        hold(names, args.workloads.split(","), args.rounds, results)
    print(f"results of {results}:")
    contest_report.show(
        [run for run in read_results(results) if run["contestant"] in names], resolve_model().folder
    )


if __name__ == "__main__":
    main()
