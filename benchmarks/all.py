"""`make bench`: every benchmark in turn; with --peers the serving workloads on other engines, too, and ratios to ours.

    python benchmarks/all.py [--peers] [--only contest] [--list]

Runs every script of this folder that runs alone, a new one without being told. The serving workloads run where
OCTAVO_GSM8K names GSM8K's test set. A benchmark that fails is told at the end, and the others run all the same.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
CONTEST = "contest"
PARTS = ("all", "serving", "workloads")
"""Scripts that another one runs."""
LEFT_OUT = {
    "gpu": "needs a GPU, and runs alone",
    "router_traces": "needs recorded traces: --data FOLDER; a quarter of an hour",
}
OURS = "octavo,octavo budget 512,octavo int8"


def scripts() -> list[str]:
    """Names of all benchmarks, the contest last: it takes longest."""
    runnable = [
        path.stem
        for path in sorted(HERE.glob("*.py"))
        if 'if __name__ == "__main__":' in path.read_text(encoding="utf-8")
    ]
    return [name for name in runnable if name not in (*PARTS, *LEFT_OUT, CONTEST)] + [CONTEST]


def run(name: str, *arguments: str) -> bool:
    print(f"== {name} {' '.join(arguments)}".rstrip(), flush=True)
    return subprocess.run([sys.executable, str(HERE / f"{name}.py"), *arguments], check=False).returncode == 0


def main() -> None:
    names = scripts()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--only", choices=names)
    parser.add_argument("--list", action="store_true", help="run nothing")
    parser.add_argument("--rounds", type=int, default=3, help="of the contest")
    parser.add_argument("--results", help="of the contest, to go on with (see contest.py)")
    args = parser.parse_args()
    if args.list:
        print("\n".join([*names, *(f"{name}: left out, {reason}" for name, reason in LEFT_OUT.items())]))
        return
    failed = []
    for name in names if args.only is None else [args.only]:
        arguments = []
        if name == CONTEST:
            if "OCTAVO_GSM8K" not in os.environ:
                print("contest left out: OCTAVO_GSM8K does not name GSM8K's test set")
                continue
            arguments = ["--rounds", str(args.rounds)]
            arguments += [] if args.peers else ["--contestants", OURS]
            arguments += ["--results", args.results] if args.results else []
        if not run(name, *arguments):
            failed.append(name)
    if args.only is None:
        for name, reason in LEFT_OUT.items():
            print(f"{name} left out: {reason}")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
