"""Carries out step plans, one after the other.

Owns the order within a step: check and book the plan, swap out, swap in, copy blocks, forward, sample, book the
samples. Decode inputs are the worker's own samples, so a plan may be sent while the one before it still runs; running
plans in order is all that this takes. Where the device works by itself, the next step is even launched before this
one's tokens have reached the host, which then waits once a step, with the device busy. Who may send plans, and over
what, is the servicer's concern.
"""

from __future__ import annotations

import itertools
import time
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from octavo.protos.errors import PlanRejectedError, UnavailableError
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
from octavo.worker.input_batch import InputBatch
from octavo.worker.kv_pool import KVPool
from octavo.worker.prepared_step import FlatInputs, PreparedStep
from octavo.worker.sampler import PendingSamples, Sampler, Samples
from octavo.worker.shared_prefix import num_shared_blocks
from octavo.worker.staging import InputStaging
from octavo.worker.swap import SwapSpace

_Mark = float | torch.cuda.Event
"""A time: the host's, or when the compute stream came by."""


class Runner(Protocol):
    """`model.ModelRunner`, or whatever a test puts in its place."""

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Logits float32 [K, vocab] of the batch's `logit_rows`; its KV is in its slots afterwards."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class _Running:
    """A step whose work has been launched."""

    plan: StepPlan
    step: PreparedStep
    pending: PendingSamples | None
    """None: nothing is sampled."""
    prompt_logprobs: list[TokenLogprobs]
    """Of `step.prompts`."""
    started: float
    prepared: float
    swap_seconds: float
    reached: _Mark
    """Start and end of the forward pass."""
    computed: _Mark


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
        *,
        grammars: Grammars | None = None,
        run_ahead: bool | None = None,
    ) -> None:
        """`grammars`: those of `input_batch`. `run_ahead`: whether `execute` heeds `following`; None: where the device
        works by itself."""
        self.info = info
        self._runner = runner
        self._kv_pool = kv_pool
        self._swap_space = swap_space
        self._input_batch = input_batch
        self._sampler = sampler
        self._grammars = grammars
        self._broken: str | None = None
        device = kv_pool.kv.device
        self._staging = InputStaging(device) if device.type == "cuda" else None
        self.runs_ahead = device.type == "cuda" if run_ahead is None else run_ahead
        self._ahead: _Running | None = None
        """The step that was launched ahead, whose turn is next."""
        self._ended = 0.0

    @property
    def num_rows_in_use(self) -> int:
        return self._input_batch.num_rows_in_use

    @torch.inference_mode()
    def execute(self, plan: StepPlan, following: StepPlan | None = None) -> StepResult:
        """Run one step; returns when its tokens are known.

        following: the plan behind it, if it is there already. It may then be launched before this step's tokens are
        waited for, where it needs none of them on the host.

        Raises `PlanRejectedError` for a plan that breaks the ledger; nothing has changed then and the right plan
        may follow. Any other exception leaves KV and rows in doubt: every later plan is refused with
        `UnavailableError`. A sequence whose logits are not finite fails alone, in `row_errors`.
        """
        if self._broken is not None:
            raise UnavailableError(f"the worker stopped at an earlier step: {self._broken}")
        running, self._ahead = self._ahead, None
        if running is None or running.plan is not plan:
            assert running is None, (
                f"step {running.plan.step_id} was launched ahead, {plan.step_id} comes instead"
            )
            started = time.perf_counter()
            step = self._input_batch.prepare(plan)
        try:
            if running is None:
                running = self._launch(plan, step, started, None)
            if following is not None and self.runs_ahead:
                self._ahead = self._launch_ahead(running, following)
            return self._finish(running)
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
        self._ahead = None
        self._input_batch.reset()

    def check_integrity(self) -> None:
        """Raise `IntegrityError` on a broken invariant of rows or blocks (rule R2)."""
        self._input_batch.check_integrity()
        self._kv_pool.check_integrity()
        self._swap_space.check_integrity()

    def _launch_ahead(self, before: _Running, plan: StepPlan) -> _Running | None:
        """Launch `plan` behind `before`; None where it must wait for its tokens or is wrong: then it gets its turn."""
        if before.pending is None or not self._input_batch.can_run_ahead(plan, before.step):
            return None
        started = time.perf_counter()
        self._input_batch.assume(before.step)
        try:
            step = self._input_batch.prepare(plan)
        except PlanRejectedError:
            return None
        return self._launch(plan, step, started, before.pending)

    def _launch(
        self, plan: StepPlan, step: PreparedStep, started: float, before: PendingSamples | None
    ) -> _Running:
        """Queue all of a step's work. `before`: samples of the step before, if the host doesn't know them yet."""
        inputs = None if step.inputs is None else self._to_device(step.inputs, before)
        prepared = time.perf_counter()
        self._swap_space.swap_out(plan.swaps_out)
        self._swap_space.swap_in(plan.swaps_in)
        swaps = len(plan.swaps_out) or len(plan.swaps_in)
        swap_seconds = time.perf_counter() - prepared if swaps else 0.0
        self._kv_pool.copy_blocks(plan.block_copies)
        reached = self._mark()
        logits = None if inputs is None else self._runner.forward(inputs)
        computed = self._mark()
        # A device that works by itself computes the logits meanwhile.
        masks = self._input_batch.masks(step)
        pending, prompt_logprobs = None, []
        if step.sampling is not None:
            assert logits is not None
            pending = self._sampler.start(logits, step.sampling, masks)
        if step.prompts is not None:
            # Waited for here: the next step overwrites the logits.
            assert logits is not None
            prompt_logprobs = self._sampler.prompt_logprobs(logits, step.prompts)
        return _Running(
            plan, step, pending, prompt_logprobs, started, prepared, swap_seconds, reached, computed
        )

    def _finish(self, running: _Running) -> StepResult:
        """Wait for a step's tokens and book them."""
        step, samples, counts = running.step, None, None
        if running.pending is not None:
            samples = running.pending.result()
            failed = np.zeros(len(samples.token_ids), np.bool_)
            failed[list(samples.errors)] = True
            counts = self._input_batch.finish(step, samples.token_ids, failed)
        forward_seconds = _seconds_between(running.reached, running.computed)
        # What was launched ahead is this step's own from when the step before was done.
        started = max(running.started, self._ended)
        prepared = max(running.prepared, started)
        swap_seconds = running.swap_seconds if running.prepared >= started else 0.0
        self._ended = ended = time.perf_counter()
        forward_seconds = min(forward_seconds, ended - prepared - swap_seconds)
        return _result(
            running.plan,
            step,
            samples,
            counts,
            running.prompt_logprobs,
            step_seconds=ended - started,
            parts_seconds={
                "prepare": prepared - started,
                "forward": forward_seconds,
                "sample": ended - prepared - swap_seconds - forward_seconds,
                **(
                    {"swap": swap_seconds}
                    if len(running.plan.swaps_out) or len(running.plan.swaps_in)
                    else {}
                ),
            },
        )

    def _mark(self) -> _Mark:
        device = self._kv_pool.kv.device
        if device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
        return event

    def _to_device(self, inputs: FlatInputs, before: PendingSamples | None) -> ForwardBatch:
        arrays = (
            inputs.input_ids,
            inputs.positions,
            inputs.slot_mapping,
            inputs.block_tables,
            inputs.cu_seqlens_q,
            inputs.context_lens,
            inputs.logit_rows,
            inputs.late_places,
            inputs.late_samples,
        )
        shared = 0
        # One transfer from pinned memory where there is a bus to cross, no copy at all where there is none.
        if self._staging is not None:
            *tensors, late_places, late_samples = self._staging.upload(arrays)
            shared = num_shared_blocks(
                inputs.block_tables,
                inputs.context_lens,
                inputs.cu_seqlens_q,
                block_size=self.info.block_size,
                layer_block_bytes=self._kv_pool.shape.bytes_per_block // self._kv_pool.shape.num_layers,
            )
        else:
            *tensors, late_places, late_samples = map(torch.from_numpy, arrays)
        batch = ForwardBatch(*tensors, num_shared_blocks=shared)
        if len(inputs.late_places):
            assert before is not None
            # A sequence that failed has no token; what it computes now counts for nothing.
            tokens = before.tokens.index_select(0, late_samples).clamp_min(0)
            batch.input_ids.index_copy_(0, late_places, tokens.to(torch.int64))
        return batch


def _seconds_between(first: _Mark, last: _Mark) -> float:
    """Waits for the device to reach `last`. It has where there are samples; else nobody else waits, and the time of
    steps is predicted from those before. Blocks that are still on their way to the host hold nothing up."""
    if isinstance(first, float) or isinstance(last, float):
        assert isinstance(first, float)
        assert isinstance(last, float)
        return last - first
    last.synchronize()
    return first.elapsed_time(last) / 1e3


def _result(
    plan: StepPlan,
    step: PreparedStep,
    samples: Samples | None,
    counts: npt.NDArray[np.bool_] | None,
    prompt_logprobs: list[TokenLogprobs],
    *,
    step_seconds: float,
    parts_seconds: dict[str, float],
) -> StepResult:
    """Put the samples that count back among those that were masked."""
    token_ids = np.full(len(plan.sample_rows), MASKED_TOKEN, np.int32)
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    row_errors: tuple[tuple[int, str], ...] = ()
    if samples is not None and counts is not None:
        token_ids[step.samples[counts]] = samples.token_ids[counts]
        places = step.samples.tolist()
        errors = [(index, message) for index, message in sorted(samples.errors.items()) if counts[index]]
        row_errors = tuple((places[index], message) for index, message in errors)
        if samples.logprobs:
            spread: list[TokenLogprobs | None] = [None] * len(token_ids)
            for place, entry, count in zip(places, samples.logprobs, counts.tolist(), strict=True):
                spread[place] = entry if count else None
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
