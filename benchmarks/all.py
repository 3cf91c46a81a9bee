"""`make bench`: every benchmark in turn; with --peers the serving workloads on other engines, too, and ratios to ours.

    python benchmarks/all.py [--peers] [--only serving]

The serving workloads run where OCTAVO_GSM8K names GSM8K's test set. A benchmark that fails is told at the end, and the
others run all the same.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
SCRIPTS = {
    "startup": "startup.py",
    "scheduler": "scheduler_step.py",
    "blocks": "block_pool.py",
    "prefix-tree": "prefix_tree_cost.py",
    "host-tier": "host_tier.py",
    "preemption": "preemption_crossover.py",
    "router": "router_speed.py",
    "layout": "kv_layout.py",
    "profile": "profile_step.py",
    "quantization": "quantization.py",
    "serving": "contest.py",
}
LEFT_OUT = {
    "gpu.py": "needs a GPU, and runs alone",
    "router_traces.py": "needs recorded traces: --data FOLDER; a quarter of an hour",
}
OURS = "octavo,octavo budget 256,octavo int8"


def run(script: str, *arguments: str) -> bool:
    print(f"== {script} {' '.join(arguments)}".rstrip(), flush=True)
    return subprocess.run([sys.executable, str(HERE / script), *arguments], check=False).returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--only", choices=SCRIPTS)
    parser.add_argument("--rounds", type=int, default=3, help="of the serving workloads")
    parser.add_argument("--results", help="of the serving workloads, to go on with (see contest.py)")
    args = parser.parse_args()
    failed = []
    for name, script in SCRIPTS.items():
        if args.only not in (None, name):
            continue
        arguments = []
        if name == "serving":
            if "OCTAVO_GSM8K" not in os.environ:
                print("serving workloads left out: OCTAVO_GSM8K does not name GSM8K's test set")
                continue
            arguments = ["--rounds", str(args.rounds)]
            arguments += [] if args.peers else ["--contestants", OURS]
            arguments += ["--results", args.results] if args.results else []
        if not run(script, *arguments):
            failed.append(script)
    if args.only is None:
        for script, reason in LEFT_OUT.items():
            print(f"{script} left out: {reason}")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
