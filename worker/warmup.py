"""Steps that a worker runs before it serves: they compile kernels, measure speed, and measure memory.

Owns made-up batches; runs them on the model directly, while no block belongs to anyone. What they leave in the KV
pool is never read.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch

from octavo.protos.types import MAX_PROMPT_LOGITS
from octavo.worker.executor import Runner
from octavo.worker.forward_batch import ForwardBatch
from octavo.worker.sampler import Sampler, SamplingBatch

_PREFILL_TOKENS = (16, 64, 256, 1024)
"""Chunks to try in turn, the first unmeasured: it compiles kernels and touches pages."""
_PREFILL_SECONDS_LONG_ENOUGH = 0.1
_DECODE_REPEATS = 3


@dataclass(frozen=True, slots=True)
class Speed:
    prefill_tokens_per_second: float
    decode_step_seconds: float
    """One row, short context."""


def made_up_batch(
    chunks: list[tuple[int, int]], *, block_size: int, vocab_size: int, device: torch.device
) -> ForwardBatch:
    """Sequences of (tokens before, tokens now), each in blocks of its own from block 0 on, logits at each end."""
    starts = np.array([start for start, _ in chunks], np.int64)
    counts = np.array([count for _, count in chunks], np.int64)
    context_lens = starts + counts
    num_blocks = -(-context_lens // block_size)
    first_blocks = np.cumsum(num_blocks) - num_blocks
    tables = first_blocks[:, None] + np.arange(num_blocks.max())
    ends = np.cumsum(counts)
    positions = np.arange(ends[-1]) + np.repeat(starts - (ends - counts), counts)
    slots = np.repeat(first_blocks, counts) * block_size + positions

    def tensor(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(array).to(device=device, dtype=dtype)

    return ForwardBatch(
        input_ids=tensor(np.arange(ends[-1]) % vocab_size, torch.int64),
        positions=tensor(positions, torch.int64),
        slot_mapping=tensor(slots, torch.int64),
        # Past a sequence's end stand ids of other blocks, or of none; they are never read.
        block_tables=tensor(tables, torch.int32),
        cu_seqlens_q=tensor(np.concatenate([[0], ends]), torch.int32),
        context_lens=tensor(context_lens, torch.int32),
        logit_rows=tensor(ends - 1, torch.int64),
    )


def num_blocks_of(chunks: list[tuple[int, int]], block_size: int) -> int:
    """Blocks that `made_up_batch` writes into."""
    return sum(-(-(start + count) // block_size) for start, count in chunks)


def measure_speed(
    runner: Runner, *, device: torch.device, block_size: int, vocab_size: int, max_tokens: int
) -> Speed:
    """Time a chunk and a decode. `max_tokens` is what a chunk may have and the pool can hold, at least 1."""

    def seconds(chunk: tuple[int, int]) -> float:
        batch = made_up_batch([chunk], block_size=block_size, vocab_size=vocab_size, device=device)
        _synchronise(device)
        started = time.perf_counter()
        runner.forward(batch)
        _synchronise(device)
        return time.perf_counter() - started

    warm, *timed = _PREFILL_TOKENS
    seconds((0, min(warm, max_tokens)))
    num_tokens, prefill_seconds = 0, 0.0
    for num_tokens in timed:
        num_tokens = min(num_tokens, max_tokens)
        prefill_seconds = seconds((0, num_tokens))
        if num_tokens == max_tokens or prefill_seconds > _PREFILL_SECONDS_LONG_ENOUGH:
            break
    decode = (num_tokens - 1, 1)
    seconds(decode)
    decode_seconds = min(seconds(decode) for _ in range(_DECODE_REPEATS))
    return Speed(num_tokens / prefill_seconds, decode_seconds)


def worst_case_chunks(
    *, max_num_batched_tokens: int, max_num_seqs: int, max_model_len: int
) -> list[tuple[int, int]]:
    """The step that needs most memory beside KV: the whole budget, and logits for as many rows as can have them."""
    # Prompt tokens whose log-probabilities are asked for have logits beside the sequences'.
    num_rows = min(max_num_seqs + MAX_PROMPT_LOGITS, max_num_batched_tokens)
    longest = min(max_model_len, max_num_batched_tokens - num_rows + 1)
    return [(0, longest)] + [(0, 1)] * (num_rows - 1)


@torch.inference_mode()
def measure_step_bytes(runner: Runner, batch: ForwardBatch, *, device: torch.device, vocab_size: int) -> int:
    """Most CUDA memory that forwarding and sampling `batch` takes beyond what is held now, in bytes."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_reserved(device)
    num_rows = len(batch.logit_rows)
    sampling = SamplingBatch(
        logit_indices=np.arange(num_rows),
        greedy=np.zeros(num_rows, np.bool_),
        temperatures=np.ones(num_rows),
        top_ks=np.zeros(num_rows, np.int64),
        # Untruncated by any first candidates, so that the widest sort happens.
        top_ps=np.full(num_rows, 1.0 - 1e-9),
        min_ps=np.full(num_rows, 1e-9),
        seeds=np.zeros(num_rows, np.uint64),
        branches=np.zeros(num_rows, np.int32),
        positions=np.zeros(num_rows, np.int32),
        num_logprobs=np.full(num_rows, min(20, vocab_size), np.int32),
        edited=np.zeros(num_rows, np.bool_),
    )
    Sampler().sample(runner.forward(batch), sampling)
    _synchronise(device)
    peak = torch.cuda.max_memory_reserved(device)
    torch.cuda.empty_cache()
    return max(0, peak - before)


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
