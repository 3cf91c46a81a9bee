"""Host arrays to the device in one transfer that nobody waits for.

Owns the pinned memory and when it may be written again. A step's inputs are a dozen small arrays: sent one by one
from pageable memory, each costs a launch and a wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_ALIGNMENT = 16
_MIN_BYTES = 1 << 16


class _Slot:
    """One turn's memory: bytes on the host and as many on the device."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self.host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_cuda)
        self.device = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self.sent = torch.cuda.Event() if is_cuda else None
        """Reached when the host's memory may be written again; waiting for one never recorded is no wait."""


class InputStaging:
    """`depth` turns of memory, which grows to what is asked for. Calls come from one thread, on one stream."""

    def __init__(self, device: torch.device, *, depth: int = 2) -> None:
        self._device = device
        self._slots = [_Slot(_MIN_BYTES, device) for _ in range(depth)]

    def upload(self, arrays: Sequence[npt.NDArray[Any]]) -> list[torch.Tensor]:
        """`arrays` on the device, shapes and dtypes kept, in order behind what the current stream does.

        The tensors are views of staging memory: they hold until the call after next (for a depth of 2) is made, by
        which time what reads them must have been launched.
        """
        starts, end = [], 0
        for array in arrays:
            starts.append(end)
            end += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        slot = self._next_slot(end)
        memory = slot.host.numpy()
        for start, array in zip(starts, arrays, strict=True):
            memory[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        slot.device[:end].copy_(slot.host[:end], non_blocking=True)
        if slot.sent is not None:
            slot.sent.record(torch.cuda.current_stream(self._device))
        return [
            slot.device[start : start + array.nbytes].view(_torch_dtype(array)).view(array.shape)
            for start, array in zip(starts, arrays, strict=True)
        ]

    def _next_slot(self, num_bytes: int) -> _Slot:
        slot = self._slots.pop(0)
        if slot.sent is not None:
            slot.sent.synchronize()
        if len(slot.host) < num_bytes:
            slot = _Slot(1 << (num_bytes - 1).bit_length(), self._device)
        self._slots.append(slot)
        return slot


def _torch_dtype(array: npt.NDArray[Any]) -> torch.dtype:
    # torch knows few unsigned integers; their bits are what counts.
    signed = {np.dtype(np.uint64): np.dtype(np.int64), np.dtype(np.uint32): np.dtype(np.int32)}
    dtype = signed.get(array.dtype, array.dtype)
    return torch.from_numpy(np.empty(0, dtype)).dtype
