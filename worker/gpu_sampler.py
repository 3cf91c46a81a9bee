"""Sampling on the device: the host learns a step's tokens from one small copy, and may work until it arrives.

Owns the way of a `SamplingBatch` to the kernels and of the tokens back. It means what `sampler.Sampler` means, but
weighs tokens in float32: at a number within a millionth of the edge between two tokens the two may differ.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import numpy.typing as npt
import torch

from octavo.protos.types import MASKED_TOKEN, TokenLogprobs
from octavo.worker.grammars import TokenMasks
from octavo.worker.sampler import (
    NOT_FINITE,
    NOTHING_LEFT,
    PendingSamples,
    Sampler,
    Samples,
    SamplingBatch,
    apply_masks,
    token_logprobs,
)
from octavo.worker.staging import InputStaging

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class _OnTheirWay:
    """`PendingSamples` that the device is still drawing."""

    tokens: torch.Tensor
    _host: torch.Tensor
    """int32 [2, K]: the tokens, and whether the row was finite before its edits."""
    _arrived: torch.cuda.Event | None
    _finish: Callable[[npt.NDArray[np.int32]], Samples]

    def result(self) -> Samples:
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._finish(self._host.numpy())


class GpuSampler(Sampler):
    """As `Sampler`, through `kernels.sample`. Calls come from one thread, on the stream that made the logits."""

    def __init__(self, device: torch.device) -> None:
        # Imported here: a machine without triton has no use for this class and must not fail for it.
        from octavo.kernels import sample

        super().__init__()
        self._kernels: ModuleType = sample
        self._device = device
        self._staging = InputStaging(device)

    def sample(self, logits: torch.Tensor, batch: SamplingBatch, masks: TokenMasks | None = None) -> Samples:
        """One token for each sample; see `Sampler.sample`."""
        return self.start(logits, batch, masks).result()

    @torch.inference_mode()
    def start(
        self, logits: torch.Tensor, batch: SamplingBatch, masks: TokenMasks | None = None
    ) -> PendingSamples:
        """Launch everything; the host waits for nothing. See `Sampler.start`."""
        finite = logits.amax(dim=1).isfinite().int()
        tokens, rows = self._tokens(logits, batch, masks)
        both = torch.stack([tokens, finite[rows]])
        host = torch.empty(both.shape, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        host.copy_(both, non_blocking=True)
        arrived = None
        if self._device.type == "cuda":
            arrived = torch.cuda.current_stream(self._device).record_event()

        def finish(found: npt.NDArray[np.int32]) -> Samples:
            refused = masks.errors if masks is not None else {}
            return _samples(found[0].copy(), found[1] != 0, logits, batch, refused)

        return _OnTheirWay(tokens, host, arrived, finish)

    def _tokens(
        self, logits: torch.Tensor, batch: SamplingBatch, masks: TokenMasks | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens int32 [K] and the row of `logits` of each sample, int64 [K]."""
        edited = np.flatnonzero(batch.edited)
        edits = batch.edits if len(edited) else None
        # Edited samples get rows of their own behind the model's: several samples may share one (a fork).
        places = batch.logit_indices.copy()
        places[edited] = logits.shape[0] + np.arange(len(edited))
        columns = (
            batch.logit_indices,
            places,
            batch.greedy,
            batch.temperatures,
            batch.top_ks,
            batch.top_ps,
            batch.min_ps,
            batch.seeds,
            batch.branches,
            batch.positions.astype(np.int32, copy=False),
        )
        if edits is None:
            uploaded = self._staging.upload((*columns, batch.logit_indices[edited]))
            rows, work_rows, *parameters, copied = uploaded
            work = self._with_own_rows(logits, copied, places, masks)
        else:
            own_row = np.full(len(batch.greedy), -1, np.int64)
            own_row[edited] = places[edited]
            lists = (
                own_row[edits.ban_samples],
                edits.ban_ids,
                own_row[edits.bias_samples],
                edits.bias_ids,
                edits.biases,
                own_row[edits.penalty_samples],
                edits.penalty_ids,
                edits.repetitions,
                edits.deductions,
            )
            uploaded = self._staging.upload((*columns, *lists, batch.logit_indices[edited]))
            rows, work_rows, *parameters = uploaded[: len(columns)]
            ban_rows, ban_ids, bias_rows, bias_ids, biases, rows_, ids, factors, amounts = uploaded[
                len(columns) : -1
            ]
            work = self._with_own_rows(logits, uploaded[-1], places, masks)
            kernels = self._kernels
            kernels.edit_logits(work, kernels.BAN, ban_rows, ban_ids)
            kernels.edit_logits(work, kernels.BIAS, bias_rows, bias_ids, biases)
            kernels.edit_logits(work, kernels.PENALTY, rows_, ids, amounts, factors)
        inputs = self._kernels.SamplingInputs(work_rows, *parameters)
        return self._kernels.sample(work, inputs), rows

    @staticmethod
    def _with_own_rows(
        logits: torch.Tensor, copied: torch.Tensor, places: npt.NDArray[np.int64], masks: TokenMasks | None
    ) -> torch.Tensor:
        """`logits` and behind them the rows `copied` of samples that are edited, their grammars applied."""
        if not len(copied):
            return logits
        work = torch.cat([logits, logits.index_select(0, copied)])
        if masks is not None:
            apply_masks(work, places[masks.samples], masks.words)
        return work


def choose_sampler(device: torch.device) -> Sampler:
    """The sampler of the device: on CUDA the kernels, once they have shown on a made-up batch that they run there
    and agree with torch; a warning says why if not."""
    plain = Sampler()
    if device.type != "cuda":
        return plain
    logits = torch.randn(8, 4096, generator=torch.Generator().manual_seed(0)).to(device)
    batch = _made_up(8)
    try:
        sampler = GpuSampler(device)
        found, expected = (each.sample(logits, batch).token_ids.tolist() for each in (sampler, plain))
    except Exception as error:  # the edge: compilers and drivers raise whatever they like
        logger.warning("sampling runs without kernels of its own, since they failed: %s", error)
        return plain
    if found != expected:
        logger.warning(
            "sampling runs without kernels of its own: they drew %s instead of %s", found, expected
        )
        return plain
    return sampler


def _made_up(count: int) -> SamplingBatch:
    """Samples of all kinds, on rows 0 .. count - 1."""
    rows = np.arange(count)
    return SamplingBatch(
        logit_indices=rows,
        greedy=rows % 4 == 3,
        temperatures=np.full(count, 0.9),
        top_ks=np.where(rows % 2 == 1, 50, 0),
        top_ps=np.where(rows % 4 >= 1, 0.8, 1.0),
        min_ps=np.where(rows % 3 == 2, 0.05, 0.0),
        seeds=rows.astype(np.uint64),
        branches=np.zeros(count, np.int32),
        positions=rows.astype(np.int32),
        num_logprobs=np.full(count, -1, np.int32),
        edited=np.zeros(count, np.bool_),
    )


def _samples(
    tokens: npt.NDArray[np.int32],
    finite: npt.NDArray[np.bool_],
    logits: torch.Tensor,
    batch: SamplingBatch,
    refused: dict[int, str],
) -> Samples:
    """Name what failed, and look up the log-probabilities of the rest. `refused`: samples whose grammar failed."""
    tokens[~finite] = MASKED_TOKEN
    tokens[list(refused)] = MASKED_TOKEN
    failed = np.flatnonzero(tokens < 0).tolist()
    errors = {k: NOTHING_LEFT if finite[k] else NOT_FINITE for k in failed} | refused
    tokens[failed] = MASKED_TOKEN
    wanted = np.flatnonzero((batch.num_logprobs >= 0) & (tokens >= 0))
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    if len(wanted):
        rows = logits.index_select(0, torch.from_numpy(batch.logit_indices[wanted]).to(logits.device))
        entries: list[TokenLogprobs | None] = [None] * len(tokens)
        found = token_logprobs(rows, tokens[wanted], batch.num_logprobs[wanted])
        for k, entry in zip(wanted.tolist(), found, strict=True):
            entries[k] = entry
        logprobs = tuple(entries)
    return Samples(tokens, logprobs, errors)
