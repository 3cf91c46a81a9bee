"""An environment of its own for each peer, made on first use, and the options that all peers share.

A peer's script calls `enter` before it imports the peer: outside its environment this makes it (in
$OCTAVO_CACHE/peers or ~/.cache/octavo/peers; gigabytes for some) and starts the script again in it. Nothing is
installed into Octavo's own environment.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parent.parent
HUGGING_FACE = (
    "hf",
    ("transformers==5.24.*", "torch", "tokenizers"),
    ("--extra-index-url", "https://download.pytorch.org/whl/cpu"),
)
"""For `enter`: the environment of both ways in which transformers itself serves a batch."""


def enter(name: str, requirements: Sequence[str], pip_options: Sequence[str] = ()) -> None:
    """Return inside the peer's environment; elsewhere, replace this process by the same command in there."""
    sys.path.insert(0, str(BENCHMARKS))
    root = Path(os.environ.get("OCTAVO_CACHE") or Path.home() / ".cache" / "octavo") / "peers" / name
    if Path(sys.prefix) == root:
        return
    python = root / "bin" / "python"
    done = root / ".installed"
    if not done.exists():
        venv.create(root, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *pip_options, *requirements], check=True)
        done.touch()
    os.execv(python, [str(python), *sys.argv])


def options(description: str) -> argparse.ArgumentParser:
    """The options of every peer: data, model folder, workloads, repetitions, JSON."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gsm8k", type=Path, default=os.environ.get("OCTAVO_GSM8K"))
    parser.add_argument("--model-dir", type=Path, required=True, help="the model as a folder of safetensors")
    parser.add_argument("--workloads", default="w1,w2,w3,w4,w5")
    parser.add_argument("--repetition", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    return parser
