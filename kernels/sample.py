"""From logits to one token a row, in Triton: edits, temperature, top-k, top-p, min-p, a counter-based draw.

Owns both kernels and their launches. Oracle: `reference_sampling`, whose order of operations this keeps; the numbers
are those of `worker/random.py` (Philox4x32-10).

Weights are fixed-point: 2**44 for the likeliest token, so their sums are integers and the same in any order. Hence a
row's token depends on nothing around it, and the draw always lands on a token. A token less likely than 2**-44 of
the likeliest is never drawn.

Top-k and top-p are one search: the largest threshold, among float32 numbers in their order, that as many tokens (or
as much weight) reach as is needed. It halves the interval of thresholds; as soon as few enough tokens reach its lower
end, they are set aside, in order of their ids, and the rest of the row is not read again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

TILE = 2048
"""Tokens that a program looks at at once, and that it may set aside."""
NUM_WARPS = 8
MAX_REGISTERS = 160
"""Of a thread. Left to itself the compiler rather spills a few than go past 128, for programs that nobody needs at
once."""
VOCAB_MAX = 1 << 19
"""So many weights of 2**44 add up in 63 bits."""
NO_TOKEN = -1

_BELOW_KEYS = tl.constexpr(-(1 << 31) - 1)

BAN = 0
BIAS = 1
PENALTY = 2


@triton.jit
def _keys(values):
    """int32 in the order of float32 numbers, zeros equal."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def _value_of(key):
    """The float32 number of an int64 key."""
    bits = key.to(tl.int32)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def _weights(values, peak, rate):
    """int64, 2**44 at the peak; `rate` is log2(e) / temperature."""
    return (tl.exp2((values - peak) * rate) * 17592186044416.0).to(tl.int64)


@triton.jit
def _quotient_up(weight, unit):
    """The fewest units, of 2**20 or fewer, that reach int64 `weight` > 0. (Devices divide such numbers in a
    subroutine, which costs registers.)"""
    count = (weight.to(tl.float32) / unit.to(tl.float32)).to(tl.int64) - 1
    count += (count * unit < weight).to(tl.int64)
    count += (count * unit < weight).to(tl.int64)
    return count + (count * unit < weight).to(tl.int64)


@triton.jit
def _reaching(values, length, threshold, peak, rate, SIZE: tl.constexpr):
    """How many of `length` numbers have a key of at least `threshold`, and their weight."""
    count = tl.zeros([SIZE], tl.int64)
    weight = tl.zeros([SIZE], tl.int64)
    for start in range(0, length, SIZE):
        places = start + tl.arange(0, SIZE)
        found = tl.load(values + places, mask=places < length, other=float("-inf"))
        reached = (places < length) & (_keys(found).to(tl.int64) >= threshold)
        count += reached.to(tl.int64)
        weight += tl.where(reached, _weights(found, peak, rate), 0)
    return tl.sum(count, 0), tl.sum(weight, 0)


@triton.jit
def _set_aside(values, length, threshold, kept_values, kept_ids, SIZE: tl.constexpr):
    """Copy the numbers that reach `threshold`, and their places, in order."""
    count = 0
    for start in range(0, length, SIZE):
        places = start + tl.arange(0, SIZE)
        found = tl.load(values + places, mask=places < length, other=float("-inf"))
        reached = (places < length) & (_keys(found).to(tl.int64) >= threshold)
        targets = count + tl.cumsum(reached.to(tl.int32), 0) - 1
        tl.store(kept_values + targets, found, mask=reached)
        tl.store(kept_ids + targets, places, mask=reached)
        count += tl.sum(reached.to(tl.int32), 0)
    # Other threads of this program read what this one wrote.
    tl.debug_barrier()
    return count


@triton.jit
def _search(
    values, length, kept_values, kept_ids, num_kept, low, high, needed, peak, rate, BY_COUNT: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """The largest threshold in low .. high - 1 that enough reach: `needed` tokens, or that much weight.

    Enough reach low, too few high. num_kept: how many are set aside; 0: none yet. Returns it with num_kept, and
    count and weight of what lies above it.
    """
    above_count = tl.zeros([], tl.int64)
    above_weight = tl.zeros([], tl.int64)
    while high - low > 1:
        middle = low + (high - low) // 2
        if num_kept > 0:
            count, weight = _reaching(kept_values, num_kept, middle, peak, rate, SIZE)
        else:
            count, weight = _reaching(values, length, middle, peak, rate, SIZE)
        enough = weight >= needed
        if BY_COUNT:
            enough = count >= needed
        if enough:
            low = middle
            if (num_kept == 0) & (count <= SIZE):
                num_kept = _set_aside(values, length, low, kept_values, kept_ids, SIZE)
        else:
            high = middle
            above_count = count
            above_weight = weight
    return low, num_kept, above_count, above_weight


@triton.jit
def _final_weights(found, inside, threshold, ties, ties_before, peak, rate, weight_min):
    """Weights of a tile that remain, and how many of it stand at the threshold, of which only `ties` are kept, the
    lowest ids first; `ties_before` came in earlier tiles."""
    keys = _keys(found).to(tl.int64)
    tied = inside & (keys == threshold)
    rank = ties_before + tl.cumsum(tied.to(tl.int32), 0)
    kept = inside & ((keys > threshold) | (tied & (rank <= ties)))
    weights = _weights(found, peak, rate)
    return tl.where(kept & (weights >= weight_min), weights, 0), tl.sum(tied.to(tl.int32), 0)


@triton.jit
def _invert(values, length, threshold, ties, peak, rate, weight_min, fraction, SIZE: tl.constexpr):
    """Place of the number at which the running sum of weights passes fraction / 2**64 of the total."""
    total = tl.zeros([], tl.int64)
    ties_before = 0
    for start in range(0, length, SIZE):
        places = start + tl.arange(0, SIZE)
        found = tl.load(values + places, mask=places < length, other=float("-inf"))
        weights, tied = _final_weights(
            found, places < length, threshold, ties, ties_before, peak, rate, weight_min
        )
        total += tl.sum(weights, 0)
        ties_before += tied
    target = tl.umulhi(fraction, total.to(tl.uint64)).to(tl.int64)
    running = tl.zeros([], tl.int64)
    ties_before = 0
    chosen = -1
    for start in range(0, length, SIZE):
        if chosen < 0:
            places = start + tl.arange(0, SIZE)
            found = tl.load(values + places, mask=places < length, other=float("-inf"))
            weights, tied = _final_weights(
                found, places < length, threshold, ties, ties_before, peak, rate, weight_min
            )
            sums = running + tl.cumsum(weights, 0)
            first = tl.min(tl.where(sums > target, places, 0x7FFFFFFF), 0)
            if first < 0x7FFFFFFF:
                chosen = first
            running += tl.sum(weights, 0)
            ties_before += tied
    return chosen


@triton.jit
def _fraction(seed, branch, position):
    """The number of (seed, branch, position) times 2**64, uint64, of which the upper 53 bits are used."""
    zero = tl.zeros([], tl.uint32)
    first, second, _, _ = tl.philox(seed, position.to(tl.uint32), branch.to(tl.uint32), zero, zero)
    number = ((first >> 5).to(tl.uint64) << 26) | (second >> 6).to(tl.uint64)
    return number << 11


@triton.jit
def sample_kernel(
    logits,
    logit_rows,
    greedy,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    seeds,
    branches,
    positions,
    kept_values,
    kept_ids,
    tokens,
    row_stride,
    vocab_size,
    SIZE: tl.constexpr,
):
    """Grid (samples,). kept_values and kept_ids [samples, SIZE] are scratch."""
    sample = tl.program_id(0).to(tl.int64)
    row = logits + tl.load(logit_rows + sample) * row_stride

    lane_best = tl.full([SIZE], float("-inf"), tl.float32)
    lane_ids = tl.zeros([SIZE], tl.int32)
    lane_nan = tl.zeros([SIZE], tl.int32)
    for start in range(0, vocab_size, SIZE):
        places = start + tl.arange(0, SIZE)
        found = tl.load(row + places, mask=places < vocab_size, other=float("-inf"))
        lane_nan = lane_nan | (found != found).to(tl.int32)
        better = found > lane_best
        lane_best = tl.where(better, found, lane_best)
        lane_ids = tl.where(better, places, lane_ids)
    peak = tl.max(lane_best, 0)
    if (tl.max(lane_nan, 0) > 0) | (peak == float("inf")) | (peak == float("-inf")):
        tl.store(tokens + sample, -1)
        return
    if tl.load(greedy + sample) != 0:
        tl.store(tokens + sample, tl.min(tl.where(lane_best == peak, lane_ids, 0x7FFFFFFF), 0))
        return

    temperature = tl.load(temperatures + sample).to(tl.float32)
    rate = 1.4426950408889634 / temperature
    top_k = tl.load(top_ks + sample)
    top_p = tl.load(top_ps + sample)
    kept_values += sample * SIZE
    kept_ids += sample * SIZE
    limited = (top_k > 0) & (top_k < vocab_size)
    threshold = tl.full([], _BELOW_KEYS, tl.int64)
    high = _keys(peak).to(tl.int64) + 1
    ties = 0
    num_kept = 0
    total = tl.zeros([], tl.int64)
    if limited:
        threshold, num_kept, count, weight = _search(
            row, vocab_size, kept_values, kept_ids, num_kept, threshold, high, top_k, peak, rate, True, SIZE
        )
        ties = (top_k - count).to(tl.int32)
        total = weight + ties.to(tl.int64) * _weights(_value_of(threshold), peak, rate)
    if top_p < 1.0:
        low = threshold
        if not limited:
            # Further below the likeliest a token weighs nothing: 44 ln 2 is 30.5.
            lowest = peak - temperature * 31.5
            low = _keys(lowest).to(tl.int64) - 1
            _, total = _reaching(row, vocab_size, low, peak, rate, SIZE)
        needed = tl.maximum(tl.ceil(top_p * total.to(tl.float64)).to(tl.int64), 1)
        threshold, num_kept, count, weight = _search(
            row, vocab_size, kept_values, kept_ids, num_kept, low, high, needed, peak, rate, False, SIZE
        )
        edge = _weights(_value_of(threshold), peak, rate)
        # Rounding may ask for a little more than there is at the edge of top-k.
        fitting = _quotient_up(needed - weight, tl.maximum(edge, 1)).to(tl.int32)
        same = limited & (threshold == low)
        ties = tl.where(same, tl.minimum(fitting, ties), fitting)

    weight_min = tl.ceil(tl.load(min_ps + sample) * 17592186044416.0).to(tl.int64)
    fraction = _fraction(tl.load(seeds + sample), tl.load(branches + sample), tl.load(positions + sample))
    if num_kept > 0:
        place = _invert(kept_values, num_kept, threshold, ties, peak, rate, weight_min, fraction, SIZE)
        tl.store(tokens + sample, tl.load(kept_ids + place))
    else:
        place = _invert(row, vocab_size, threshold, ties, peak, rate, weight_min, fraction, SIZE)
        tl.store(tokens + sample, place)


@dataclass(frozen=True, slots=True, eq=False)
class SamplingInputs:
    """What K samples ask for, on the logits' device; [K] each. The fields are those of the worker's batches."""

    logit_indices: torch.Tensor
    """int64, row of the logits"""
    greedy: torch.Tensor
    """bool"""
    temperatures: torch.Tensor
    """float64, positive where not greedy"""
    top_ks: torch.Tensor
    """int64, 0: off"""
    top_ps: torch.Tensor
    """float64"""
    min_ps: torch.Tensor
    """float64"""
    seeds: torch.Tensor
    """int64, the bits of the unsigned seed"""
    branches: torch.Tensor
    """int32"""
    positions: torch.Tensor
    """int32"""


def sample(logits: torch.Tensor, inputs: SamplingInputs, *, size: int = TILE) -> torch.Tensor:
    """int32 [K] tokens; `NO_TOKEN` where the row has NaN, positive infinity or nothing but negative infinity.

    logits  float32 [L, V], V <= `VOCAB_MAX`, rows contiguous; not modified
    size    tests ask for a small one, a power of two
    """
    num_samples, vocab_size = inputs.logit_indices.shape[0], logits.shape[1]
    tokens = torch.empty(num_samples, dtype=torch.int32, device=logits.device)
    kept_values = torch.empty((num_samples, size), dtype=torch.float32, device=logits.device)
    kept_ids = torch.empty((num_samples, size), dtype=torch.int32, device=logits.device)
    sample_kernel[(num_samples,)](
        logits,
        inputs.logit_indices,
        inputs.greedy.view(torch.uint8),
        inputs.temperatures,
        inputs.top_ks,
        inputs.top_ps,
        inputs.min_ps,
        inputs.seeds,
        inputs.branches,
        inputs.positions,
        kept_values,
        kept_ids,
        tokens,
        logits.stride(0),
        vocab_size,
        SIZE=size,
        num_warps=NUM_WARPS,
        maxnreg=MAX_REGISTERS,
        enable_fp_fusion=True,
    )
    return tokens


@triton.jit(do_not_specialize=["num_edits"])
def edit_logits_kernel(
    logits, rows, ids, amounts, factors, num_edits, row_stride, KIND: tl.constexpr, SIZE: tl.constexpr
):
    """Grid (tiles of edits,). KIND 0: minus infinity; 1: plus amounts; 2: divided by factors if positive, else
    multiplied, then minus amounts. Finite numbers stay finite."""
    edits = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    mask = edits < num_edits
    row = tl.load(rows + edits, mask=mask, other=0)
    places = logits + row * row_stride + tl.load(ids + edits, mask=mask, other=0)
    if KIND == 0:
        tl.store(places, tl.full([SIZE], float("-inf"), tl.float32), mask=mask)
    else:
        values = tl.load(places, mask=mask, other=0.0).to(tl.float64)
        amount = tl.load(amounts + edits, mask=mask, other=0.0)
        if KIND == 1:
            edited = values + amount
        else:
            factor = tl.load(factors + edits, mask=mask, other=1.0)
            edited = tl.where(values > 0, values / factor, values * factor) - amount
        largest = 3.4028234663852886e38
        fitting = tl.minimum(tl.maximum(edited, -largest), largest)
        keep = (edited != edited) | (tl.abs(edited) == float("inf"))
        tl.store(places, tl.where(keep, edited, fitting).to(tl.float32), mask=mask)


def edit_logits(
    logits: torch.Tensor,
    kind: int,
    rows: torch.Tensor,
    ids: torch.Tensor,
    amounts: torch.Tensor | None = None,
    factors: torch.Tensor | None = None,
) -> None:
    """Edit float32 [L, V] in place; no (row, id) twice.

    kind     `BAN`, `BIAS` (adds `amounts`) or `PENALTY` (divides by `factors` what is positive, multiplies the rest,
             then subtracts `amounts`)
    rows, ids, amounts, factors  int64, int64, float64, float64 [N]
    """
    num_edits = rows.shape[0]
    if num_edits:
        edit_logits_kernel[(triton.cdiv(num_edits, 256),)](
            logits, rows, ids, amounts, factors, num_edits, logits.stride(0), KIND=kind, SIZE=256, num_warps=4,
            enable_fp_fusion=False,
        )  # fmt: skip
