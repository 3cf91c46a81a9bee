"""The host memory that holds the KV of swapped requests, and the copies between it and the device.

Owns the host tensor, the order of copies against compute, and the measured bandwidth. Which block goes where is the
scheduler's concern, and `plan_checks.py` checks it.

On the CPU the host pool is a second tensor in the same memory and a swap is an ordinary copy: the path is the same,
and a request that was swapped has really been away.

On CUDA blocks cross the host link on a stream of their own, through staging blocks on the device:

- out: gathered into staging on the compute stream, hence after whatever wrote them and before whatever will; the slow
  way from staging to the host then runs beside the step's compute.
- in: brought into staging on the side stream, hence after every swap-out before it; the compute stream waits for that
  and scatters, hence before the step that needs it and after all earlier reads of the blocks it overwrites.

So the side stream touches only staging and host memory, the compute stream only staging and device memory, and an
event for each half of the staging says when its last user is done with it.
"""

from __future__ import annotations

import time
from typing import Protocol

import torch

from octavo.kernels import dispatch
from octavo.protos.errors import ConfigError, IntegrityError
from octavo.protos.types import Int32Array
from octavo.worker.kv_pool import KVPool, KVShape, gib

HOST_MEMORY_FRACTION = 0.10
"""Of available memory, where the number of host blocks is not given."""
STAGING_BLOCKS = 32
"""On CUDA: two halves, which take turns."""
_MEASURED_BLOCKS = 16
_MEASURE_REPEATS = 3


def choose_num_host_blocks(
    asked: int | None, shape: KVShape, *, num_device_blocks: int, available_bytes: int
) -> int:
    """As asked, else 10 % of available memory but no more blocks than the device has.

    Raises `ConfigError` for more than is available: pages that nobody can back would fail in the middle of a step.
    """
    if asked is None:
        fitting = int(available_bytes * HOST_MEMORY_FRACTION) // shape.bytes_per_block
        return min(num_device_blocks, fitting)
    needed = asked * shape.bytes_per_block
    if needed > available_bytes:
        raise ConfigError(
            f"num_host_blocks {asked} need {gib(needed)} of host memory, and "
            f"{gib(available_bytes)} are available",
            param="num_host_blocks",
        )
    return asked


class _Link(Protocol):
    """Carries whole blocks between `kv` and `blocks`; ids come in pairs that are known to be sound."""

    def out(self, device_ids: list[int], host_ids: list[int]) -> None: ...

    def back(self, host_ids: list[int], device_ids: list[int]) -> None: ...


class SwapSpace:
    """`num_blocks` host blocks beside one KVPool. Copies are carried out, or at least in order, once a call returns."""

    def __init__(self, kv_pool: KVPool, *, num_blocks: int) -> None:
        """Allocates without touching pages, except that CUDA's pinned memory is backed at once.

        Raises `ConfigError` where the memory cannot be had.
        """
        kv, shape = kv_pool.kv, kv_pool.shape
        self.num_blocks = num_blocks
        self.size_bytes = num_blocks * shape.bytes_per_block
        sizes = (num_blocks, *kv.shape[:2], *kv.shape[3:])
        try:
            # A block lies in one piece here, so that it crosses the link as one transfer.
            self._blocks = torch.empty(sizes, dtype=kv.dtype, pin_memory=kv.is_cuda and num_blocks > 0)
        except RuntimeError as error:
            raise ConfigError(
                f"num_host_blocks {num_blocks} need {gib(self.size_bytes)} of host memory, "
                "which cannot be allocated",
                param="num_host_blocks",
            ) from error
        self.host = self._blocks.movedim(0, 2)
        """[num_layers, 2, num_blocks, ...], like the device's."""
        self._kv = kv
        self._link: _Link = (
            _CudaLink(kv, self._blocks) if kv.is_cuda and num_blocks else _CpuLink(kv, self._blocks)
        )

    def swap_out(self, swaps: Int32Array) -> None:
        """`swaps` int32 [N, 2] (device block, host block): what later work of this thread does to the device blocks
        does not change what arrives."""
        if len(swaps):
            self._link.out(swaps[:, 0].tolist(), swaps[:, 1].tolist())

    def swap_in(self, swaps: Int32Array) -> None:
        """`swaps` int32 [N, 2] (host block, device block): later work of this thread finds the blocks there."""
        if len(swaps):
            self._link.back(swaps[:, 0].tolist(), swaps[:, 1].tolist())

    def measure_bandwidth(self) -> float:
        """Bytes per second of the link, both ways together; 0.0 without host blocks.

        Overwrites the first blocks of both pools: for a worker that holds nothing yet.
        """
        count = min(_MEASURED_BLOCKS, self.num_blocks, self._kv.shape[2])
        if count == 0:
            return 0.0
        ids = list(range(count))
        moved = 2 * count * self._blocks[0].nbytes
        # The first round touches the pages and is not counted.
        seconds = [self._round_trip_seconds(ids) for _ in range(1 + _MEASURE_REPEATS)][1:]
        return moved / max(min(seconds), 1e-9)

    def check_integrity(self) -> None:
        """Raise `IntegrityError` if the tensor is not the one that was allocated."""
        if self._blocks.shape[0] != self.num_blocks or self._blocks.nbytes != self.size_bytes:
            raise IntegrityError(
                f"the host pool has {self._blocks.shape[0]} blocks of {self._blocks.nbytes} bytes together; "
                f"{self.num_blocks} blocks of {self.size_bytes} bytes were allocated"
            )

    def _round_trip_seconds(self, ids: list[int]) -> float:
        started = time.perf_counter()
        self._link.out(ids, ids)
        self._link.back(ids, ids)
        if self._kv.is_cuda:
            # The way back waits for the way out, so this waits for both.
            torch.cuda.current_stream(self._kv.device).synchronize()
        return time.perf_counter() - started


class _CpuLink:
    def __init__(self, kv: torch.Tensor, blocks: torch.Tensor) -> None:
        self._kv = kv
        self._blocks = blocks

    def out(self, device_ids: list[int], host_ids: list[int]) -> None:
        for device_id, host_id in zip(device_ids, host_ids, strict=True):
            self._blocks[host_id].copy_(self._kv[:, :, device_id])

    def back(self, host_ids: list[int], device_ids: list[int]) -> None:
        for host_id, device_id in zip(host_ids, device_ids, strict=True):
            self._kv[:, :, device_id].copy_(self._blocks[host_id])


class _Staging:
    """Device memory for a few blocks, [n, num_layers, 2, ...]."""

    def __init__(self, size: int, kv: torch.Tensor) -> None:
        self.blocks = torch.empty((size, *kv.shape[:2], *kv.shape[3:]), dtype=kv.dtype, device=kv.device)
        self.idle = torch.cuda.Event()
        """Reached when the last user is done; waiting for one never recorded is no wait."""


class _CudaLink:
    """See the module. All calls come from the thread whose current stream computes."""

    def __init__(self, kv: torch.Tensor, blocks: torch.Tensor) -> None:
        self._kv = kv
        self._blocks = blocks
        self._side = torch.cuda.Stream(kv.device)
        self._half = STAGING_BLOCKS // 2
        self._staging = [_Staging(self._half, kv) for _ in range(2)]

    def out(self, device_ids: list[int], host_ids: list[int]) -> None:
        compute = torch.cuda.current_stream(self._kv.device)
        all_ids = self._index(device_ids)
        for start in range(0, len(device_ids), self._half):
            ids = all_ids[start : start + self._half]
            staging = self._next_staging()
            compute.wait_event(staging.idle)
            dispatch.gather_blocks(self._kv, ids, staging.blocks)
            self._side.wait_event(compute.record_event())
            with torch.cuda.stream(self._side):
                for index, host_id in enumerate(host_ids[start : start + self._half]):
                    self._blocks[host_id].copy_(staging.blocks[index], non_blocking=True)
                staging.idle.record(self._side)

    def back(self, host_ids: list[int], device_ids: list[int]) -> None:
        compute = torch.cuda.current_stream(self._kv.device)
        all_ids = self._index(device_ids)
        for start in range(0, len(host_ids), self._half):
            ids = all_ids[start : start + self._half]
            staging = self._next_staging()
            with torch.cuda.stream(self._side):
                self._side.wait_event(staging.idle)
                for index, host_id in enumerate(host_ids[start : start + self._half]):
                    staging.blocks[index].copy_(self._blocks[host_id], non_blocking=True)
                arrived = self._side.record_event()
            compute.wait_event(arrived)
            dispatch.scatter_blocks(staging.blocks, ids, self._kv)
            staging.idle.record(compute)

    def _next_staging(self) -> _Staging:
        self._staging.reverse()
        return self._staging[0]

    def _index(self, ids: list[int]) -> torch.Tensor:
        """On the device, without waiting for it: from pinned memory, which torch keeps until the copy is done."""
        index = torch.tensor(ids, dtype=torch.int64).pin_memory()
        return index.to(self._kv.device, non_blocking=True)
