"""The Triton kernels: equal to their twins and oracles, and compiled for three generations of GPU without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

DIFFERENCE_MAX = {
    "torch.float32": 1e-5,
    # Outputs are below 4, where a unit in the last place is 2**-6 and 2**-9; the interpreter truncates.
    "torch.bfloat16": 2**-6,
    "torch.float16": 2**-9,
}


def _run_cases(environment: dict[str, str]) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("triton_cases.py"))],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def _assert_cases(cases: list[dict[str, Any]]) -> None:
    assert len(cases) == 21
    wrong = []
    for case in cases:
        limit = DIFFERENCE_MAX.get(case.get("dtype", ""))
        right = case["equal"] if limit is None else all(case[name] <= limit for name in ("twin", "oracle"))
        if not right:
            wrong.append(case)
    assert not wrong


def test_interpreted_kernels_equal_twin_and_oracle() -> None:
    _assert_cases(_run_cases({"TRITON_INTERPRET": "1"}))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_kernels_on_the_gpu_equal_twin_and_oracle() -> None:
    _assert_cases(_run_cases({"TRITON_INTERPRET": "0"}))


AHEAD_OF_TIME = """
import dataclasses, json
from octavo.kernels import aot, aot_variants
for variant in aot_variants.variants():
    for capability, shared_bytes_max in aot.SHARED_BYTES_MAX.items():
        used = aot.compile_variant(variant, capability)
        row = [variant.name, variant.reads_wide, capability, shared_bytes_max, dataclasses.asdict(used)]
        print(json.dumps(row))
"""


def test_every_variant_compiles_for_every_gpu_without_spills_and_fits() -> None:
    done = subprocess.run(
        [sys.executable, "-c", AHEAD_OF_TIME],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert {capability for _, _, capability, _, _ in rows} == {80, 90, 100}
    for name, reads_wide, capability, shared_bytes_max, used in rows:
        where = f"{name} on sm_{capability}: {used}"
        assert used["spill_bytes"] == 0, where
        assert 0 < used["registers"] <= 255, where
        assert used["shared_bytes"] <= shared_bytes_max, where
        assert used["load_bytes"] >= 16 or not reads_wide, where


def test_every_launcher_passes_what_compiles() -> None:
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("triton_launches.py"))],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "paged_attention_kernel": 12,
        "prefix_attention_kernel": 2,
        "merge_partials_kernel": 8,
        "write_kv_quantised_kernel": 8,
        "rms_norm_kernel": 2,
        "silu_mul_kernel": 1,
        "copy_blocks_kernel": 1,
        "swap_blocks_kernel": 2,
        "write_kv_kernel": 1,
        "write_kv_rope_kernel": 1,
        "sample_kernel": 1,
        "edit_logits_kernel": 3,
    }
    # Triton warns of a launch that leaves the fusion of multiply-adds to the environment.
    assert "FP_FUSION" not in done.stderr
