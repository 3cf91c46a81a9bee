"""The sampler against a plain reference, and what it must never let one row do to another."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.protos.types import MASKED_TOKEN, SamplingParams
from octavo.worker import sampler as sampler_module
from octavo.worker.sampler import NOT_FINITE, NOTHING_LEFT, Sampler

from .sampling_reference import draw, edited_logits, make_batch, make_masks, make_request, probabilities

VOCAB = 48


def noise(rows: int, vocab_size: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.from_numpy(
        np.random.default_rng(seed).normal(0, scale, (rows, vocab_size)).astype(np.float32)
    )


def sample(logits, samples, **options):
    return Sampler(**options).sample(logits, make_batch(samples, logits.shape[1]))


def one(logits, params, **request):
    """The samples of a single row."""
    logits = torch.as_tensor(logits, dtype=torch.float32).reshape(1, -1)
    outputs = request.pop("outputs", ())
    return sample(logits, [(0, make_request(params, **request), outputs, 0)])


@st.composite
def params_and_history(draw_value):
    ids = st.integers(0, VOCAB - 1)
    share = st.floats(0.01, 1.0)
    params = SamplingParams(
        max_tokens=100,
        temperature=draw_value(st.sampled_from([0.0, 1e-4, 0.3, 1.0, 1.7])),
        top_k=draw_value(st.one_of(st.just(0), st.integers(1, VOCAB + 5))),
        top_p=draw_value(st.one_of(st.just(1.0), share)),
        min_p=draw_value(st.one_of(st.just(0.0), share)),
        presence_penalty=draw_value(st.sampled_from([0.0, 0.0, 1.5, -2.0])),
        frequency_penalty=draw_value(st.sampled_from([0.0, 0.0, 0.7, -1.0])),
        repetition_penalty=draw_value(st.sampled_from([1.0, 1.0, 1.3, 0.6])),
        logit_bias=draw_value(st.dictionaries(ids, st.floats(-100, 100), max_size=3)),
        min_tokens=draw_value(st.sampled_from([0, 0, 4])),
        stop_token_ids=tuple(draw_value(st.lists(ids, max_size=2))),
        logprobs=draw_value(st.sampled_from([None, 0, 3])),
    )
    request = make_request(
        params,
        draw_value(st.lists(ids, min_size=1, max_size=6)),
        seed=draw_value(st.integers(-(2**63), 2**63 - 1)),
        eos_token_ids=(2,),
    )
    return request, draw_value(st.lists(ids, max_size=6)), draw_value(st.integers(0, 3))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(params_and_history(), min_size=1, max_size=5), st.integers(0, 2**16), st.booleans())
def test_tokens_equal_the_plain_reference_whatever_the_batch(cases, seed, tie):
    logits = noise(len(cases), VOCAB, seed)
    if tie:
        logits = logits.round()
    samples = [(row, *case) for row, case in enumerate(cases)]
    got = sample(logits, samples)
    assert got.errors == {}
    for row, (request, outputs, branch) in enumerate(cases):
        assert got.token_ids[row] == draw(logits[row].tolist(), request, outputs, branch), request.params


MIXED = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8, logprobs=5),
    SamplingParams(temperature=1.0, top_k=7, logprobs=20),
    SamplingParams(temperature=1.0, top_k=700),
    SamplingParams(temperature=0.9, top_p=0.9, presence_penalty=1.0, logprobs=0),
    SamplingParams(temperature=2.0, top_p=0.999),
    SamplingParams(temperature=1.2, min_p=0.05, logit_bias={3: 4.0}),
    SamplingParams(temperature=0.0, repetition_penalty=1.4, logprobs=2),
]


@pytest.mark.parametrize("vocab_size", [1000, 5003])
def test_d08_a_row_is_the_same_to_the_bit_alone_and_in_any_batch(vocab_size):
    logits = noise(24, vocab_size, seed=5, scale=2.0)
    samples = [
        (row, make_request(MIXED[row % len(MIXED)], [1, 2, row], seed=row // 2), [3, 3, row], row % 3)
        for row in range(24)
    ]
    alone = []
    for row, request, outputs, branch in samples:
        got = sample(logits[row : row + 1].clone(), [(0, request, outputs, branch)])
        alone.append((int(got.token_ids[0]), got.logprobs[0] if got.logprobs else None))
    order = np.random.default_rng(1).permutation(24)
    for batch, options in (
        (samples, {}),
        ([samples[i] for i in order], {}),
        (samples, {"scratch_bytes": 8 * vocab_size * 3}),
        (samples, {"scratch_bytes": 1}),
    ):
        got = sample(logits, batch, **options)
        for k, (row, *_) in enumerate(batch):
            assert (int(got.token_ids[k]), got.logprobs[k]) == alone[row]


def test_logits_are_not_modified():
    logits = noise(8, 200)
    before = logits.clone()
    sample(logits, [(row, make_request(MIXED[row], [1, 2], seed=row), [5], 0) for row in range(8)])
    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.5, top_k=6),
        SamplingParams(temperature=1.5, top_p=0.8),
        SamplingParams(temperature=1.0, min_p=0.1),
        SamplingParams(temperature=1.3, top_k=9, top_p=0.9, min_p=0.02),
    ],
)
def test_distribution_and_support(params):
    count, vocab_size = 20_000, 16
    logits = noise(1, vocab_size, seed=3, scale=1.5)
    base = make_batch([(0, make_request(params), (), 0)], vocab_size)
    batch = sampler_module.SamplingBatch(
        **{
            name: np.repeat(getattr(base, name), count)
            for name in base.__dataclass_fields__
            if name not in ("edits", "positions", "seeds")
        },
        seeds=np.full(count, 11, np.uint64),
        positions=np.arange(count, dtype=np.int32),
        edits=None,
    )
    observed = np.bincount(Sampler().sample(logits, batch).token_ids, minlength=vocab_size)
    expected = np.zeros(vocab_size)
    for token, chance in probabilities(logits[0].tolist(), make_request(params), []).items():
        expected[token] = chance * count
    likely = expected > 10
    assert not observed[expected == 0].any()
    assert observed[likely].all()
    chi_square = ((observed - expected)[likely] ** 2 / expected[likely]).sum()
    assert chi_square < 45  # up to 15 degrees of freedom: 0.9999 quantile


# --- greedy -------------------------------------------------------------------------------------------------


def test_greedy_takes_the_lowest_id_of_equals():
    assert one([0, 5, 1, 5, 5], SamplingParams(temperature=0)).token_ids.tolist() == [1]


@pytest.mark.parametrize("temperature", [0.0, 1e-300, 1e-4, 9.9e-4])
def test_d16_tiny_temperatures_act_as_greedy(temperature):
    logits = noise(1, VOCAB)
    got = one(logits, SamplingParams(temperature=temperature, seed=4, top_p=0.3))
    assert got.token_ids[0] == logits.argmax()


def test_d16_smallest_temperature_that_samples_is_sound():
    logits = torch.tensor([[-3e38, 3e38, 2e38, -torch.inf]])
    assert one(logits, SamplingParams(temperature=1e-3, top_p=0.9)).token_ids.tolist() == [1]


def test_top_k_1_equals_greedy_with_ties():
    logits = noise(1, VOCAB).round()
    for seed in range(20):
        got = one(logits, SamplingParams(temperature=2.0, top_k=1), seed=seed)
        assert got.token_ids[0] == int(np.argmax(logits.numpy()))


def test_greedy_with_rules_edits_first():
    logits = [0.0, 3.0, 2.9, 1.0]
    assert one(logits, SamplingParams(temperature=0, presence_penalty=2.0), outputs=[1]).token_ids[0] == 2
    assert one(logits, SamplingParams(temperature=0, logit_bias={3: 100})).token_ids[0] == 3


# --- truncation ---------------------------------------------------------------------------------------------


def drawn_set(logits, params, count=3000):
    request_samples = [(0, make_request(params, seed=seed), (), 0) for seed in range(count)]
    logits = torch.as_tensor(logits, dtype=torch.float32).reshape(1, -1)
    return set(sample(logits, request_samples).token_ids.tolist())


def test_ties_at_the_edge_of_top_k_keep_the_lowest_ids():
    assert drawn_set([1, 2, 1, 2, 1, 1], SamplingParams(temperature=1.0, top_k=4)) == {0, 1, 2, 3}


def test_ties_at_the_edge_of_top_p_keep_the_lowest_ids():
    assert drawn_set([0] * 10, SamplingParams(temperature=1.0, top_p=0.35)) == {0, 1, 2, 3}


def test_top_p_is_taken_of_what_top_k_leaves():
    logits = np.log([0.4, 0.2, 0.2, 0.1, 0.1])
    # Of the renormalised 0.5, 0.25, 0.25 the first two reach 0.7; of all five, three would be needed.
    assert drawn_set(logits, SamplingParams(temperature=1.0, top_k=3, top_p=0.7)) == {0, 1}


def test_min_p_is_relative_to_the_likeliest():
    logits = np.log([0.5, 0.26, 0.14, 0.1])
    assert drawn_set(logits, SamplingParams(temperature=1.0, min_p=0.25)) == {0, 1, 2}
    assert drawn_set(logits, SamplingParams(temperature=1.0, min_p=1.0)) == {0}


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.9999, 1 - 1e-12])
@pytest.mark.parametrize("top_k", [0, 300, 2500])
def test_flat_rows_need_more_than_the_first_candidates(top_p, top_k):
    logits = noise(1, 3000, seed=8, scale=0.3)
    params = SamplingParams(temperature=1.0, top_p=top_p, top_k=top_k)
    for seed in range(6):
        request = make_request(params, seed=seed)
        assert sample(logits, [(0, request, (), 0)]).token_ids[0] == draw(logits[0].tolist(), request)


@pytest.mark.parametrize("number", [0.0, 1.0 - 2.0**-53])
@pytest.mark.parametrize("params", [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.4}])
def test_the_ends_of_the_unit_interval_give_tokens_of_the_support(monkeypatch, number, params):
    monkeypatch.setattr(sampler_module, "uniforms", lambda seeds, *_: np.full(len(seeds), number))
    logits = torch.cat([torch.tensor([-torch.inf]), noise(1, 500)[0], torch.tensor([-torch.inf, -200.0])])
    params = SamplingParams(temperature=1.0, **params)
    allowed = [token for token in probabilities(logits.tolist(), make_request(params), []) if token < 501]
    got = int(one(logits, params).token_ids[0])
    assert got == (allowed[0] if number == 0.0 else allowed[-1])


# --- rules --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_outputs", [0, 2, 3, 4])
def test_min_tokens_bans_stops_until_reached(num_outputs):
    params = SamplingParams(temperature=0, min_tokens=3, stop_token_ids=(1,))
    got = one([0, 9, 8, 1], params, eos_token_ids=(2,), outputs=[0] * num_outputs)
    assert got.token_ids[0] == (3 if num_outputs < 3 else 1)


def test_stop_ids_outside_the_vocabulary_ban_nothing():
    params = SamplingParams(temperature=0, min_tokens=3)
    assert one([0, 9, 8, 1], params, eos_token_ids=(4000,)).token_ids[0] == 1


def test_d15_a_bias_touches_its_own_row_only():
    logits = noise(3, VOCAB)
    greedy = make_request(SamplingParams(temperature=0))
    biased = make_request(SamplingParams(temperature=0, logit_bias={VOCAB - 1: 100.0, 0: -100.0}))
    got = sample(logits, [(0, greedy, (), 0), (1, biased, (), 0), (2, greedy, (), 0)])
    assert got.token_ids.tolist() == [int(logits[0].argmax()), VOCAB - 1, int(logits[2].argmax())]


def test_a_fork_shares_logits_and_draws_apart():
    logits = noise(1, 500, scale=0.5)
    request = make_request(SamplingParams(temperature=1.0, n=4, logit_bias={5: 1.0}), seed=1)
    got = sample(logits, [(0, request, (), branch) for branch in range(4)])
    assert got.token_ids.tolist() == [draw(logits[0].tolist(), request, (), branch) for branch in range(4)]
    assert len(set(got.token_ids.tolist())) > 1


def test_penalties_equal_the_naive_count():
    params = SamplingParams(
        temperature=0, presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=1.2, logprobs=None
    )
    prompt, outputs = [1, 1, 2], [3, 3, 3, 4]
    logits = noise(1, 12, seed=2)
    request = make_request(params, prompt)
    expected = np.argmax(edited_logits(logits[0].tolist(), request, outputs))
    assert one(logits, params, prompt=prompt, outputs=outputs).token_ids[0] == expected


@pytest.mark.parametrize("penalty", [0.01, 10.0])
def test_extreme_repetition_penalties_stay_finite(penalty):
    params = SamplingParams(temperature=1.0, repetition_penalty=penalty, logprobs=1)
    got = one([3.0, -2.0, 1.0], params, prompt=[0, 1])
    assert got.errors == {}
    assert math.isfinite(got.logprobs[0].logprob)


# --- faults -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("poison", [math.nan, math.inf, "all -inf"])
def test_one_row_that_is_not_finite_fails_alone(poison):
    logits = noise(6, 300)
    samples = [(row, make_request(MIXED[row], [1, 2], seed=row), [5], 0) for row in range(6)]
    clean = sample(logits, samples)
    if poison == "all -inf":
        logits[2] = -torch.inf
    else:
        logits[2, 7] = poison
    got = sample(logits, samples)
    assert got.errors == {2: NOT_FINITE}
    assert got.token_ids[2] == MASKED_TOKEN
    assert got.logprobs[2] is None
    others = [0, 1, 3, 4, 5]
    assert got.token_ids[others].tolist() == clean.token_ids[others].tolist()
    assert [got.logprobs[k] for k in others] == [clean.logprobs[k] for k in others]


def test_a_row_with_every_token_banned_fails_alone():
    params = SamplingParams(temperature=1.0, min_tokens=5, stop_token_ids=(0, 1, 2, 3))
    neighbour = make_request(SamplingParams(temperature=1.0), seed=3)
    logits = noise(2, 4)
    got = sample(logits, [(0, make_request(params), (), 0), (1, neighbour, (), 0)])
    assert got.errors == {0: NOTHING_LEFT}
    assert got.token_ids.tolist() == [MASKED_TOKEN, draw(logits[1].tolist(), neighbour)]


# --- log-probabilities --------------------------------------------------------------------------------------


def test_d18_logprobs_are_of_the_raw_distribution():
    logits = noise(1, 100, seed=4)
    params = SamplingParams(
        temperature=0.3, top_k=1, logit_bias={7: 100.0}, repetition_penalty=2.0, logprobs=5
    )
    entry = one(logits, params, prompt=[1, 2, 3]).logprobs[0]
    exact = torch.log_softmax(logits[0].double(), 0)
    order = torch.argsort(exact, descending=True, stable=True)[:5].tolist()
    assert entry.logprob == pytest.approx(exact[7].item(), abs=1e-9)
    assert list(entry.top_ids) == order
    assert entry.top_logprobs == pytest.approx(exact[order].tolist(), abs=1e-9)


def test_d18_logprobs_come_only_where_asked():
    logits = noise(3, 100)
    wants = [None, 0, 2]
    samples = [
        (k, make_request(SamplingParams(temperature=0, logprobs=want)), (), 0) for k, want in enumerate(wants)
    ]
    got = sample(logits, samples)
    assert got.logprobs[0] is None
    assert got.logprobs[1].top_ids == ()
    assert len(got.logprobs[2].top_ids) == len(got.logprobs[2].top_logprobs) == 2
    assert got.logprobs[2].top_logprobs[0] == got.logprobs[2].logprob
    assert sample(logits[:1], samples[:1]).logprobs == ()


def test_d18_ties_in_top_logprobs_go_to_the_lowest_ids():
    logits = torch.zeros(1, 400)
    logits[0, 300] = 1.0
    entry = one(logits, SamplingParams(temperature=0, logprobs=4)).logprobs[0]
    assert entry.top_ids == (300, 0, 1, 2)


def test_d18_minus_infinity_is_never_nan():
    entry = one([1.0, -math.inf, -math.inf], SamplingParams(temperature=1.0, logprobs=5)).logprobs[0]
    assert entry.logprob == 0.0
    assert entry.top_ids == (0, 1, 2)
    assert entry.top_logprobs == (0.0, -math.inf, -math.inf)


def test_huge_logits_give_finite_logprobs():
    entry = one([3e38, -3e38, 3e38], SamplingParams(temperature=1.0, logprobs=2), seed=3).logprobs[0]
    assert entry.top_logprobs == pytest.approx((math.log(0.5), math.log(0.5)))


@pytest.mark.parametrize("scratch_bytes", [None, 1])
def test_grammars_take_tokens_away_before_anything_else(scratch_bytes):
    logits = noise(4, VOCAB, 5)
    allowed = {1: {3, 7, 40}, 2: set(range(10, 20)), 4: {VOCAB - 1}, 5: set()}
    options = [
        (0, {"temperature": 0.0}),
        (0, {"temperature": 0.0}),
        (1, {"temperature": 1.5, "top_k": 30, "presence_penalty": 1.0, "logit_bias": {0: 100.0, 12: 1.0}}),
        (2, {"temperature": 0.9, "top_p": 0.9}),
        (2, {"temperature": 0.9, "top_p": 0.9, "logprobs": 2}),
        (3, {"temperature": 0.0}),
    ]
    samples = [
        (row, make_request(SamplingParams(max_tokens=9, **params), [1, 12], seed=k), [12], 0)
        for k, (row, params) in enumerate(options)
    ]
    batch = make_batch(samples, VOCAB)
    batch = replace(batch, edited=batch.edited | np.isin(np.arange(6), list(allowed)))
    masks = make_masks(allowed, VOCAB, {5: "the grammar failed"})
    got = Sampler(scratch_bytes=scratch_bytes).sample(logits, batch, masks)
    for k, (row, request, outputs, branch) in enumerate(samples[:5]):
        held = logits[row].numpy().copy()
        if k in allowed:
            held[sorted(set(range(VOCAB)) - allowed[k])] = -np.inf
        assert got.token_ids[k] == draw(held, request, outputs, branch), k
    assert got.errors == {5: "the grammar failed"}
    # What is told is the model's own distribution.
    assert got.logprobs[4].logprob == pytest.approx(float(logits[2].log_softmax(0)[VOCAB - 1]), abs=1e-5)
    assert got.logprobs[4].top_ids[0] == int(logits[2].argmax())
