"""Finds the blocks that all sequences of a step read first, and says whether one pass over them pays.

Pure; sharing shows in block tables, so nobody has to tell.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

SAVED_BYTES_MIN = 256 << 20
"""Of one layer's keys and values. A step with a pass over a prefix isn't replayed from a CUDA graph, and launching a
layer's dozen kernels costs the host some 60 microseconds, in which a device reads so much (data sheets, unmeasured)."""


def num_shared_blocks(
    block_tables: npt.NDArray[np.int32],
    context_lens: npt.NDArray[np.int32],
    cu_seqlens_q: npt.NDArray[np.int32],
    *,
    block_size: int,
    layer_block_bytes: int,
) -> int:
    """Whole blocks that begin every table and that this step does not write; 0 where reading them once would save too
    little. Arrays as in `FlatInputs`; `layer_block_bytes` of one block in one layer, keys and values."""
    num_seqs = len(context_lens)
    computed = int((context_lens - np.diff(cu_seqlens_q)).min()) // block_size
    if (num_seqs - 1) * computed * layer_block_bytes < SAVED_BYTES_MIN:
        return 0
    if (block_tables[:, 0] != block_tables[0, 0]).any():
        return 0
    differs = (block_tables[:, :computed] != block_tables[0, :computed]).any(axis=0)
    shared = int(differs.argmax()) if differs.any() else computed
    return shared if (num_seqs - 1) * shared * layer_block_bytes >= SAVED_BYTES_MIN else 0
