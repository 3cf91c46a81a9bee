"""Section of `gpu.py`: every kernel against float64 on the device itself.

Each case gives the largest difference to the oracle, also in units in the last place of the result's dtype at the
largest result, and whether that is within what rounding explains.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gpu_batches import Layer, layer, quantised
from gpu_device import device_of

from octavo.kernels import reference, reference_quantised
from octavo.kernels.cascade_attention import cascade_attention
from octavo.kernels.copy_blocks import copy_blocks
from octavo.kernels.paged_attention import paged_attention
from octavo.kernels.quantised_kv import write_kv_quantised, write_kv_rope_quantised
from octavo.kernels.rms_norm import rms_norm
from octavo.kernels.silu_mul import silu_mul
from octavo.kernels.swap_blocks import gather_blocks, scatter_blocks
from octavo.kernels.write_kv import write_kv
from octavo.kernels.write_kv_rope import write_kv_rope
from octavo.worker.gpu_sampler import GpuSampler
from octavo.worker.sampler import Sampler, SamplingBatch

_ULP = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Half a unit in the last place of a number just above 1."""
_LIMIT = {torch.float32: 64.0, torch.bfloat16: 6.0, torch.float16: 6.0}
"""Of those; float32 sums of thousands of terms lose a few bits, weights are rounded to the cache's dtype."""


def difference(actual: torch.Tensor, expected: torch.Tensor) -> dict[str, Any]:
    wrong = (actual.double() - expected.double()).abs().max().item()
    size = max(expected.double().abs().max().item(), 1e-30)
    ulps = wrong / size / _ULP[actual.dtype]
    return {"max_difference": wrong, "half_ulps": round(ulps, 2), "right": bool(ulps <= _LIMIT[actual.dtype])}


def equal(actual: torch.Tensor, expected: torch.Tensor) -> dict[str, Any]:
    same = torch.equal(actual.view(torch.uint8), expected.view(torch.uint8))
    return {"equal": same, "right": same}


def run(report: Any, _: str) -> None:
    device, dry = device_of(report), report.dry_run
    shape = {"heads": 4, "kv_heads": 2, "head_dim": 16} if dry else {}
    long = 40 if dry else 1500
    mixed = [(5, 5), (1, long), (17, long // 2), (0, 9), (30, 37)]
    decodes = [(1, long), (1, 1), (1, 33), (1, long // 3)]
    for name, sequences in (("mixed", mixed), ("decode", decodes)):
        for dtype in (torch.bfloat16,) if dry else (torch.bfloat16, torch.float16, torch.float32):
            for splits in (0, 4):
                report.case(
                    f"attention {name} {_name(dtype)} splits {splits}",
                    lambda n=sequences, d=dtype, s=splits: attention(report, n, d, shape, splits=s),
                )
    options: list[dict[str, Any]] = [{"sliding_window": 20}, {"softcap": 5.0}]
    for option in options:
        report.case(
            f"attention mixed bfloat16 {option}",
            lambda o=option: attention(report, mixed, torch.bfloat16, shape, splits=0, **o),
        )
    for block_size in (24,) if dry else (8, 24, 64):
        report.case(
            f"attention mixed bfloat16 blocks of {block_size}",
            lambda b=block_size: attention(
                report, mixed, torch.bfloat16, shape | {"block_size": b}, splits=0
            ),
        )
    for format in (torch.float8_e4m3fn, torch.int8):
        for splits in (0, 4):
            report.case(
                f"attention decode {_name(format)} splits {splits}",
                lambda f=format, s=splits: attention(
                    report, decodes, torch.bfloat16, shape, splits=s, format=f
                ),
            )
        report.case(f"write_kv_quantised {_name(format)}", lambda f=format: written(device, shape, f))
        report.case(f"write_kv_rope_quantised {_name(format)}", lambda f=format: turned(device, dry, f))
    for format in (None, torch.float8_e4m3fn):
        report.case(
            f"shared prefix {_name(format or torch.bfloat16)}",
            lambda f=format: shared_prefix(report, shape, f),
        )
    for name, check in elementwise(device, dry).items():
        report.case(name, check)
    report.case("sample", lambda: sampled(device, 300 if dry else 128_256))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def attention(
    report: Any,
    sequences: list[tuple[int, int]],
    dtype: torch.dtype,
    shape: dict[str, int],
    *,
    splits: int,
    format: torch.dtype | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
) -> dict[str, Any]:
    made = layer(sequences, device_of(report), dtype=dtype, poison=0.0 if format else float("nan"), **shape)
    arguments = made.arguments() | {"softcap": softcap, "sliding_window": sliding_window}
    stored, read = with_format(made, format)
    expected = reference.paged_attention(**arguments | read | {"out": None})
    paged_attention(**arguments | stored, splits=splits, upcast=report.dry_run)
    return difference(made.out, expected)


def shared_prefix(report: Any, shape: dict[str, int], format: torch.dtype | None) -> dict[str, Any]:
    blocks = 2 if report.dry_run else 64
    sequences = [(rows, blocks * 16 + own) for rows, own in ((1, 5), (1, 40), (7, 7), (1, 1))]
    made = layer(sequences, device_of(report), shared_blocks=blocks, **shape)
    stored, read = with_format(made, format)
    expected = reference.paged_attention(**made.arguments() | read | {"out": None})
    cascade_attention(**made.arguments() | stored, num_shared_blocks=blocks, upcast=report.dry_run)
    return difference(made.out, expected)


def with_format(made: Layer, format: torch.dtype | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments in place of `made`'s caches for a kernel, and for its oracle the numbers that they stand for."""
    if format is None:
        return {}, {}
    stored = quantised(made, format)
    numbers = {
        f"{kind}_cache": reference_quantised.dequantised(stored[f"{kind}_cache"], scales)
        for kind, scales in zip("kv", stored["scales"], strict=True)
    }
    return stored, numbers


def written(device: torch.device, shape: dict[str, int], format: torch.dtype) -> dict[str, Any]:
    """A chunk, then decodes that grow: bytes and scales must be the oracle's."""
    made = layer([(37, 37), (1, 20)], device, dtype=torch.bfloat16, **shape)
    caches, twins = quantised(made, format), quantised(made, format)
    rows = torch.randn(2, len(made.q), made.k_cache.shape[1], made.k_cache.shape[3], device=device)
    slots = made.slots()
    for step in range(2):
        k, v = (rows * 3.0**step).bfloat16()
        used = slots if step == 0 else torch.where(slots == slots[36], slots + 1, -1)
        for function, cache in (
            (write_kv_quantised, caches),
            (reference_quantised.write_kv_quantised, twins),
        ):
            function(k, v, cache["k_cache"], cache["v_cache"], cache["scales"], used)
    pairs = [
        (caches[name].view(torch.uint8), twins[name].view(torch.uint8)) for name in ("k_cache", "v_cache")
    ]
    pairs += zip(caches["scales"], twins["scales"], strict=True)
    same = all(torch.equal(one, other) for one, other in pairs)
    return {"equal": same, "right": same}


def turned(device: torch.device, dry: bool, format: torch.dtype) -> dict[str, Any]:
    """Keys turned and stored in one pass: bytes may differ by one where a sine's last bit decides."""
    heads, kv_heads, dim = (4, 2, 16) if dry else (32, 8, 128)
    made = layer([(37, 37)], device, dtype=torch.bfloat16, heads=heads, kv_heads=kv_heads, head_dim=dim)
    fused, slots = torch.randn(37, heads + 2 * kv_heads, dim, device=device).bfloat16(), made.slots()
    angles = torch.rand(37, dim // 2, device=device) * 1000
    one, other = quantised(made, format), quantised(made, format)
    q, k, v = fused.clone().split((heads, kv_heads, kv_heads), dim=1)
    caches = (one["k_cache"], one["v_cache"], one["scales"])
    write_kv_rope_quantised(q, k, v, angles.cos(), angles.sin(), *caches, slots)
    keys = torch.empty(2, 37, kv_heads, 1, dim, device=device)
    other_q, k, v = fused.split((heads, kv_heads, kv_heads), dim=1)
    places = torch.arange(37, device=device)
    reference.write_kv_rope(other_q, k, v, angles.cos(), angles.sin(), keys[0], keys[1], places)
    caches = (other["k_cache"], other["v_cache"], other["scales"])
    reference_quantised.write_kv_quantised(keys[0, :, :, 0], keys[1, :, :, 0], *caches, slots)
    found = difference(q, other_q)
    share = max(
        (one[name].view(torch.uint8) != other[name].view(torch.uint8)).float().mean().item()
        for name in ("k_cache", "v_cache")
    )
    return found | {"bytes_that_differ": share, "right": found["right"] and share < 0.001}


def elementwise(device: torch.device, dry: bool) -> dict[str, Callable[[], dict[str, Any]]]:
    width, heads, kv_heads, dim = (64, 4, 2, 16) if dry else (4096, 32, 8, 128)
    dtype = torch.bfloat16
    rows = torch.randn(33, width, device=device).to(dtype)
    weight = torch.randn(width, device=device).to(dtype)
    fused = torch.randn(33, heads + 2 * kv_heads, dim, device=device).to(dtype)
    slots = torch.randperm(5 * 16, device=device)[:33]
    slots[3] = -1
    kv = torch.randn(2, 2, 5, kv_heads, 16, dim, device=device).to(dtype)

    def norm() -> dict[str, Any]:
        residual, twin, out = rows.flip(0).contiguous(), rows.flip(0).contiguous(), torch.empty_like(rows)
        rms_norm(rows, weight, 1e-5, residual, out)
        expected = reference.rms_norm(rows, weight, 1e-5, twin)
        sums = difference(residual, twin)
        found = difference(out, expected)
        return found | {"residual": sums, "right": found["right"] and sums["right"]}

    def silu() -> dict[str, Any]:
        out = rows.new_empty(33, width // 2)
        silu_mul(rows, out)
        return difference(out, reference.silu_mul(rows))

    def rope() -> dict[str, Any]:
        angles = torch.rand(33, dim // 2, device=device) * 1000
        found = []
        for function in (write_kv_rope, reference.write_kv_rope):
            own, cache = fused.clone(), torch.zeros_like(kv[0])
            q, k, v = own.split((heads, kv_heads, kv_heads), dim=1)
            function(q, k, v, angles.cos(), angles.sin(), cache[0], cache[1], slots)
            found.append(torch.cat([own.flatten(), cache.flatten()]))
        return difference(*found)

    def write() -> dict[str, Any]:
        caches = torch.zeros(2, *kv[0].shape, device=device, dtype=dtype)
        _, k, v = fused.split((heads, kv_heads, kv_heads), dim=1)
        write_kv(k, v, caches[0, 0], caches[0, 1], slots)
        reference.write_kv(k, v, caches[1, 0], caches[1, 1], slots)
        return equal(caches[0], caches[1])

    def move() -> dict[str, Any]:
        one, other = kv.clone(), kv.clone()
        copies, ids = torch.tensor([[0, 1], [0, 3]], device=device), torch.tensor([4, 1, 0], device=device)
        staging = kv.new_zeros(2, 3, *kv.shape[:2], *kv.shape[3:])
        copy_blocks(one, copies)
        gather_blocks(one, ids, staging[0])
        scatter_blocks(staging[0], ids.flip(0).contiguous(), one)
        reference.copy_blocks(other, copies)
        reference.gather_blocks(other, ids, staging[1])
        reference.scatter_blocks(staging[1], ids.flip(0), other)
        found = equal(one, other)
        return found | {"right": found["right"] and torch.equal(staging[0], staging[1])}

    return {
        "rms_norm": norm,
        "silu_mul": silu,
        "write_kv_rope": rope,
        "write_kv": write,
        "moving blocks": move,
    }


def sampling_batch(count: int, **options: Any) -> SamplingBatch:
    """`count` samples alike, of row k each; `options` override fields."""
    defaults = SamplingBatch(
        logit_indices=np.arange(count),
        greedy=np.zeros(count, np.bool_),
        temperatures=np.ones(count),
        top_ks=np.zeros(count, np.int64),
        top_ps=np.ones(count),
        min_ps=np.zeros(count),
        seeds=np.arange(count, dtype=np.uint64),
        branches=np.zeros(count, np.int32),
        positions=np.arange(count, dtype=np.int32),
        num_logprobs=np.full(count, -1, np.int32),
        edited=np.zeros(count, np.bool_),
    )
    return dataclasses.replace(defaults, **options)


def sampled(device: torch.device, vocab_size: int) -> dict[str, Any]:
    """Kernel and torch draw the same tokens, but for numbers that fall on an edge."""
    count = 4 if vocab_size < 1000 else 64
    logits = torch.randn(count, vocab_size, device=device) * 2
    found: dict[str, Any] = {}
    right = True
    for name, options in sampling_options(count).items():
        batch = sampling_batch(count, **options)
        own = GpuSampler(device).sample(logits, batch).token_ids
        torchs = Sampler().sample(logits, batch).token_ids
        found[name] = int((own != torchs).sum())
        right &= found[name] <= count // 32
    return {"different": found, "right": right}


def sampling_options(count: int) -> dict[str, dict[str, Any]]:
    return {
        "greedy": {"greedy": np.ones(count, np.bool_)},
        "temperature": {"temperatures": np.full(count, 0.8)},
        "top-k": {"top_ks": np.full(count, 50)},
        "top-p": {"top_ps": np.full(count, 0.9)},
        "top-k, top-p, min-p": {
            "top_ks": np.full(count, 1000),
            "top_ps": np.full(count, 0.95),
            "min_ps": np.full(count, 0.01),
        },
    }


__all__ = ["Layer", "run", "sampling_batch", "sampling_options"]
