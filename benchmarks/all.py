"""`make bench`: every benchmark in turn; with --peers the serving workloads on other engines, and ratios to ours.

    python benchmarks/all.py [--peers] [--only serving]

The serving workloads run where OCTAVO_GSM8K names GSM8K's test set. A peer that cannot be installed or fails is
reported and left out.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SCRIPTS = (
    ("startup", "startup.py"),
    ("scheduler", "scheduler_step.py"),
    ("blocks", "block_pool.py"),
    ("preemption", "preemption_crossover.py"),
    ("layout", "kv_layout.py"),
    ("profile", "profile_step.py"),
    ("quantization", "quantization.py"),
)
PEERS = ("vllm_cpu.py", "llama_cpp.py", "hf_continuous.py", "hf_static.py")

Figures = dict[str, dict[str, float]]


def run(script: str, *arguments: str, capture: bool = False) -> str:
    print(f"== {script} {' '.join(arguments)}", flush=True)
    environment = dict(os.environ)
    if script.startswith("peers/"):
        environment.pop("PYTHONSAFEPATH", None)  # they find what they share beside themselves
    done = subprocess.run(
        [sys.executable, str(HERE / script), *arguments],
        check=True,
        env=environment,
        text=True,
        stdout=subprocess.PIPE if capture else None,
    )
    return done.stdout or ""


def serving(script: str, *arguments: str) -> Figures | None:
    """Figures by workload; None, and a line, if it failed."""
    try:
        lines = run(script, "--json", *arguments, capture=True).splitlines()
    except subprocess.CalledProcessError as error:
        print(f"{script} failed with {error.returncode}", flush=True)
        return None
    result: dict[str, Any] = next(json.loads(line) for line in lines if line.startswith('{"engine"'))
    print(json.dumps(result), flush=True)
    figures: Figures = result["figures"]
    return figures


def ratios(ours: Figures, theirs: Figures) -> str:
    """Their seconds over ours: above 1, ours is faster."""
    both = [name for name in ours if name in theirs]
    return "  ".join(f"{name} {theirs[name]['seconds'] / ours[name]['seconds']:.2f}" for name in both)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--only", choices=[name for name, _ in SCRIPTS] + ["serving"])
    parser.add_argument("--gguf", help="for llama.cpp: the model as a GGUF file")
    args = parser.parse_args()
    for name, script in SCRIPTS:
        if args.only in (None, name):
            run(script)
    if args.only not in (None, "serving"):
        return
    if "OCTAVO_GSM8K" not in os.environ:
        print("serving workloads left out: OCTAVO_GSM8K does not name GSM8K's test set")
        return
    ours = {name: serving("serving.py", *options) for name, options in _OURS.items()}
    if not args.peers:
        return
    from octavo.worker.loader import resolve_model

    folder = str(resolve_model().folder)
    for peer in PEERS:
        extra = ["--gguf", args.gguf] if peer == "llama_cpp.py" and args.gguf else []
        if peer == "llama_cpp.py" and not args.gguf:
            print("llama.cpp left out: --gguf names no file")
            continue
        theirs = serving(f"peers/{peer}", "--model-dir", folder, *extra)
        for name, figures in ours.items():
            if figures is not None and theirs is not None:
                print(f"{peer} seconds over Octavo {name}: {ratios(figures, theirs)}", flush=True)


_OURS: dict[str, tuple[str, ...]] = {"fp32": (), "int8": ("--quantization", "int8")}


if __name__ == "__main__":
    main()
