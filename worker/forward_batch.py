"""What one forward pass needs, tensors on the device. Owns the layout of the ragged batch and nothing else."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, slots=True, eq=False)
class ForwardBatch:
    """All tokens of one step in one row, sequence after sequence; chunks and decodes mixed.

    T tokens, S sequences, K rows that need logits; M is at least the blocks of the longest sequence.
    """

    input_ids: torch.Tensor
    """int64 [T]"""
    positions: torch.Tensor
    """int64 [T], position of each token in its own sequence"""
    slot_mapping: torch.Tensor
    """int64 [T], block id * block size + offset: where this token's KV goes; negative: nowhere (padding)"""
    block_tables: torch.Tensor
    """int32 [S, M]; what stands past a sequence's last block is never read"""
    cu_seqlens_q: torch.Tensor
    """int32 [S + 1], tokens of sequence s are rows cu_seqlens_q[s] .. cu_seqlens_q[s + 1]"""
    context_lens: torch.Tensor
    """int32 [S], tokens of each sequence including this step's"""
    logit_rows: torch.Tensor
    """int64 [K], indices into T"""
    num_shared_blocks: int = field(default=0, kw_only=True)
    """With so many blocks every table begins, whole and written before this step; 0: none worth a pass of their own"""
