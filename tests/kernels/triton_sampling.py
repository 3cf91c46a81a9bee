"""Sampling on the device against its oracle and against the worker's sampler. Run by `test_triton_properties.py`."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.kernels import reference_sampling
from octavo.kernels.sample import BAN, BIAS, NO_TOKEN, PENALTY, SamplingInputs, edit_logits, sample
from octavo.protos.types import SamplingParams
from octavo.worker import gpu_sampler
from octavo.worker.gpu_sampler import GpuSampler
from octavo.worker.random import uniforms
from octavo.worker.sampler import NOT_FINITE, NOTHING_LEFT, Sampler

from ..worker.sampling_reference import make_batch, make_masks, make_request
from .triton_device import DEVICE

TILE = 128
"""Small, so that rows have several tiles and few tokens fit aside."""


def inputs(
    count: int,
    *,
    greedy: bool = False,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
    rows: list[int] | None = None,
) -> SamplingInputs:
    def column(value: object, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((count,), value, dtype=dtype, device=DEVICE)  # type: ignore[call-overload]

    return SamplingInputs(
        logit_indices=torch.tensor(rows if rows is not None else range(count), device=DEVICE),
        greedy=column(greedy, torch.bool),
        temperatures=column(temperature, torch.float64),
        top_ks=column(top_k, torch.int64),
        top_ps=column(top_p, torch.float64),
        min_ps=column(min_p, torch.float64),
        seeds=column(np.uint64(seed).astype(np.int64).item(), torch.int64),
        branches=torch.arange(count, dtype=torch.int32, device=DEVICE) % 3,
        positions=torch.arange(count, dtype=torch.int32, device=DEVICE),
    )


def numbers(count: int, seed: int) -> np.ndarray:
    places = np.arange(count)
    return uniforms(np.full(count, seed, np.uint64), places % 3, places)


@settings(max_examples=16, deadline=None, derandomize=True)
@given(
    vocab_size=st.sampled_from([1, 128, 300, 555]),
    spread=st.sampled_from([0.01, 1.0, 4.0, 30.0]),
    temperature=st.sampled_from([0.001, 0.7, 1.0, 5.0]),
    top_k=st.sampled_from([0, 0, 2, 40, 300, 5000]),
    top_p=st.sampled_from([1.0, 1.0, 0.0001, 0.5, 0.95]),
    min_p=st.sampled_from([0.0, 0.0, 0.1, 1.0]),
    # Few different values: ties at every edge.
    rounded=st.booleans(),
    banned=st.booleans(),
    seed=st.integers(0, 2**64 - 1),
)
def test_the_token_at_the_number(
    vocab_size: int,
    spread: float,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    rounded: bool,
    banned: bool,
    seed: int,
) -> None:
    logits = torch.randn(2, vocab_size, generator=torch.Generator().manual_seed(seed % 2**32)) * spread
    if rounded:
        logits = logits.round()
    if banned:
        logits[:, 1::2] = -torch.inf
    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    actual = sample(logits.to(DEVICE), inputs(2, seed=seed, **options), size=TILE).tolist()
    for row, token, number in zip(logits, actual, numbers(2, seed), strict=True):
        chances = reference_sampling.probabilities(row, **options)
        sums = chances.cumsum(0)
        # float32 weights differ from float64 in the sixth place where logits are far apart.
        assert chances[token] > 0, (token, number)
        assert sums[token] - chances[token] - 1e-5 <= number <= sums[token] + 1e-5, (token, number)


def test_a_flat_row_never_fits_aside() -> None:
    logits = torch.zeros(2, 1000)
    actual = sample(logits.to(DEVICE), inputs(2, top_p=0.3, seed=5), size=TILE).tolist()
    assert actual == [int(number * 300) for number in numbers(2, 5)]
    actual = sample(logits.to(DEVICE), inputs(2, top_k=700, seed=5), size=TILE).tolist()
    assert actual == [int(number * 700) for number in numbers(2, 5)]


def test_neighbours_change_nothing() -> None:
    logits = torch.randn(3, 300, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    together = sample(logits, inputs(3, top_p=0.9, rows=[2, 1, 0]), size=TILE)
    padded = torch.cat([torch.randn(2, 300, device=DEVICE), logits])
    assert torch.equal(sample(padded, inputs(3, top_p=0.9, rows=[4, 3, 2]), size=TILE), together)


def test_greedy_takes_the_lowest_id_of_equals() -> None:
    logits = torch.zeros(3, 300)
    logits[0, [290, 150]] = 2.0
    logits[1] = -torch.inf
    logits[1, 299] = -1e38
    logits[2] = -0.0
    logits[2, 5] = 0.0
    assert sample(logits.to(DEVICE), inputs(3, greedy=True), size=TILE).tolist() == [150, 299, 0]


@pytest.mark.parametrize("greedy", [False, True])
def test_a_row_that_is_not_finite_fails_alone(greedy: bool) -> None:
    logits = torch.zeros(5, 300)
    logits[0, 299] = torch.nan
    logits[1, 7] = torch.inf
    logits[2] = -torch.inf
    logits[3, :299] = -torch.inf
    actual = sample(logits.to(DEVICE), inputs(5, greedy=greedy, top_k=3), size=TILE).tolist()
    assert actual[:4] == [NO_TOKEN, NO_TOKEN, NO_TOKEN, 299]
    assert actual[4] >= 0


def test_edits() -> None:
    logits = torch.tensor([[1.0, -2.0, 3.0, torch.nan], [4.0, -3e38, -torch.inf, 0.0]], device=DEVICE)

    def integers(*values: int) -> torch.Tensor:
        return torch.tensor(values, device=DEVICE)

    def floats(*values: float) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64, device=DEVICE)

    edit_logits(logits, BAN, integers(0), integers(2))
    edit_logits(logits, BIAS, integers(0, 1, 1), integers(2, 1, 0), floats(5.0, -3e38, 1.5))
    edit_logits(
        logits,
        PENALTY,
        integers(0, 0, 0, 1, 1),
        integers(0, 1, 3, 0, 2),
        floats(0, 0.5, 1, 1, 1),
        floats(2, 2, 2, 1, 2),
    )
    largest = torch.finfo(torch.float32).max
    expected = torch.tensor([[0.5, -4.5, -torch.inf, torch.nan], [4.5, -largest, -torch.inf, 0.0]])
    torch.testing.assert_close(logits.cpu(), expected, rtol=0, atol=0, equal_nan=True)


def test_the_workers_sampler_draws_the_same() -> None:
    """Rows of every kind in one batch: greedy, edited, a fork's twins, penalties, failures, log-probabilities."""
    logits = torch.randn(6, 200, generator=torch.Generator().manual_seed(3)) * 3
    logits[4, 17] = torch.nan
    logits[5, :] = -torch.inf
    logits[5, 9] = 1.0
    options: list[tuple[int, dict[str, object], list[int]]] = [
        (0, {"temperature": 0.0}, []),
        (1, {"temperature": 0.8, "top_p": 0.9, "logprobs": 2}, [3]),
        (1, {"temperature": 0.8, "top_k": 30, "presence_penalty": 1.0, "frequency_penalty": 0.5}, [5, 5, 9]),
        (2, {"repetition_penalty": 1.4, "logit_bias": {7: 4.0, 0: -100.0}, "min_p": 0.02}, [7]),
        (3, {"temperature": 0.0, "logit_bias": {100: 50.0}, "logprobs": 0}, []),
        (4, {"logit_bias": {17: -100.0}}, []),
        (4, {"temperature": 0.0}, []),
        (5, {"min_tokens": 5, "stop_token_ids": (9,)}, []),
        (3, {"top_k": 1}, [1, 2]),
    ]
    samples = [
        (row, make_request(SamplingParams(max_tokens=50, **params), [3, 4], seed=k), outputs, k % 3)
        for k, (row, params, outputs) in enumerate(options)
    ]
    batch = make_batch(samples, 200)
    expected = Sampler().sample(logits, batch)
    actual = GpuSampler(torch.device(DEVICE)).sample(logits.to(DEVICE), batch)
    assert actual.token_ids.tolist() == expected.token_ids.tolist()
    assert actual.errors == expected.errors == {5: NOT_FINITE, 6: NOT_FINITE, 7: NOTHING_LEFT}
    assert actual.logprobs == expected.logprobs
    plain = make_batch(samples[:2], 200)
    assert GpuSampler(torch.device(DEVICE)).sample(logits.to(DEVICE), plain).token_ids.tolist() == (
        expected.token_ids[:2].tolist()
    )


def test_grammars_are_kept_as_by_torch() -> None:
    logits = torch.randn(3, 200, generator=torch.Generator().manual_seed(4)) * 3
    allowed = {0: {5, 190}, 2: set(range(40, 60)), 3: {199}}
    options: list[tuple[int, dict[str, object]]] = [
        (0, {"temperature": 0.0}),
        (0, {"temperature": 0.0}),
        (1, {"temperature": 1.0, "top_p": 0.9, "logit_bias": {50: 2.0, 7: 100.0}}),
        (2, {"temperature": 1.0}),
    ]
    samples = [
        (row, make_request(SamplingParams(max_tokens=50, **params), [3], seed=k), [], 0)
        for k, (row, params) in enumerate(options)
    ]
    for masks in (make_masks(allowed, 200, {3: "it failed"}), make_masks({0: {5, 190}}, 200)):
        batch = make_batch(samples, 200)
        edited = batch.edited | np.isin(np.arange(len(samples)), masks.samples)
        batch = dataclasses.replace(batch, edited=edited)
        expected = Sampler().sample(logits, batch, masks)
        actual = GpuSampler(torch.device(DEVICE)).sample(logits.to(DEVICE), batch, masks)
        assert actual.token_ids.tolist() == expected.token_ids.tolist()
        assert actual.errors == expected.errors


def test_the_check_at_start_holds() -> None:
    logits = torch.randn(8, 4096, generator=torch.Generator().manual_seed(0))
    batch = gpu_sampler._made_up(8)
    actual = GpuSampler(torch.device(DEVICE)).sample(logits.to(DEVICE), batch)
    assert actual.token_ids.tolist() == Sampler().sample(logits, batch).token_ids.tolist()
