"""Runs W1 to W5 on any engine and reports what a user of it would see.

Owns the clock, the figures and the options that all engines' scripts share. An engine is two calls: `submit`, which
does not wait, and `poll`, which returns what has been made. Standard library only: peers use it from environments of
their own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from workloads import MAX_REPETITIONS, BenchRequest, Workloads, build

NAMES = ("w1", "w2", "w3", "w4", "w5")
STREAM_TOKENS_BEFORE_LONG = 16
SECONDS_MAX = 1800.0

Token = int | str
"""An id, or the piece of text of an engine that streams no ids."""
Emission = tuple[str, int, Sequence[Token], bool]
"""(request id, branch, new tokens, whether the branch has ended)."""
Figures = dict[str, dict[str, float]]
"""By workload, then by what was measured."""
Answers = dict[str, list[Token]]
"""Tokens by workload/request/branch."""


class BenchEngine(Protocol):
    def submit(self, request: BenchRequest) -> None: ...

    def poll(self) -> Iterable[Emission]:
        """Wait for something to happen, and return it."""
        ...


@dataclass
class Branch:
    """What came of one branch: its tokens and when each arrived, in seconds on one clock."""

    submitted: float
    wanted: int
    tokens: list[Token] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    ended: bool = False

    @property
    def first_token_seconds(self) -> float:
        return self.times[0] - self.submitted

    @property
    def gaps(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.times, self.times[1:], strict=False)]


@dataclass
class Run:
    seconds: float
    branches: dict[tuple[str, int], Branch]
    cores: float
    """CPU seconds of this process per second."""
    others: float
    """CPU seconds a second that the rest of the machine used: what disturbed this run."""

    @property
    def num_tokens(self) -> int:
        return sum(len(branch.tokens) for branch in self.branches.values())

    @property
    def first_token_seconds(self) -> float:
        return statistics.mean(branch.first_token_seconds for branch in self.branches.values())


def run(
    engine: BenchEngine,
    requests: Iterable[BenchRequest],
    late: Callable[[dict[tuple[str, int], Branch]], list[BenchRequest]] | None = None,
) -> Run:
    """Submit `requests` at once and wait for all. `late` may return more, once.

    Raises `RuntimeError` when a branch has another number of tokens than it was asked for, `TimeoutError` when it
    takes too long.
    """
    branches: dict[tuple[str, int], Branch] = {}
    started, cpu_started, machine_started = time.perf_counter(), _cpu_seconds(), _machine_cpu_seconds()

    def submit(request: BenchRequest) -> None:
        now = time.perf_counter()
        for branch in range(request.n):
            branches[request.id, branch] = Branch(now, request.max_tokens)
        engine.submit(request)

    for request in requests:
        submit(request)
    while not all(branch.ended for branch in branches.values()):
        emissions = list(engine.poll())
        now = time.perf_counter()
        for request_id, index, tokens, ended in emissions:
            branch = branches[request_id, index]
            branch.tokens += tokens
            branch.times += [now] * len(tokens)
            branch.ended |= ended
        if late is not None and (more := late(branches)):
            late = None
            for request in more:
                submit(request)
        if now - started > SECONDS_MAX:
            raise TimeoutError(f"unfinished after {SECONDS_MAX:.0f} s")
    seconds = time.perf_counter() - started
    cpu, machine = _cpu_seconds() - cpu_started, _machine_cpu_seconds() - machine_started
    for key, branch in branches.items():
        if len(branch.tokens) != branch.wanted:
            raise RuntimeError(f"{key} has {len(branch.tokens)} tokens instead of {branch.wanted}")
    return Run(seconds, branches, cores=cpu / seconds, others=max(0.0, machine - cpu) / seconds)


def _cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system


def _machine_cpu_seconds() -> float:
    """Of all processes, and what a hypervisor took away; 0 where /proc does not tell."""
    try:
        line = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0]
    except OSError:
        return 0.0
    user, nice, system, _idle, _iowait, *interrupts_and_steal = map(int, line.split()[1:9])
    return (user + nice + system + sum(interrupts_and_steal)) / os.sysconf("SC_CLK_TCK")


def measure(
    engine: BenchEngine, workloads: Workloads, names: Iterable[str] = NAMES
) -> Iterator[tuple[Figures, Answers]]:
    """Figures and answers of each of the workloads `names`, as it is done. `workloads` must be new to the engine."""
    run(engine, workloads.warm_up)
    if "w1" in names:
        yield _result(("w1", run(engine, workloads.w1)))
    if "w2" in names:
        cold, again = run(engine, workloads.w2), run(engine, workloads.w2)
        new_tails = run(engine, workloads.w2_new_tails)
        yield _result(("w2 cold", cold), ("w2 again", again), ("w2 new tails", new_tails))
    if "w3" in names:
        done, extra = _long_prompt_beside_streams(engine, workloads)
        yield _result(("w3", done), **extra)
    if "w4" in names:
        yield _result(("w4", run(engine, [workloads.w4])))
    if "w5" in names:
        yield _result(("w5", run(engine, [workloads.w5])))


def _result(*runs: tuple[str, Run], **extra: float) -> tuple[Figures, Answers]:
    figures = {
        name: {
            "seconds": done.seconds,
            "output_tokens_per_second": done.num_tokens / done.seconds,
            "first_token_seconds_mean": done.first_token_seconds,
            **extra,
            "cores": done.cores,
            "others": done.others,
        }
        for name, done in runs
    }
    answers = {
        f"{name}/{request_id}/{index}": branch.tokens
        for name, done in runs
        for (request_id, index), branch in done.branches.items()
    }
    return figures, answers


def _long_prompt_beside_streams(engine: BenchEngine, workloads: Workloads) -> tuple[Run, dict[str, float]]:
    long = workloads.w3_long

    def late(branches: dict[tuple[str, int], Branch]) -> list[BenchRequest]:
        ready = all(len(branch.tokens) >= STREAM_TOKENS_BEFORE_LONG for branch in branches.values())
        return [long] if ready else []

    done = run(engine, workloads.w3_streams, late)
    gaps = [
        gap
        for (request_id, _), branch in done.branches.items()
        if request_id != long.id
        for gap in branch.gaps
    ]
    return done, {
        "gap_ms_p50": 1e3 * statistics.median(gaps),
        "gap_seconds_max": max(gaps),
        "long_first_token_seconds": done.branches[long.id, 0].first_token_seconds,
    }


def options(description: str) -> argparse.ArgumentParser:
    """The options of every engine's script: data, workloads, repetition, form of the figures."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    data = os.environ.get("OCTAVO_GSM8K")
    parser.add_argument(
        "--gsm8k", type=Path, default=data, required=data is None, help="GSM8K's test set; or OCTAVO_GSM8K"
    )
    parser.add_argument("--workloads", default=",".join(NAMES))
    parser.add_argument("--repetition", type=int, choices=range(MAX_REPETITIONS), default=0)
    parser.add_argument("--json", action="store_true")
    return parser


def bench(
    name: str, start: Callable[[], BenchEngine], args: argparse.Namespace, without: Iterable[str] = ()
) -> None:
    """Start a peer, run the workloads that `args` names but those it cannot run, and print the figures."""
    started = time.perf_counter()
    engine = start()
    start_seconds = round(time.perf_counter() - started, 1)
    names = [workload for workload in args.workloads.split(",") if workload not in without]
    for figures, answers in measure(engine, build(args.gsm8k, args.model_dir, args.repetition), names):
        report(name, figures, answers, as_json=args.json, start_seconds=start_seconds)


def report(name: str, figures: Figures, answers: Answers, *, as_json: bool, **facts: Any) -> None:
    """One line of JSON, with the answers, or a line of text for each figure."""
    if as_json:
        print(json.dumps({"engine": name, **facts, "figures": figures, "answers": answers}), flush=True)
        return
    for workload, row in figures.items():
        line = "  ".join(f"{key} {value:.4g}" for key, value in row.items())
        print(
            f"{name}  {workload:13}{line}  " + "  ".join(f"{key} {value}" for key, value in facts.items()),
            flush=True,
        )
