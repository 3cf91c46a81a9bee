"""A model that reads its context back out of the KV pool, and plans written by hand.

`FakeRunner` keeps token ids in the key slots and positions in the value slots, and makes logits from all tokens it
finds through the block tables: a wrong slot, block, copy or position changes the output or fails an assertion.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
import xxhash

from octavo.protos.structured_output import StructuredOutput
from octavo.protos.types import (
    ModelInfo,
    NewSequence,
    Request,
    SamplingParams,
    StepPlan,
    StepResult,
    WorkerInfo,
    finish_reason,
)
from octavo.worker.executor import Executor
from octavo.worker.forward_batch import ForwardBatch
from octavo.worker.grammars import Grammars
from octavo.worker.input_batch import InputBatch
from octavo.worker.kv_pool import KVPool, KVShape
from octavo.worker.plan_checks import BatchLimits
from octavo.worker.sampler import Sampler
from octavo.worker.swap import SwapSpace
from octavo.worker.vocabulary import Vocabulary

from .sampling_reference import draw, make_request

VOCAB = 64
BLOCK = 4
EOS = 2


def next_logits(context: list[int]) -> np.ndarray:
    """float32 [VOCAB], a pure function of all tokens before."""
    seed = xxhash.xxh64_intdigest(np.asarray(context, np.int32).tobytes())
    return np.random.default_rng(seed).normal(0, 2, VOCAB).astype(np.float32)


def allowed_after(outputs: list[int]) -> list[int]:
    """What the fake grammar lets come next: every third token, which ones depends on all before."""
    start = (sum(outputs) + len(outputs)) % 3
    return sorted({*range(start, VOCAB, 3), *([EOS] if len(outputs) > 2 else [])})


class FakeMatcher:
    """Implements `grammars.Matcher`."""

    def __init__(self, outputs=()) -> None:
        self.outputs = list(outputs)

    def accept(self, token: int) -> bool:
        allowed = token in allowed_after(self.outputs)
        self.outputs.append(token)
        return allowed

    def fill(self, words: np.ndarray, index: int) -> None:
        bits = np.zeros(VOCAB, np.uint8)
        bits[allowed_after(self.outputs)] = 1
        words[index] = np.packbits(bits, bitorder="little").view(np.int32)

    def fork(self) -> FakeMatcher:
        return FakeMatcher(self.outputs)


class FakeGrammars(Grammars):
    """Knows one grammar, whatever is asked for."""

    def __init__(self) -> None:
        super().__init__(lambda: Vocabulary((), (EOS,), None), "xgrammar")
        self._backend = self

    def _compile(self, wanted: StructuredOutput) -> type[FakeMatcher]:
        return FakeMatcher


def expected_tokens(request: Request, branch: int, max_tokens: int) -> list[int]:
    """What a branch must get, by the plain reference sampler."""
    context, outputs = request.prompt_token_ids.tolist(), []
    while True:
        logits = next_logits(context + outputs)
        if request.params.structured_output is not None:
            logits[np.setdiff1d(np.arange(VOCAB), allowed_after(outputs))] = -np.inf
        token = draw(logits, request, outputs, branch)
        outputs.append(token)
        if finish_reason(request, len(outputs), token, max_tokens):
            return outputs


class FakeRunner:
    """Checks what it is given, too. `poison` maps a context length to a value for its logits."""

    def __init__(self, kv: torch.Tensor) -> None:
        self.kv = kv
        self.kv.fill_(-7.0)
        self.poison: dict[int, float] = {}
        self.num_forwards = 0
        self.batch: ForwardBatch | None = None

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        self.batch, self.num_forwards = batch, self.num_forwards + 1
        num_tokens = len(batch.input_ids)
        assert batch.input_ids.dtype == batch.positions.dtype == batch.slot_mapping.dtype == torch.int64
        assert batch.block_tables.dtype == batch.context_lens.dtype == batch.cu_seqlens_q.dtype == torch.int32
        assert batch.positions.shape == batch.slot_mapping.shape == (num_tokens,)
        assert len(set(batch.slot_mapping.tolist())) == num_tokens
        assert batch.block_tables.shape[1] == -(-int(batch.context_lens.max()) // BLOCK)
        keys, values = self.kv[0, 0, :, 0, :, 0], self.kv[0, 1, :, 0, :, 0]
        blocks, offsets = batch.slot_mapping // BLOCK, batch.slot_mapping % BLOCK
        keys[blocks, offsets] = batch.input_ids.float()
        values[blocks, offsets] = batch.positions.float()
        bounds = batch.cu_seqlens_q.tolist()
        assert bounds[0] == 0
        assert bounds[-1] == num_tokens
        rows = {}
        wanted = set(batch.logit_rows.tolist())
        assert len(wanted) == len(batch.logit_rows)
        for s, length in enumerate(batch.context_lens.tolist()):
            table = batch.block_tables[s].long()
            context = keys[table].reshape(-1)[:length].int().tolist()
            assert values[table].reshape(-1)[:length].int().tolist() == list(range(length))
            assert batch.positions[bounds[s] : bounds[s + 1]].tolist() == list(
                range(length - bounds[s + 1] + bounds[s], length)
            )
            for row in wanted.intersection(range(bounds[s], bounds[s + 1])):
                rows[row] = next_logits(context[: length - (bounds[s + 1] - 1 - row)])
            if length in self.poison and bounds[s + 1] - 1 in rows:
                rows[bounds[s + 1] - 1][3] = self.poison[length]
        logits = [rows[row] for row in batch.logit_rows.tolist()]
        return torch.from_numpy(np.stack(logits) if logits else np.empty((0, VOCAB), np.float32))


def make_executor(
    *,
    num_blocks: int = 32,
    num_host_blocks: int = 16,
    max_num_seqs: int = 8,
    max_model_len: int = 64,
    max_num_batched_tokens: int = 64,
    sampler: Sampler | None = None,
    run_ahead: bool = False,
) -> tuple[Executor, FakeRunner]:
    shape = KVShape(num_layers=1, num_kv_heads=1, head_dim=1, block_size=BLOCK, dtype=torch.float32)
    pool = KVPool(shape, num_blocks=num_blocks, device=torch.device("cpu"))
    runner = FakeRunner(pool.kv)
    limits = BatchLimits(
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        vocab_size=VOCAB,
        block_size=BLOCK,
        num_host_blocks=num_host_blocks,
    )
    swap_space = SwapSpace(pool, num_blocks=num_host_blocks)
    swap_space.host.fill_(-9.0)
    info = WorkerInfo(
        worker_id="fake",
        model=ModelInfo(name="fake", vocab_size=VOCAB, max_model_len=max_model_len, eos_token_ids=(EOS,)),
        device="cpu",
        dtype="float32",
        block_size=BLOCK,
        num_blocks=num_blocks,
        num_host_blocks=num_host_blocks,
        max_num_seqs=max_num_seqs,
        kv_bytes_per_block=shape.bytes_per_block,
    )
    grammars = FakeGrammars()
    input_batch = InputBatch(limits, num_blocks=num_blocks, grammars=grammars)
    sampler = sampler or Sampler()
    executor = Executor(
        runner, pool, swap_space, input_batch, sampler, info, grammars=grammars, run_ahead=run_ahead
    )
    return executor, runner


def request_of(prompt, *, seed: int = 0, eos: bool = False, **params) -> Request:
    """Greedy, endless and of 30 tokens unless `params` say otherwise."""
    options = {"temperature": 0.0, "max_tokens": 30, "ignore_eos": not eos, **params}
    return make_request(SamplingParams(**options), prompt, seed=seed, eos_token_ids=(EOS,))


def new(row: int, request: Request, *, outputs=(), computed: int = 0, branch: int = 0) -> NewSequence:
    assert request.params.max_tokens is not None
    return NewSequence(
        row=row,
        request=request,
        branch=branch,
        max_tokens=request.params.max_tokens,
        token_ids=np.array([*request.prompt_token_ids.tolist(), *outputs], np.int32),
        num_computed_tokens=computed,
    )


def make_plan(
    step_id: int,
    *,
    epoch: int = 1,
    released=(),
    swaps_out=(),
    swaps_in=(),
    new=(),
    moves=(),
    updates=(),
    forks=(),
    copies=(),
    run=(),
    sample=None,
) -> StepPlan:
    """`run` is (row, start, number of tokens); `sample` is (row, index into run), by default each that runs."""

    def ints(values, width=0):
        array = np.array(list(values), np.int32)
        return array.reshape(-1, width) if width else array.reshape(-1)

    sample = [(row, index) for index, (row, _, _) in enumerate(run)] if sample is None else sample
    return StepPlan(
        step_id=step_id,
        epoch=epoch,
        released_rows=ints(released),
        swaps_out=ints(swaps_out, 2),
        swaps_in=ints(swaps_in, 2),
        new_sequences=tuple(new),
        beam_moves=ints(moves, 4),
        block_updates=ints(updates, 3),
        forks=ints(forks, 3),
        block_copies=ints(copies, 2),
        rows=ints(row for row, _, _ in run),
        num_tokens=ints(count for _, _, count in run),
        start_positions=ints(start for _, start, _ in run),
        sample_rows=ints(row for row, _ in sample),
        sample_indices=ints(index for _, index in sample),
    )


class Steps:
    """Numbers the plans and checks the executor after each one."""

    def __init__(self, executor: Executor, *, epoch: int = 1) -> None:
        self.executor = executor
        self.epoch = epoch
        self.last = 0

    def plan(self, **fields) -> StepPlan:
        return make_plan(self.last + 1, epoch=self.epoch, **fields)

    def run_plan(self, plan: StepPlan) -> StepResult:
        result = self.executor.execute(plan)
        self.last = plan.step_id
        assert (result.step_id, result.epoch) == (plan.step_id, plan.epoch)
        self.executor.check_integrity()
        return result

    def __call__(self, **fields) -> list[int]:
        return self.run_plan(self.plan(**fields)).token_ids.tolist()


def with_arrays(plan: StepPlan, **arrays) -> StepPlan:
    return replace(plan, **{name: np.array(value, np.int32) for name, value in arrays.items()})
