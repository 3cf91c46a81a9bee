"""Where compiled CPU kernels are kept, how many threads they use, and that they run where they must."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import numba
import pytest
import torch

from octavo.kernels.cpu import runtime, warm_up

CALL_FROM_THREADS = """
import sys, threading
sys.modules["triton"] = None
import torch
from octavo.kernels import dispatch
assert "numba" not in sys.modules
failed = []
kv = torch.ones(1, 2, 4, 2, 16, 32)
def call():
    try:
        q = torch.ones(40, 4, 32)
        for _ in range(20):
            out = dispatch.paged_attention(
                q, kv[0, 0], kv[0, 1], block_tables=torch.tensor([[0, 1, 2]], dtype=torch.int32),
                cu_seqlens_q=torch.tensor([0, 40], dtype=torch.int32),
                context_lens=torch.tensor([40], dtype=torch.int32), scale=1.0)
            assert torch.allclose(out, torch.ones_like(out))
    except BaseException as error:
        failed.append(error)
threads = [threading.Thread(target=call) for _ in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert not failed, failed
import numba
print(numba.threading_layer())
"""


def test_threads_are_safe_on_the_layer_that_is_not_and_triton_is_not_needed() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CALL_FROM_THREADS],
        env={**os.environ, "NUMBA_THREADING_LAYER": "workqueue"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "workqueue"


@pytest.fixture
def fresh_cache_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    runtime.code_cache_dir.cache_clear()
    yield tmp_path / "cache"
    runtime.code_cache_dir.cache_clear()


def plus_one(x):
    return x + 1


def test_compiled_code_goes_to_the_users_cache_wherever_the_package_lies(fresh_cache_dir: Path) -> None:
    before = numba.config.CACHE_DIR
    assert runtime.compiled()(plus_one)(1) == 2
    assert list((fresh_cache_dir / "numba").rglob("*.nbc"))
    assert before == numba.config.CACHE_DIR


def test_without_a_cache_folder_kernels_still_compile(
    fresh_cache_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fresh_cache_dir.write_text("a file where the folder should be")
    assert runtime.code_cache_dir() is None
    assert runtime.compiled()(plus_one)(1) == 2
    assert "OCTAVO_CACHE" in caplog.text


def test_the_number_of_threads_is_torchs_in_every_thread() -> None:
    before = torch.get_num_threads()
    seen: list[int] = []
    try:
        torch.set_num_threads(1)
        thread = threading.Thread(target=lambda: seen.append(runtime.thread_count()))
        thread.start()
        thread.join()
        assert [*seen, runtime.thread_count(), numba.get_num_threads()] == [1, 1, 1]
        torch.set_num_threads(10_000)
        assert runtime.thread_count() == numba.config.NUMBA_NUM_THREADS
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_after_the_warm_up_nothing_compiles(dtype: torch.dtype) -> None:
    from octavo.kernels import dispatch
    from octavo.kernels.cpu import attention, kv_cache

    from .batches import Shape, ragged_batch

    warm_up(dtype, num_heads=9, num_kv_heads=3, head_dim=64, block_size=16)
    kernels = (attention.paged_attention_kernel, kv_cache.write_rows, kv_cache.copy_rows)
    compiled = [len(kernel.signatures) for kernel in kernels]
    for options in ({}, {"sliding_window": 4}, {"softcap": 2.0}):
        batch = ragged_batch([(3, 9), (1, 600)], Shape(dtype=dtype), strided=True)
        dispatch.paged_attention(**batch.arguments(), **options)
        dispatch.write_kv(
            batch.q[:, :2], batch.q[:, 2:4], batch.k_cache, batch.v_cache, torch.tensor([0, 1, 2, -1])
        )
    dispatch.copy_blocks(
        torch.zeros(1, 2, 2, 2, 8, 16, dtype=dtype), torch.tensor([[0, 1]], dtype=torch.int32)
    )
    assert [len(kernel.signatures) for kernel in kernels] == compiled
