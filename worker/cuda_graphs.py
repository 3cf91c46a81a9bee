"""Decode steps replayed from CUDA graphs, so that their hundreds of launches cost the host one.

Owns the sizes that are recorded, the memory that recorded kernels read, and the padding of a step to the next size.
A step that isn't recorded, or whose sequences share a prefix worth a pass of its own, runs as it would without this.
What a step computes is the model's concern: everything it launches must depend on shapes alone, as Octavo's kernels do.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch

from octavo.worker.executor import Runner
from octavo.worker.forward_batch import ForwardBatch

logger = logging.getLogger(__name__)

SEQS_MAX = 256
"""Larger decodes keep the device busy long enough for the host to launch the next kernels meanwhile."""
_WARM_UPS = 2


def decode_sizes(max_num_seqs: int) -> list[int]:
    """Numbers of sequences to record: close together where a row costs a noticeable share of a step."""
    largest = min(max_num_seqs, SEQS_MAX)
    sizes = [*range(1, 4), *range(4, 16, 4), *range(16, 64, 8), *range(64, SEQS_MAX + 1, 32)]
    return [size for size in sizes if size < largest] + [largest]


class Recorder(Protocol):
    def record(self, run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """Something that does what `run` did, to the same memory, and returns the same tensor."""
        ...


class CudaRecorder:
    """Graphs that share one memory pool: they are never replayed at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for _ in range(
                _WARM_UPS
            ):  # compiles kernels and lets libraries allocate, which a graph can't hold
                run()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=stream):
            output = run()

        def replay() -> torch.Tensor:
            graph.replay()
            return output

        return replay


class GraphedRunner:
    """A `Runner` that replays decodes of up to `SEQS_MAX` sequences and hands all else to `runner`.

    Costs the device one set of inputs and of logits, and the activations of the largest decode.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        max_num_seqs: int,
        max_blocks_per_seq: int,
        device: torch.device,
        recorder: Recorder | None = None,
    ) -> None:
        self._runner = runner
        self._recorder = recorder or CudaRecorder(device)
        self._sizes = decode_sizes(max_num_seqs)
        self._inputs = _padding(self._sizes[-1], max_blocks_per_seq, device)
        self._replays: dict[int, Callable[[], torch.Tensor]] = {}
        self.num_replays = 0
        self.num_others = 0
        """Steps that were not recorded."""

    @torch.inference_mode()
    def record(self) -> None:
        """Record all sizes and check one against the model, while no block belongs to anyone (none is written).
        Takes about a second a size.

        A model that can't be recorded is run without: a warning says why.
        """
        largest = _first(self._inputs, self._sizes[-1])
        expected = self._runner.forward(largest)
        # The graphs share one output, or each would hold its own for good.
        output = torch.empty_like(expected)

        def run(batch: ForwardBatch) -> torch.Tensor:
            logits = self._runner.forward(batch)
            return output[: len(logits)].copy_(logits)

        try:
            # From the largest down, so that the pool is as large as it will be at once.
            for size in reversed(self._sizes):
                self._replays[size] = self._recorder.record(partial(run, _first(self._inputs, size)))
            replayed = self._replays[self._sizes[-1]]()
            torch.testing.assert_close(replayed, expected, rtol=0.05, atol=0.05, equal_nan=True)
        except (RuntimeError, AssertionError) as error:
            self._replays.clear()
            logger.warning("decodes run without CUDA graphs, since recording one failed: %s", error)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """As `ModelRunner.forward`, of a batch whose sequences all have tokens. Logits of a replay hold until the
        next step."""
        num_seqs = len(batch.context_lens)
        size = next((size for size in self._sizes if size >= num_seqs), None)
        is_decode = len(batch.input_ids) == num_seqs
        width = batch.block_tables.shape[1]
        if (
            not is_decode
            or batch.num_shared_blocks
            or size not in self._replays
            or width > self._inputs.block_tables.shape[1]
        ):
            self.num_others += 1
            return self._runner.forward(batch)
        self._fill(batch, num_seqs, size, width)
        logits = self._replays[size]()
        self.num_replays += 1
        if len(batch.logit_rows) == num_seqs:
            return logits[:num_seqs]
        return logits.index_select(0, batch.logit_rows)

    def _fill(self, batch: ForwardBatch, num_seqs: int, size: int, width: int) -> None:
        inputs = self._inputs
        inputs.input_ids[:num_seqs].copy_(batch.input_ids)
        inputs.positions[:num_seqs].copy_(batch.positions)
        inputs.slot_mapping[:num_seqs].copy_(batch.slot_mapping)
        inputs.context_lens[:num_seqs].copy_(batch.context_lens)
        # What stands past a sequence's blocks, from this step or an earlier one, is never read.
        inputs.block_tables[:num_seqs, :width].copy_(batch.block_tables)
        if num_seqs < size:
            # Rows of padding write nothing, and see one slot of a block that a table once named.
            inputs.slot_mapping[num_seqs:size] = -1
            inputs.context_lens[num_seqs:size] = 1


def with_graphs(
    runner: Runner, *, max_num_seqs: int, max_blocks_per_seq: int, device: torch.device
) -> Runner:
    """`runner` with its decodes recorded, where the device can record."""
    if device.type != "cuda":
        return runner
    graphed = GraphedRunner(
        runner, max_num_seqs=max_num_seqs, max_blocks_per_seq=max_blocks_per_seq, device=device
    )
    graphed.record()
    return graphed


def _padding(num_seqs: int, max_blocks_per_seq: int, device: torch.device) -> ForwardBatch:
    """A decode of `num_seqs` sequences that writes no block and reads the first slot of block 0, logits of all."""

    def zeros(*sizes: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.zeros(sizes, dtype=dtype, device=device)

    return ForwardBatch(
        input_ids=zeros(num_seqs),
        positions=zeros(num_seqs),
        slot_mapping=zeros(num_seqs) - 1,
        block_tables=zeros(num_seqs, max_blocks_per_seq, dtype=torch.int32),
        cu_seqlens_q=torch.arange(num_seqs + 1, dtype=torch.int32, device=device),
        context_lens=zeros(num_seqs, dtype=torch.int32) + 1,
        logit_rows=torch.arange(num_seqs, device=device),
    )


def _first(inputs: ForwardBatch, size: int) -> ForwardBatch:
    """The first `size` sequences, in the same memory."""
    return ForwardBatch(
        input_ids=inputs.input_ids[:size],
        positions=inputs.positions[:size],
        slot_mapping=inputs.slot_mapping[:size],
        block_tables=inputs.block_tables[:size],
        cu_seqlens_q=inputs.cu_seqlens_q[: size + 1],
        context_lens=inputs.context_lens[:size],
        logit_rows=inputs.logit_rows[:size],
    )
