"""Runs the property tests of the Triton kernels, each file in a process of its own.

Triton decides at import whether it compiles or interprets, so a file can't do it for itself in this process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

FILES = [
    "triton_fused.py",
    "triton_attention.py",
    "triton_quantised.py",
    "triton_sampling.py",
    "triton_model.py",
]


@pytest.mark.parametrize("name", FILES)
def test_interpreted_kernels_match_their_oracles(name: str) -> None:
    _run(name, interpret="1")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", FILES)
def test_kernels_on_the_gpu_match_their_oracles(name: str) -> None:
    _run(name, interpret="0")


def _run(name: str, *, interpret: str) -> None:
    path = Path(__file__).with_name(name)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", str(path)],
        env={**os.environ, "TRITON_INTERPRET": interpret},
        cwd=path.parents[2],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
