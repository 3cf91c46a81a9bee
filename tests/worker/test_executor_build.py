"""A worker from its configuration: what is refused by name, and a whole one around a tiny model."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from octavo.protos.errors import ConfigError
from octavo.protos.types import MAX_PROMPT_LOGITS
from octavo.worker import build
from octavo.worker.build import available_cpus, build_executor, choose_device
from octavo.worker.config import WorkerConfig
from octavo.worker.warmup import made_up_batch, num_blocks_of, worst_case_chunks

from .executor_support import make_plan, new, request_of


@pytest.fixture
def keep_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("gpu_memory_utilization", [0, 0.0, -0.1, 1.1, math.nan, math.inf, True, "0.9", 0.96]),
        ("quantization", ["int4", "", 4]),
        ("kv_cache_dtype", ["float8", "", None, 8]),
        ("device", ["gpu", "cuda:x", "cuda:", "cpu:0", 3]),
        ("dtype", ["fp32", "int8", None]),
        ("block_size", [0, -1, 1.5, True, None]),
        ("num_blocks", [0, -1, "9"]),
        ("num_host_blocks", [-1, 1.0, "9", True]),
        ("max_num_seqs", [0, 2**40]),
        ("max_num_batched_tokens", [0, -5, None]),
        ("max_model_len", [0, -1]),
        ("num_threads", [0, -1, 1.0]),
        ("model", ["", 7]),
        ("worker_id", ["", None]),
    ],
)
def test_d28_bad_options_are_refused_by_name(option, values):
    for value in values:
        with pytest.raises(ConfigError, match=option) as caught:
            WorkerConfig(**{"worker_id": "w", option: value})
        assert caught.value.param == option


def test_a_high_share_needs_to_be_insisted_on():
    config = WorkerConfig(worker_id="w", gpu_memory_utilization=0.98, allow_high_gpu_memory_utilization=True)
    assert config.gpu_memory_utilization == 0.98
    with pytest.raises(ConfigError, match="insist"):
        WorkerConfig(worker_id="w", gpu_memory_utilization=0.98)


def test_quantization_says_what_is_accepted():
    with pytest.raises(ConfigError, match="must be one of: None, fp16, int8; got 'awq'"):
        WorkerConfig(worker_id="w", quantization="awq")


def test_an_absent_device_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == choose_device("cpu") == torch.device("cpu")
    with pytest.raises(ConfigError, match="no CUDA device"):
        choose_device("cuda")


def test_cpus_heed_the_container(monkeypatch):
    assert available_cpus() >= 1
    monkeypatch.setattr(build.os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(build.Path, "read_text", lambda _: "150000 100000\n")
    assert available_cpus() == 2
    monkeypatch.setattr(build.Path, "read_text", lambda _: "max 100000\n")
    assert available_cpus() == 8


def test_made_up_batches_write_no_slot_twice():
    chunks = [(5, 3), (0, 9), (0, 1)]
    batch = made_up_batch(chunks, block_size=4, vocab_size=7, device=torch.device("cpu"))
    slots = batch.slot_mapping.tolist()
    assert len(set(slots)) == len(slots) == 13
    assert max(slots) < 4 * num_blocks_of(chunks, 4)
    assert batch.logit_rows.tolist() == [2, 11, 12]
    assert batch.context_lens.tolist() == [8, 9, 1]


@pytest.mark.parametrize(
    ("budget", "rows", "length"), [(512, 256, 8192), (64, 256, 8192), (512, 4, 100), (1, 1, 1)]
)
def test_the_worst_case_keeps_the_limits(budget, rows, length):
    chunks = worst_case_chunks(max_num_batched_tokens=budget, max_num_seqs=rows, max_model_len=length)
    assert sum(count for _, count in chunks) <= budget
    # Prompts whose log-probabilities are asked for have logits beside the sequences'.
    assert len(chunks) == min(rows + MAX_PROMPT_LOGITS, budget)
    assert all(1 <= count <= length for _, count in chunks)


def test_a_whole_worker_around_a_tiny_model(tiny_model_dir, keep_threads):
    config = WorkerConfig(
        worker_id="w7",
        model=str(tiny_model_dir("llama")),
        device="cpu",
        num_blocks=12,
        num_host_blocks=5,
        block_size=8,
        max_num_seqs=4,
        max_num_batched_tokens=32,
        max_model_len=100,
        num_threads=1,
    )
    executor = build_executor(config)
    info = executor.info
    assert torch.get_num_threads() == 1
    assert (info.worker_id, info.device, info.dtype) == ("w7", "cpu", "float32")
    assert (info.block_size, info.num_blocks, info.num_host_blocks, info.max_num_seqs) == (8, 12, 5, 4)
    assert info.kv_bytes_per_block == 3 * 2 * 2 * 8 * 16 * 4
    assert (info.model.vocab_size, info.model.max_model_len, info.model.eos_token_ids) == (128, 100, (2,))
    assert info.prefill_tokens_per_second > 0
    assert info.decode_step_seconds > 0
    assert info.host_link_bytes_per_second > 0
    request = request_of(list(range(3, 20)), logprobs=2)
    plan = make_plan(1, new=[new(0, request)], updates=[(0, 0, 4), (0, 1, 0), (0, 2, 9)], run=[(0, 0, 17)])
    result = executor.execute(plan)
    assert 0 <= result.token_ids[0] < 128
    assert np.isfinite(result.logprobs[0].logprob)
    assert result.logprobs[0].top_ids[0] == result.token_ids[0]
    executor.check_integrity()


def test_a_longer_limit_than_the_models_is_refused(tiny_model_dir, keep_threads):
    config = WorkerConfig(worker_id="w", model=str(tiny_model_dir("llama")), device="cpu", max_model_len=513)
    with pytest.raises(ConfigError, match="max_model_len 513 is more than the 512") as caught:
        build_executor(config)
    assert caught.value.param == "max_model_len"


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, "5000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)],
)
def test_openmp_threads_spin_briefly_unless_told_otherwise(given, expected):
    code = "import octavo.worker, os, sys; assert 'torch' not in sys.modules; print(os.environ.get('GOMP_SPINCOUNT'))"
    clean = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**clean, **given}, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str(expected)


def test_blocks_are_copied_once_before_anybody_is_served(tiny_model_dir, monkeypatch, keep_threads):
    """The kernel is compiled at its first call, which takes a second or two."""
    copied = []

    def copy_blocks(self, copies):
        copied.append(copies.tolist())

    monkeypatch.setattr(build.KVPool, "copy_blocks", copy_blocks)
    build_executor(WorkerConfig(worker_id="w", model=str(tiny_model_dir()), device="cpu", num_blocks=9))
    assert copied == [[[0, 8]]]
