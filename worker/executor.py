"""Carries out step plans, one after the other.

Owns the order within a step: check and book the plan, swap out, swap in, copy blocks, forward, sample, book the
samples. Decode
inputs are the worker's own samples, so a plan may be sent while the one before it still runs; running plans in
order is all that this takes. Who may send plans, and over what, is the servicer's concern.
"""

from __future__ import annotations

import itertools
import time
from concurrent.futures import Future
from typing import Any, Protocol

import numpy as np
import torch

from octavo.protos.errors import UnavailableError
from octavo.protos.structured_output import StructuredOutput
from octavo.protos.types import (
    MASKED_TOKEN,
    CachedPrefix,
    PromptLogprobs,
    StepPlan,
    StepResult,
    TokenLogprobs,
    WorkerInfo,
)
from octavo.worker.forward_batch import ForwardBatch
from octavo.worker.grammars import Grammars
from octavo.worker.input_batch import FlatInputs, InputBatch, PreparedStep
from octavo.worker.kv_pool import KVPool
from octavo.worker.sampler import Sampler, Samples
from octavo.worker.staging import InputStaging
from octavo.worker.swap import SwapSpace


class Runner(Protocol):
    """`model.ModelRunner`, or whatever a test puts in its place."""

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Logits float32 [K, vocab] of the batch's `logit_rows`; its KV is in its slots afterwards."""
        ...


class Executor:
    """One device. All calls come from one thread at a time."""

    def __init__(
        self,
        runner: Runner,
        kv_pool: KVPool,
        swap_space: SwapSpace,
        input_batch: InputBatch,
        sampler: Sampler,
        info: WorkerInfo,
        grammars: Grammars | None = None,
    ) -> None:
        """`grammars`: those of `input_batch`."""
        self.info = info
        self._grammars = grammars
        self._runner = runner
        self._kv_pool = kv_pool
        self._swap_space = swap_space
        self._input_batch = input_batch
        self._sampler = sampler
        self._broken: str | None = None
        device = kv_pool.kv.device
        self._staging = InputStaging(device) if device.type == "cuda" else None

    @property
    def num_rows_in_use(self) -> int:
        return self._input_batch.num_rows_in_use

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step; returns when its tokens are known.

        Raises `PlanRejectedError` for a plan that breaks the ledger; nothing has changed then and the right plan
        may follow. Any other exception leaves KV and rows in doubt: every later plan is refused with
        `UnavailableError`. A sequence whose logits are not finite fails alone, in `row_errors`.
        """
        if self._broken is not None:
            raise UnavailableError(f"the worker stopped at an earlier step: {self._broken}")
        started = time.perf_counter()
        step = self._input_batch.prepare(plan)
        try:
            return self._run(plan, step, started)
        except Exception as error:
            self._broken = f"step {plan.step_id}: {type(error).__name__}: {error}"
            raise

    def compile_grammar(self, wanted: StructuredOutput) -> Future[Any]:
        """Make `wanted` ready beside the steps; may be called from any thread. The future raises what is wrong with
        it, an `OctavoError`."""
        assert self._grammars is not None
        return self._grammars.compile(wanted)

    def cached_prefixes(self) -> list[CachedPrefix]:
        """What the rows have in blocks: to be told, before `reset`, to whoever plans next."""
        return self._input_batch.cached_prefixes()

    def reset(self) -> None:
        """Forget all rows, as after start. Blocks keep their content."""
        self._input_batch.reset()

    def check_integrity(self) -> None:
        """Raise `IntegrityError` on a broken invariant of rows or blocks (rule R2)."""
        self._input_batch.check_integrity()
        self._kv_pool.check_integrity()
        self._swap_space.check_integrity()

    def _run(self, plan: StepPlan, step: PreparedStep, started: float) -> StepResult:
        inputs = None if step.inputs is None else self._to_device(step.inputs)
        prepared = time.perf_counter()
        self._swap_space.swap_out(plan.swaps_out)
        self._swap_space.swap_in(plan.swaps_in)
        swaps = len(plan.swaps_out) or len(plan.swaps_in)
        swap_seconds = time.perf_counter() - prepared if swaps else 0.0
        self._kv_pool.copy_blocks(plan.block_copies)
        logits = None if inputs is None else self._runner.forward(inputs)
        # A device that works by itself computes the logits meanwhile.
        masks = self._input_batch.masks(step)
        if self._kv_pool.kv.is_cuda:
            # Sampling would wait here anyhow; this way the seconds are booked where they were spent. For this stream
            # alone: blocks that are still on their way to the host hold nothing up.
            torch.cuda.current_stream(self._kv_pool.kv.device).synchronize()
        computed = time.perf_counter()
        samples = None
        if step.sampling is not None:
            assert logits is not None
            samples = self._sampler.sample(logits, step.sampling, masks)
            failed = np.zeros(len(samples.token_ids), np.bool_)
            failed[list(samples.errors)] = True
            self._input_batch.finish(step, samples.token_ids, failed)
        prompt_logprobs: list[TokenLogprobs] = []
        if step.prompts is not None:
            assert logits is not None
            prompt_logprobs = self._sampler.prompt_logprobs(logits, step.prompts)
        ended = time.perf_counter()
        return _result(
            plan,
            step,
            samples,
            prompt_logprobs,
            step_seconds=ended - started,
            parts_seconds={
                "prepare": prepared - started,
                "forward": computed - prepared - swap_seconds,
                "sample": ended - computed,
                **({"swap": swap_seconds} if swaps else {}),
            },
        )

    def _to_device(self, inputs: FlatInputs) -> ForwardBatch:
        arrays = (
            inputs.input_ids,
            inputs.positions,
            inputs.slot_mapping,
            inputs.block_tables,
            inputs.cu_seqlens_q,
            inputs.context_lens,
            inputs.logit_rows,
        )
        # One transfer from pinned memory where there is a bus to cross, no copy at all where there is none.
        if self._staging is not None:
            return ForwardBatch(*self._staging.upload(arrays))
        return ForwardBatch(*map(torch.from_numpy, arrays))


def _result(
    plan: StepPlan,
    step: PreparedStep,
    samples: Samples | None,
    prompt_logprobs: list[TokenLogprobs],
    *,
    step_seconds: float,
    parts_seconds: dict[str, float],
) -> StepResult:
    """Put the samples back among those that were masked."""
    token_ids = np.full(len(plan.sample_rows), MASKED_TOKEN, np.int32)
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    row_errors: tuple[tuple[int, str], ...] = ()
    if samples is not None:
        token_ids[step.samples] = samples.token_ids
        places = step.samples.tolist()
        row_errors = tuple((places[index], message) for index, message in sorted(samples.errors.items()))
        if samples.logprobs:
            spread: list[TokenLogprobs | None] = [None] * len(token_ids)
            for place, entry in zip(places, samples.logprobs, strict=True):
                spread[place] = entry
            logprobs = tuple(spread)
    found = iter(prompt_logprobs)
    return StepResult(
        step_id=plan.step_id,
        epoch=plan.epoch,
        token_ids=token_ids,
        logprobs=logprobs,
        prompt_logprobs=tuple(
            (chunk.index, PromptLogprobs(chunk.first, tuple(itertools.islice(found, chunk.count))))
            for chunk in (step.prompts.chunks if step.prompts is not None else ())
        ),
        row_errors=row_errors,
        step_seconds=step_seconds,
        parts_seconds=parts_seconds,
    )
