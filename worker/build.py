"""Puts a worker together: device, threads, model, KV pool, swap space, calibration.

Owns the order of these and nothing that runs afterwards. Everything that can be wrong with configuration or model
ends here, as a `StartupError`, before a port opens.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
from functools import partial
from pathlib import Path

import numpy as np
import torch

from octavo.kernels.dispatch import QUANTISED, supported_dtypes
from octavo.protos.errors import ConfigError
from octavo.protos.types import ModelInfo, WorkerInfo
from octavo.worker.accelerate import accelerate
from octavo.worker.config import WorkerConfig
from octavo.worker.cuda_graphs import with_graphs
from octavo.worker.executor import Executor
from octavo.worker.fused import FusedDecoder
from octavo.worker.gpu_sampler import choose_sampler
from octavo.worker.grammars import Grammars
from octavo.worker.host_memory import host_memory_bytes
from octavo.worker.input_batch import InputBatch
from octavo.worker.kv_pool import (
    DeviceMemory,
    KVPool,
    KVShape,
    check_block_size,
    check_cuda_fit,
    cpu_num_blocks,
    cuda_num_blocks,
)
from octavo.worker.loader import LoadedModel, load_model, resolve_model
from octavo.worker.model import ModelRunner
from octavo.worker.plan_checks import BatchLimits
from octavo.worker.swap import STAGING_BLOCKS, SwapSpace, choose_num_host_blocks
from octavo.worker.vocabulary import read_vocabulary
from octavo.worker.warmup import (
    made_up_batch,
    measure_speed,
    measure_step_bytes,
    num_blocks_of,
    worst_case_chunks,
)

logger = logging.getLogger(__name__)


def build_executor(config: WorkerConfig) -> Executor:
    """Load the model, allocate the KV pool, measure, and return what runs plans.

    Sets the process's number of CPU threads. Raises `ConfigError` or `ModelLoadError`.
    """
    check_block_size(config.block_size)
    device = choose_device(config.device)
    set_num_threads(config.num_threads or available_cpus(), device)
    source = resolve_model(config.model)
    loaded = load_model(source, device=device, dtype=config.dtype)
    model = dataclasses.replace(
        loaded.info, max_model_len=choose_max_model_len(config.max_model_len, loaded.info)
    )
    dtype_name = str(loaded.dtype).removeprefix("torch.")
    if loaded.dtype not in supported_dtypes(device.type):
        accepted = ", ".join(str(dtype).removeprefix("torch.") for dtype in supported_dtypes(device.type))
        raise ConfigError(
            f"dtype on {device.type} must be one of {accepted}, got {dtype_name}", param="dtype"
        )
    decoder = accelerate(loaded, quantization=config.quantization)
    kv_shape = KVShape(
        num_layers=loaded.shape.num_layers,
        num_kv_heads=loaded.shape.num_kv_heads,
        head_dim=loaded.shape.head_dim,
        block_size=config.block_size,
        dtype=QUANTISED.get(config.kv_cache_dtype, loaded.dtype),
    )
    limits = BatchLimits(
        max_num_seqs=config.max_num_seqs,
        max_model_len=model.max_model_len,
        max_num_batched_tokens=config.max_num_batched_tokens,
        vocab_size=model.vocab_size,
        block_size=config.block_size,
    )
    num_blocks = _choose_num_blocks(config, limits, kv_shape, loaded, decoder)
    num_host_blocks = choose_num_host_blocks(
        config.num_host_blocks,
        kv_shape,
        num_device_blocks=num_blocks,
        available_bytes=host_memory_bytes()[1],
    )
    limits = dataclasses.replace(limits, num_host_blocks=num_host_blocks)
    kv_pool = KVPool(kv_shape, num_blocks=num_blocks, device=device)
    swap_space = SwapSpace(kv_pool, num_blocks=num_host_blocks)
    # Compiled now; otherwise the first request that goes on from inside a cached block waits for that.
    kv_pool.copy_blocks(np.array([[0, num_blocks - 1]], np.int32))
    runner = with_graphs(
        ModelRunner(loaded, kv_pool.layers, decoder),
        max_num_seqs=config.max_num_seqs,
        max_blocks_per_seq=-(-model.max_model_len // config.block_size),
        device=device,
    )
    speed = measure_speed(
        runner,
        device=device,
        block_size=config.block_size,
        vocab_size=model.vocab_size,
        max_tokens=min(config.max_num_batched_tokens, model.max_model_len, num_blocks * config.block_size),
    )
    info = WorkerInfo(
        worker_id=config.worker_id,
        model=model,
        device=str(device),
        dtype=dtype_name,
        block_size=config.block_size,
        num_blocks=num_blocks,
        num_host_blocks=num_host_blocks,
        max_num_seqs=config.max_num_seqs,
        kv_bytes_per_block=kv_shape.bytes_per_block,
        prefill_tokens_per_second=speed.prefill_tokens_per_second,
        decode_step_seconds=speed.decode_step_seconds,
        host_link_bytes_per_second=swap_space.measure_bandwidth(),
    )
    logger.info(
        "worker %s: %s on %s in %s, %d blocks of %d tokens in %s and %d on the host, %.0f prefill tokens/s, "
        "%.1f ms a decode step, %.1f GB/s to the host and back",
        info.worker_id,
        model.name,
        info.device,
        info.dtype,
        num_blocks,
        config.block_size,
        str(kv_shape.dtype).removeprefix("torch."),
        num_host_blocks,
        speed.prefill_tokens_per_second,
        speed.decode_step_seconds * 1e3,
        info.host_link_bytes_per_second / 1e9,
    )
    grammars = Grammars(
        partial(read_vocabulary, source.tokenizer_dir, model.vocab_size, model.eos_token_ids),
        config.guided_backend,
    )
    input_batch = InputBatch(limits, num_blocks=num_blocks, grammars=grammars)
    return Executor(runner, kv_pool, swap_space, input_batch, choose_sampler(device), info, grammars=grammars)


def choose_device(device: str) -> torch.device:
    """Resolve "auto", and give "cuda" an index. Raises `ConfigError` for a device that is not there."""
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(f"device {device} asked for, but torch finds no CUDA device", param="device")
    index = int(device.partition(":")[2] or torch.cuda.current_device()) if device != "auto" else 0
    if index >= torch.cuda.device_count():
        raise ConfigError(f"device {device} asked for; there are {torch.cuda.device_count()}", param="device")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def set_num_threads(num_threads: int, device: torch.device) -> None:
    """Give torch, and the CPU kernels which follow torch's number, so many threads."""
    if device.type == "cpu":
        # numba and torch share one OpenMP runtime, and numba resets its number when it starts its threads. Asking
        # numba for its number makes it start them now, so that what torch is told next stays.
        import numba

        numba.get_num_threads()
    torch.set_num_threads(num_threads)


def choose_max_model_len(asked: int | None, model: ModelInfo) -> int:
    """The model's limit, or a lower one. Raises `ConfigError` for a higher one."""
    if asked is not None and asked > model.max_model_len:
        raise ConfigError(
            f"max_model_len {asked} is more than the {model.max_model_len} that {model.name} was made for",
            param="max_model_len",
        )
    return asked or model.max_model_len


def available_cpus() -> int:
    """CPUs that this process may use: by affinity, and by its container's quota if that is less."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        count = min(count, math.ceil(int(quota) / int(period)))
    except (OSError, ValueError):  # no such control group, or "max": no quota
        pass
    return max(1, count)


def _choose_num_blocks(
    config: WorkerConfig,
    limits: BatchLimits,
    kv_shape: KVShape,
    loaded: LoadedModel,
    decoder: FusedDecoder | None,
) -> int:
    """Blocks of the pool: as asked, else what fits."""
    if loaded.device.type == "cpu":
        return config.num_blocks or cpu_num_blocks(
            kv_shape,
            available_bytes=host_memory_bytes()[1],
            max_num_seqs=limits.max_num_seqs,
            max_model_len=limits.max_model_len,
        )
    memory = _measure_cuda_memory(limits, kv_shape, loaded, decoder)
    if config.num_host_blocks != 0:
        staging = STAGING_BLOCKS * kv_shape.bytes_per_block
        memory = dataclasses.replace(memory, reserve=memory.reserve + staging)
    if config.num_blocks is not None:
        check_cuda_fit(kv_shape, memory, num_blocks=config.num_blocks, param="num_blocks")
        return config.num_blocks
    return cuda_num_blocks(kv_shape, memory, gpu_memory_utilization=config.gpu_memory_utilization)


def _measure_cuda_memory(
    limits: BatchLimits, kv_shape: KVShape, loaded: LoadedModel, decoder: FusedDecoder | None
) -> DeviceMemory:
    """Run a worst-case step in a pool just large enough for it, then let that pool go."""
    device = loaded.device
    used_by_us = torch.cuda.memory_allocated(device)
    chunks = worst_case_chunks(
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_num_seqs=limits.max_num_seqs,
        max_model_len=limits.max_model_len,
    )
    block_size, vocab_size = limits.block_size, limits.vocab_size
    pool = KVPool(kv_shape, num_blocks=num_blocks_of(chunks, block_size), device=device)
    runner = ModelRunner(loaded, pool.layers, decoder)
    batch = made_up_batch(chunks, block_size=block_size, vocab_size=vocab_size, device=device)
    try:
        reserve = measure_step_bytes(runner, batch, device=device, vocab_size=vocab_size)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"a step of {limits.max_num_batched_tokens} tokens does not fit into the device's free memory; "
            "lower max_num_batched_tokens or max_num_seqs",
            param="max_num_batched_tokens",
        ) from error
    # The model holds the trial pool until it is bound to another one.
    ModelRunner(loaded, KVPool(kv_shape, num_blocks=1, device=device).layers, decoder)
    del runner, pool, batch
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return DeviceMemory(total=total, free=free, used_by_us=used_by_us, reserve=reserve)
