"""From logits to tokens and log-probabilities.

Owns the order of operations: log-probabilities of the raw distribution; then grammars, bans, biases, repetition,
presence and frequency penalties, temperature, top-k, top-p, min-p; then the inverse of the distribution function, in
vocabulary order, at the one random number of (seed, branch, position). Every operation works row by row with the
same arithmetic whatever the batch, so a row's token does not depend on its neighbours. Rows are grouped by what
they ask for: a greedy row costs its share of one argmax, nothing in Python.

Knows nothing of rows, blocks or plans. Works on CPU and CUDA tensors alike; parameters come as numpy arrays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from octavo.protos.types import MASKED_TOKEN, Int32Array, TokenLogprobs
from octavo.worker.grammars import TokenMasks
from octavo.worker.logit_rules import Float64Array, Int64Array, LogitEdits
from octavo.worker.prompt_rows import PromptRows
from octavo.worker.random import uniforms

NOT_FINITE = "the model gave logits that are not finite for this sequence"
NOTHING_LEFT = "no token can be sampled: every one is banned"

_NUM_CANDIDATES = 128
"""Likeliest tokens to look at before a row is sorted: a tenth of the time, and enough for most."""
_SCRATCH_BYTES = {"cpu": 4 << 20, "cuda": 256 << 20}
"""Of one float64 [rows, V] intermediate: caches are small on a CPU, launches dear on a GPU."""
_FLOAT32_MAX = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True, eq=False)
class SamplingBatch:
    """What K samples ask for. Arrays are [K] unless they say otherwise."""

    logit_indices: Int64Array
    """Row of the logits to sample from; several samples may share one (a fork)."""
    greedy: npt.NDArray[np.bool_]
    temperatures: Float64Array
    top_ks: Int64Array
    """0: off."""
    top_ps: Float64Array
    min_ps: Float64Array
    seeds: npt.NDArray[np.uint64]
    branches: Int32Array
    positions: Int32Array
    """Output tokens before this one."""
    num_logprobs: Int32Array
    """-1: none wanted; k: the chosen token's and the k likeliest."""
    edited: npt.NDArray[np.bool_]
    """Whether `edits` or a grammar says anything of the sample."""
    edits: LogitEdits | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    token_ids: Int32Array
    """[K]; `MASKED_TOKEN` where `errors` has an entry."""
    logprobs: tuple[TokenLogprobs | None, ...]
    """[K], or empty when no sample wanted any."""
    errors: dict[int, str]
    """Index of the sample: why it has no token."""


class PendingSamples(Protocol):
    """Samples that may still be on their way."""

    @property
    def tokens(self) -> torch.Tensor:
        """int32 [K] on the logits' device; negative where there is none. The next step may read them at once."""
        ...

    def result(self) -> Samples:
        """Waits for the tokens, and for nothing launched after them."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class _Taken:
    """Samples that are there."""

    samples: Samples
    device: torch.device

    @property
    def tokens(self) -> torch.Tensor:
        return torch.from_numpy(self.samples.token_ids).to(self.device)

    def result(self) -> Samples:
        return self.samples


class Sampler:
    """Stateless; `scratch_bytes` bounds its intermediates (None: by device)."""

    def __init__(self, *, scratch_bytes: int | None = None) -> None:
        self._scratch_bytes = scratch_bytes

    def start(
        self, logits: torch.Tensor, batch: SamplingBatch, masks: TokenMasks | None = None
    ) -> PendingSamples:
        """`sample`, waited for only when its result is asked for, where the device allows. `logits` must stay till
        then for samples that want log-probabilities."""
        return _Taken(self.sample(logits, batch, masks), logits.device)

    def sample(self, logits: torch.Tensor, batch: SamplingBatch, masks: TokenMasks | None = None) -> Samples:
        """One token for each sample.

        logits  float32 [L, V]; not modified
        masks   what grammars allow; its samples are marked in `batch.edited`

        A row with NaN, positive infinity or nothing but negative infinity fails alone (`Samples.errors`).
        """
        best, peaks = _best(logits)
        finite = np.isfinite(peaks)[batch.logit_indices]
        tokens = best[batch.logit_indices].astype(np.int32)
        errors = dict.fromkeys(np.flatnonzero(~finite).tolist(), NOT_FINITE)
        special = np.flatnonzero((~batch.greedy | batch.edited) & finite)
        for part in self._parts(special, logits):
            tokens[part] = self._sample_special(logits, batch, part, masks)
        errors.update(dict.fromkeys(special[tokens[special] == MASKED_TOKEN].tolist(), NOTHING_LEFT))
        errors.update(masks.errors if masks is not None else {})
        tokens[list(errors)] = MASKED_TOKEN
        logprobs: tuple[TokenLogprobs | None, ...] = ()
        wanted = np.flatnonzero((batch.num_logprobs >= 0) & (tokens != MASKED_TOKEN))
        if len(wanted):
            found: list[TokenLogprobs | None] = [None] * len(tokens)
            for part in self._parts(wanted, logits):
                rows = _take(logits, batch.logit_indices[part])
                for k, entry in zip(
                    part, token_logprobs(rows, tokens[part], batch.num_logprobs[part]), strict=True
                ):
                    found[k] = entry
            logprobs = tuple(found)
        return Samples(tokens, logprobs, errors)

    def prompt_logprobs(self, logits: torch.Tensor, prompts: PromptRows) -> list[TokenLogprobs]:
        """Of the tokens of `prompts`, [R], by the raw distributions that foretell them."""
        found: list[TokenLogprobs] = []
        for part in self._parts(np.arange(len(prompts.token_ids)), logits):
            rows = _take(logits, prompts.logit_indices[part])
            found += token_logprobs(rows, prompts.token_ids[part], prompts.num_logprobs[part])
        return found

    def _parts(self, samples: Int64Array, logits: torch.Tensor) -> list[Int64Array]:
        """`samples` in parts whose float64 logits fit the scratch size."""
        scratch = self._scratch_bytes or _SCRATCH_BYTES.get(logits.device.type, 4 << 20)
        size = max(1, scratch // (8 * logits.shape[1]))
        return [samples[start : start + size] for start in range(0, len(samples), size)]

    def _sample_special(
        self, logits: torch.Tensor, batch: SamplingBatch, part: Int64Array, masks: TokenMasks | None
    ) -> Int32Array:
        """Tokens of the samples `part`, all of which are random or edited or both."""
        work = _take(logits, batch.logit_indices[part])
        if masks is not None:
            held = np.isin(masks.samples, part)
            apply_masks(work, np.searchsorted(part, masks.samples[held]), masks.words[held])
        if batch.edits is not None and batch.edited[part].any():
            _apply_edits(work, batch.edits, part, len(batch.greedy))
        best, peaks = _best(work)
        tokens = best.astype(np.int32)
        drawn = np.flatnonzero(~batch.greedy[part] & np.isfinite(peaks))
        if len(drawn):
            chosen = part[drawn]
            if len(drawn) < len(part):
                work = _take(work, drawn)
            tokens[drawn] = _draw(work, _draws(batch, chosen, peaks[drawn], work))
        tokens[~np.isfinite(peaks)] = MASKED_TOKEN
        return tokens


def _best(logits: torch.Tensor) -> tuple[Int64Array, npt.NDArray[np.float32]]:
    """Each row's likeliest token, the lowest id of equals, and its logit; NaN if the row has one."""
    if logits.device.type == "cpu":
        # Ten times faster than torch's; the first NaN counts as the largest, so one look at the peak finds it.
        rows = logits.numpy()
        best = rows.argmax(axis=1)
        return best, rows[np.arange(len(rows)), best]
    ids = logits.argmax(dim=1)
    peaks = logits.gather(1, ids[:, None])[:, 0]
    return ids.cpu().numpy(), peaks.cpu().numpy()


def _take(logits: torch.Tensor, indices: Int64Array) -> torch.Tensor:
    """A copy of some rows."""
    return logits.index_select(0, torch.from_numpy(indices).to(logits.device))


def apply_masks(work: torch.Tensor, rows: Int64Array, words: Int32Array) -> None:
    """Leave of `rows` [M] of `work` [R, V], in place, only what `words` [M, ceil(V / 32)] allows: see `TokenMasks`."""
    if not len(rows):
        return
    if work.device.type == "cpu":
        # Four times as fast as the same in torch.
        denied = np.unpackbits(~words.view(np.uint8), axis=1, bitorder="little", count=work.shape[1])
        for row, ids in zip(rows.tolist(), torch.from_numpy(denied.view(np.bool_)), strict=True):
            work[row].masked_fill_(ids, -torch.inf)
        return
    places = torch.arange(32, device=work.device, dtype=torch.int32)
    bits = torch.from_numpy(words).to(work.device)[:, :, None] >> places
    allowed = (bits & 1).flatten(1)[:, : work.shape[1]].bool()
    index = torch.from_numpy(rows).to(work.device)
    work[index] = work[index].masked_fill_(~allowed, -torch.inf)


def _apply_edits(work: torch.Tensor, edits: LogitEdits, part: Int64Array, num_samples: int) -> None:
    """Edit `work` [len(part), V] in place, in the order that the module names."""
    place = np.full(num_samples, -1, np.int64)
    place[part] = np.arange(len(part))

    def select(samples: Int64Array, *columns: npt.NDArray[Any]) -> list[torch.Tensor]:
        rows = place[samples]
        here = rows >= 0
        return [torch.from_numpy(array[here]).to(work.device) for array in (rows, *columns)]

    rows, ids = select(edits.ban_samples, edits.ban_ids)
    work[rows, ids] = -torch.inf
    rows, ids, biases = select(edits.bias_samples, edits.bias_ids, edits.biases)
    work[rows, ids] = _to_float32(work[rows, ids].double() + biases)
    rows, ids, repetitions, deductions = select(
        edits.penalty_samples, edits.penalty_ids, edits.repetitions, edits.deductions
    )
    values = work[rows, ids].double()
    values = torch.where(values > 0, values / repetitions, values * repetitions) - deductions
    work[rows, ids] = _to_float32(values)


def _to_float32(values: torch.Tensor) -> torch.Tensor:
    """Rounded; what is too large stays finite, a ban stays a ban."""
    return torch.where(values.isinf(), values, values.clamp(-_FLOAT32_MAX, _FLOAT32_MAX)).float()


@dataclass(frozen=True, slots=True, eq=False)
class _Draws:
    """What to draw from R rows with: [R, 1] tensors on the logits' device, float64 but for `top_ks`."""

    peaks: torch.Tensor
    temperatures: torch.Tensor
    top_ks: torch.Tensor
    """int64; V for off."""
    top_ps: torch.Tensor
    min_ps: torch.Tensor
    numbers: torch.Tensor
    has_min_p: bool

    def take(self, rows: torch.Tensor) -> _Draws:
        return _Draws(
            peaks=self.peaks[rows],
            temperatures=self.temperatures[rows],
            top_ks=self.top_ks[rows],
            top_ps=self.top_ps[rows],
            min_ps=self.min_ps[rows],
            numbers=self.numbers[rows],
            has_min_p=self.has_min_p,
        )

    def weigh(self, logits: torch.Tensor) -> torch.Tensor:
        """Probabilities of logits [R, W] relative to the row's likeliest token, which weighs 1; float64."""
        # The peak goes before the temperature divides: 1/T is at most 1000, so nothing overflows.
        return logits.double().sub_(self.peaks).div_(self.temperatures).exp_()

    def num_kept(self, sums: torch.Tensor, totals: torch.Tensor) -> torch.Tensor:
        """How many likeliest tokens top-k and then top-p keep, int64 [R, 1], at least 1.

        sums    float64 [R, W], running sums of weights, likeliest first; more than W are kept where W is too few
        totals  float64 [R, 1], all weights; looked at only where top-k is off
        """
        width = sums.shape[1]
        limited = self.top_ks <= width
        totals = torch.where(limited, sums.gather(1, self.top_ks.clamp(max=width) - 1), totals)
        # The shortest prefix that reaches top_p of the total.
        reached = torch.searchsorted(sums, self.top_ps * totals) + 1
        return torch.where(self.top_ps < 1.0, torch.minimum(self.top_ks, reached), self.top_ks)

    def invert(self, weights: torch.Tensor) -> torch.Tensor:
        """Index [R, 1] of the weight at which the running sum passes the number's share of the total.

        Weights below min_p of the likeliest count as 0. Overwrites `weights` [R, W].
        """
        if self.has_min_p:
            weights.mul_(weights >= self.min_ps)
        sums = weights.cumsum_(dim=1)
        # A number is at most 1 - 2**-53, so the product, rounded, stays below the total: some weight is found.
        return torch.searchsorted(sums, self.numbers * sums[:, -1:], right=True)


def _draws(
    batch: SamplingBatch, samples: Int64Array, peaks: npt.NDArray[np.float32], logits: torch.Tensor
) -> _Draws:
    """Parameters of `samples`, whose rows of the logits [R, V] have `peaks`."""
    top_ks, vocab_size = batch.top_ks[samples], logits.shape[1]

    def column(values: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(values).to(logits.device)[:, None]

    return _Draws(
        peaks=column(peaks.astype(np.float64)),
        temperatures=column(batch.temperatures[samples]),
        top_ks=column(np.where((top_ks > 0) & (top_ks < vocab_size), top_ks, vocab_size)),
        top_ps=column(batch.top_ps[samples]),
        min_ps=column(batch.min_ps[samples]),
        numbers=column(uniforms(batch.seeds[samples], batch.branches[samples], batch.positions[samples])),
        has_min_p=bool((batch.min_ps[samples] > 0.0).any()),
    )


def _draw(logits: torch.Tensor, draws: _Draws) -> Int64Array:
    """Invert the distribution function of each row of float32 [R, V] at its number."""
    vocab_size = logits.shape[1]
    tokens = torch.empty_like(draws.top_ks)
    truncated = (draws.top_ks < vocab_size) | (draws.top_ps < 1.0)
    whole = torch.nonzero(~truncated[:, 0])[:, 0]
    if len(whole):
        here = draws.take(whole)
        tokens[whole] = here.invert(here.weigh(logits[whole]))
    pending = torch.nonzero(truncated[:, 0])[:, 0]
    if len(pending) and vocab_size > _NUM_CANDIDATES:
        found, known = _draw_candidates(logits[pending], draws.take(pending))
        tokens[pending[known]] = found[known]
        pending = pending[~known]
    if len(pending):
        tokens[pending] = _draw_sorted(logits[pending], draws.take(pending))
    return tokens[:, 0].cpu().numpy()


def _draw_candidates(logits: torch.Tensor, draws: _Draws) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw from what top-k and top-p leave of [R, V], looking at the few likeliest tokens only.

    In all but flat rows these are enough. Returns tokens [R, 1] and, bool [R], which of them are right.
    """
    width, vocab_size = _NUM_CANDIDATES, logits.shape[1]
    values, ids = logits.topk(width, dim=1)
    # By id, then stably by value: of equal logits the lower ids come first.
    ids, order = ids.sort(dim=1)
    ranked, order = values.gather(1, order).sort(dim=1, descending=True, stable=True)
    weights = draws.weigh(ranked)
    limited = draws.top_ks < vocab_size
    totals = torch.ones_like(draws.peaks)
    nucleus = torch.nonzero(((draws.top_ps < 1.0) & ~limited)[:, 0])[:, 0]
    if len(nucleus):
        # A row's total is its last partial sum: the order of a reduction may change with the batch.
        totals[nucleus] = draws.take(nucleus).weigh(logits[nucleus]).cumsum_(dim=1)[:, -1:]
    kept = draws.num_kept(weights.cumsum(dim=1), totals)
    # The last one kept must not tie with the last one seen, or its equals might lie outside.
    edges = ranked.gather(1, kept.clamp(max=width) - 1)
    known = ((draws.top_ks <= width) | ~limited) & (kept < width) & (edges > ranked[:, -1:])
    weights *= torch.arange(width, device=logits.device) < kept
    by_id = torch.empty_like(weights).scatter_(1, order, weights)
    return ids.gather(1, draws.invert(by_id)), known[:, 0]


def _draw_sorted(logits: torch.Tensor, draws: _Draws) -> torch.Tensor:
    """Draw from what top-k and top-p leave of [R, V], however many tokens that is. Returns tokens [R, 1]."""
    if logits.device.type == "cpu":
        ranked = torch.from_numpy(-np.sort(-logits.numpy(), axis=1))  # four times as fast as torch's
    else:
        ranked = logits.sort(dim=1, descending=True).values
    sums = draws.weigh(ranked).cumsum_(dim=1)
    kept = draws.num_kept(sums, sums[:, -1:])
    edges = ranked.gather(1, kept - 1)
    keep = logits >= edges
    followers = ranked.gather(1, kept.clamp(max=logits.shape[1] - 1))
    tied = torch.nonzero(((followers == edges) & (kept < logits.shape[1]))[:, 0])[:, 0]
    if len(tied):
        # Of the equals at the edge the lower ids stay.
        equal = logits[tied] == edges[tied]
        allowed = kept[tied] - (logits[tied] > edges[tied]).sum(dim=1, keepdim=True)
        keep[tied] &= ~(equal & (equal.cumsum(dim=1) > allowed))
    return draws.invert(draws.weigh(logits).mul_(keep))


def token_logprobs(logits: torch.Tensor, tokens: Int32Array, num_logprobs: Int32Array) -> list[TokenLogprobs]:
    """Log-probabilities of the chosen tokens and of the likeliest, equals by id.

    logits        float32 [R, V], raw; each row's largest is finite
    tokens        int32 [R]
    num_logprobs  int32 [R], how many of the likeliest

    Minus infinity may come out, NaN cannot.
    """
    device = logits.device
    peaks = logits.amax(dim=1, keepdim=True).double()
    sums = (logits.double() - peaks).exp_().cumsum_(dim=1)[:, -1:]
    # Peak and log of the sum are subtracted one after the other: added up first, a huge peak would swallow the log.
    log_sums = sums.log()
    chosen = torch.from_numpy(tokens.astype(np.int64)).to(device)[:, None]
    own = (logits.gather(1, chosen).double() - peaks - log_sums)[:, 0].tolist()
    width = min(logits.shape[1], int(num_logprobs.max()))
    if width == 0:
        return [TokenLogprobs(logprob) for logprob in own]
    # One more than wanted shows whether others tie for the last place; topk picks any of them, we the lowest ids.
    values, ids = logits.topk(min(width + 1, logits.shape[1]), dim=1)
    tied = values[:, width:] == values[:, width - 1 : width]
    for row in torch.nonzero(tied)[:, 0].tolist():
        last = values[row, width - 1]
        above = int((values[row] > last).sum())
        ids[row, above:width] = torch.nonzero(logits[row] == last)[: width - above, 0]
    values, ids = values[:, :width], ids[:, :width]
    ids_found = ids.cpu().numpy()
    found = (values.double() - peaks - log_sums).cpu().numpy()
    order = np.lexsort((ids_found, -found), axis=1)
    ids_found, found = np.take_along_axis(ids_found, order, 1), np.take_along_axis(found, order, 1)
    return [
        TokenLogprobs(logprob, tuple(row_ids[:count]), tuple(row_values[:count]))
        for logprob, row_ids, row_values, count in zip(
            own, ids_found.tolist(), found.tolist(), num_logprobs.tolist(), strict=True
        )
    ]
