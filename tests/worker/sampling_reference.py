"""Sampling as the documentation words it, one token and one rule at a time, in plain Python floats."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np

from octavo.protos.types import Request, SamplingParams
from octavo.worker.grammars import TokenMasks
from octavo.worker.logit_rules import LogitEdits, LogitRules
from octavo.worker.random import seed_bits, uniforms
from octavo.worker.sampler import SamplingBatch


def make_request(
    params: SamplingParams, prompt=(0,), *, seed: int = 0, eos_token_ids=(), request_id: str = "request"
) -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=np.asarray(prompt, np.int32),
        params=params,
        seed=seed,
        eos_token_ids=() if params.ignore_eos else tuple(eos_token_ids),
    )


def uniform_of(seed: int, branch: int, position: int) -> float:
    return float(
        uniforms(np.array([seed_bits(seed)], np.uint64), np.array([branch]), np.array([position]))[0]
    )


def edited_logits(logits, request: Request, outputs) -> list[float]:
    params = request.params
    edited = [float(x) for x in logits]
    if len(outputs) < params.min_tokens:
        for token in {*request.eos_token_ids, *params.stop_token_ids}:
            edited[token] = -math.inf
    for token, bias in params.logit_bias.items():
        edited[token] = float(np.float32(edited[token] + bias))
    counts = Counter(outputs)
    for token in {*request.prompt_token_ids.tolist(), *outputs}:
        x = edited[token]
        x = x / params.repetition_penalty if x > 0 else x * params.repetition_penalty
        if counts[token]:
            x -= params.presence_penalty + params.frequency_penalty * counts[token]
        edited[token] = float(np.float32(x))
    return edited


def probabilities(logits, request: Request, outputs) -> dict[int, float]:
    """Token -> probability, of those that may be drawn."""
    params = request.params
    edited = edited_logits(logits, request, outputs)
    order = sorted(range(len(edited)), key=lambda token: (-edited[token], token))
    if params.greedy:
        return {order[0]: 1.0}
    peak = edited[order[0]]
    weight = {token: math.exp((edited[token] - peak) / params.temperature) for token in order}
    if params.top_k:
        order = order[: params.top_k]
    if params.top_p < 1.0:
        total, running, kept = math.fsum(weight[token] for token in order), 0.0, []
        for token in order:
            kept.append(token)
            running += weight[token]
            if running >= params.top_p * total:
                break
        order = kept
    order = [token for token in order if weight[token] >= params.min_p and weight[token] > 0.0]
    total = math.fsum(weight[token] for token in order)
    return {token: weight[token] / total for token in sorted(order)}


def draw(logits, request: Request, outputs=(), branch: int = 0) -> int:
    chances = probabilities(logits, request, list(outputs))
    number, running = uniform_of(request.seed, branch, len(outputs)), 0.0
    for token, chance in chances.items():
        running += chance
        if number < running:
            return token
    return max(chances)


def make_masks(
    allowed: dict[int, set[int]], vocab_size: int, errors: dict[int, str] | None = None
) -> TokenMasks:
    """From the tokens that each of some samples may have."""
    bits = np.zeros((len(allowed), -(-vocab_size // 32) * 32), np.uint8)
    for index, (_, tokens) in enumerate(sorted(allowed.items())):
        bits[index, list(tokens)] = 1
    words = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
    return TokenMasks(np.array(sorted(allowed), np.int64), words, errors or {})


def make_batch(samples, vocab_size: int) -> SamplingBatch:
    """From (row of the logits, request, outputs, branch) for each sample, as `InputBatch` makes it."""
    samples = list(samples)
    rules = {
        k: rule
        for k, (_, request, outputs, _) in enumerate(samples)
        if (
            rule := LogitRules.of(
                request, np.array([*request.prompt_token_ids.tolist(), *outputs], np.int32), vocab_size
            )
        )
    }
    lengths = {k: len(outputs) for k, (_, _, outputs, _) in enumerate(samples)}
    params = [request.params for _, request, _, _ in samples]
    edited = np.zeros(len(samples), np.bool_)
    edited[list(rules)] = True
    return SamplingBatch(
        logit_indices=np.array([row for row, _, _, _ in samples], np.int64),
        greedy=np.array([p.greedy or p.top_k == 1 for p in params]),
        temperatures=np.array([p.temperature for p in params], np.float64),
        top_ks=np.array([p.top_k for p in params], np.int64),
        top_ps=np.array([p.top_p for p in params], np.float64),
        min_ps=np.array([p.min_p for p in params], np.float64),
        seeds=np.array([seed_bits(request.seed) for _, request, _, _ in samples], np.uint64),
        branches=np.array([branch for _, _, _, branch in samples], np.int32),
        positions=np.array(list(lengths.values()), np.int32),
        num_logprobs=np.array([-1 if p.logprobs is None else p.logprobs for p in params], np.int32),
        edited=edited,
        edits=LogitEdits.collect(rules, lengths) if rules else None,
    )
