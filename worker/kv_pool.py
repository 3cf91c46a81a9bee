"""The device memory that holds keys and values, in blocks: allocated once, sized from what is free.

Owns the one KV tensor, its views, and the arithmetic of how many blocks fit. Who uses a block is the scheduler's
concern, and `block_ledger.py` checks it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from octavo.kernels import dispatch
from octavo.kernels.layer_cache import LayerCache, plain_layers, quantised_block_bytes, quantised_layers
from octavo.protos.errors import ConfigError, IntegrityError
from octavo.protos.types import Int32Array

logger = logging.getLogger(__name__)

BLOCK_SIZE_USUAL = range(8, 65)
CPU_MEMORY_FRACTION = 0.25
"""Of available memory: prompt files, page cache, other workers and the rest of the machine need some too."""
GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class KVShape:
    """What a block is made of."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    """Of the numbers. One that `dispatch.QUANTISED` lists has scales beside them."""

    @property
    def is_quantised(self) -> bool:
        return self.dtype in dispatch.QUANTISED.values()

    @property
    def bytes_per_block(self) -> int:
        """All layers, K and V, scales included."""
        if self.is_quantised:
            return 2 * self.num_layers * quantised_block_bytes(**self.heads)
        return 2 * self.num_layers * self.num_kv_heads * self.block_size * self.head_dim * self.dtype.itemsize

    @property
    def heads(self) -> dict[str, int]:
        """What of a block is the same in every layer."""
        return {"num_kv_heads": self.num_kv_heads, "block_size": self.block_size, "head_dim": self.head_dim}


class KVPool:
    """`kv` is [num_layers, 2, num_blocks, num_kv_heads, block_size, head_dim]; [l, 0] keys, [l, 1] values. Of a
    quantised cache it is uint8 [num_layers, 2, num_blocks, bytes], the scales among the bytes: what moves whole blocks
    needs no other view. `layers` is what kernels read and write."""

    def __init__(self, shape: KVShape, *, num_blocks: int, device: torch.device) -> None:
        """Allocates without touching pages. Raises `ConfigError` where the memory cannot be had."""
        self.shape = shape
        self.num_blocks = num_blocks
        self.size_bytes = num_blocks * shape.bytes_per_block
        block: tuple[int, ...] = (shape.num_kv_heads, shape.block_size, shape.head_dim)
        dtype = shape.dtype
        if shape.is_quantised:
            block, dtype = (quantised_block_bytes(**shape.heads),), torch.uint8
        try:
            self.kv = torch.empty((shape.num_layers, 2, num_blocks, *block), dtype=dtype, device=device)
        except RuntimeError as error:  # torch.OutOfMemoryError is one too
            raise ConfigError(
                f"num_blocks {num_blocks} need {gib(self.size_bytes)} of KV cache on {device}, "
                "which cannot be allocated",
                param="num_blocks",
            ) from error

    @property
    def layers(self) -> tuple[LayerCache, ...]:
        if self.shape.is_quantised:
            return quantised_layers(self.kv, self.shape.dtype, **self.shape.heads)
        return plain_layers(self.kv)

    def copy_blocks(self, copies: Int32Array) -> None:
        """Copy whole blocks, all layers. `copies` int32 [C, 2] (source, destination)."""
        if len(copies):
            pairs = torch.tensor(copies)
            if self.kv.is_cuda:
                # From pinned memory nobody waits; torch keeps it until the copy is done.
                pairs = pairs.pin_memory().to(self.kv.device, non_blocking=True)
            dispatch.copy_blocks(self.kv, pairs)

    def check_integrity(self) -> None:
        """Raise `IntegrityError` if the tensor is not the one that was allocated."""
        if self.kv.shape[2] != self.num_blocks or self.kv.nbytes != self.size_bytes:
            raise IntegrityError(
                f"the KV tensor is {tuple(self.kv.shape)} of {self.kv.nbytes} bytes; "
                f"{self.num_blocks} blocks of {self.shape.bytes_per_block} bytes were allocated"
            )


def check_block_size(block_size: int) -> None:
    """Raise `ConfigError` below 1; warn where the size will cost the user something."""
    if block_size < 1:
        raise ConfigError(f"block_size must be at least 1, got {block_size}", param="block_size")
    if block_size < BLOCK_SIZE_USUAL.start:
        logger.warning(
            "block_size %d is below 8: block tables and the scheduler's work grow, and attention reads memory in "
            "pieces too short to be fast; 16 is usual",
            block_size,
        )
    elif block_size >= BLOCK_SIZE_USUAL.stop:
        logger.warning(
            "block_size %d is above 64: half a block is lost at the end of each sequence, and prefixes are shared "
            "in steps of %d tokens; 16 is usual",
            block_size,
            block_size,
        )


def cpu_num_blocks(shape: KVShape, *, available_bytes: int, max_num_seqs: int, max_model_len: int) -> int:
    """Blocks for a CPU worker: a share of available memory, but no more than all rows at full length can use.

    Raises `ConfigError` if not even one fits.
    """
    useful = max_num_seqs * -(-max_model_len // shape.block_size)
    fitting = int(available_bytes * CPU_MEMORY_FRACTION) // shape.bytes_per_block
    if fitting < 1:
        raise ConfigError(
            f"a KV block takes {gib(shape.bytes_per_block)}; {CPU_MEMORY_FRACTION:.0%} of the "
            f"{gib(available_bytes)} of available memory hold none (num_blocks overrides this)",
            param="num_blocks",
        )
    return min(useful, fitting)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """A GPU's memory at the time of sizing, in bytes."""

    total: int
    free: int
    """By the driver's account: what other processes hold is not in it."""
    used_by_us: int
    """Weights, already in place."""
    reserve: int
    """What a worst-case step needs beside weights and KV, measured."""


def cuda_num_blocks(shape: KVShape, memory: DeviceMemory, *, gpu_memory_utilization: float) -> int:
    """Blocks for a GPU worker: its share of the device, less weights and reserve.

    The share is of the device's total, so that the same option gives the same pool whoever else is there; but all
    of it must be free, or the worker would run out of memory later. Raises `ConfigError` with both figures if not.
    """
    share = int(memory.total * gpu_memory_utilization)
    num_blocks = (share - memory.used_by_us - memory.reserve) // shape.bytes_per_block
    if num_blocks < 1:
        raise ConfigError(
            f"gpu_memory_utilization {gpu_memory_utilization:g} of {gib(memory.total)} is {gib(share)}; weights "
            f"take {gib(memory.used_by_us)} and a step {gib(memory.reserve)}, which leaves no KV block",
            param="gpu_memory_utilization",
        )
    check_cuda_fit(shape, memory, num_blocks=num_blocks, param="gpu_memory_utilization")
    return num_blocks


def check_cuda_fit(shape: KVShape, memory: DeviceMemory, *, num_blocks: int, param: str) -> None:
    """Raise `ConfigError` naming `param` unless `num_blocks` and the reserve fit into what is free."""
    needed = num_blocks * shape.bytes_per_block + memory.reserve
    if needed > memory.free:
        raise ConfigError(
            f"{param} asks for {gib(needed)} ({num_blocks} KV blocks and {gib(memory.reserve)} for a step), but "
            f"only {gib(memory.free)} of {gib(memory.total)} are free; other processes may hold the rest",
            param=param,
        )


def gib(size_bytes: int) -> str:
    """For messages."""
    return f"{size_bytes / GIB:.2f} GiB" if size_bytes >= GIB / 100 else f"{size_bytes / 2**20:.2f} MiB"
