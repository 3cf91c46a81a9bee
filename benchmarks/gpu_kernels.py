"""Section of `gpu.py`: bytes and flops a second of each kernel, as shares of a device copy and of a matrix product.

Bytes are those that must move: each key and value once a sequence (once a batch for a shared prefix), inputs and
outputs once. A kernel may well read more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from gpu_batches import Layer, layer, quantised
from gpu_correctness import sampling_batch, sampling_options
from gpu_device import Timer, device_of, limits

from octavo.kernels.cascade_attention import cascade_attention
from octavo.kernels.copy_blocks import copy_blocks
from octavo.kernels.paged_attention import paged_attention
from octavo.kernels.quantised_kv import write_kv_rope_quantised
from octavo.kernels.rms_norm import rms_norm
from octavo.kernels.silu_mul import silu_mul
from octavo.kernels.swap_blocks import gather_blocks, scatter_blocks
from octavo.kernels.write_kv_rope import write_kv_rope
from octavo.worker.gpu_sampler import GpuSampler
from octavo.worker.sampler import Sampler


class Bench:
    """Times calls and puts them beside the device's limits."""

    def __init__(self, report: Any) -> None:
        self.report = report
        self.device = device_of(report)
        self.dry = report.dry_run
        self.shape = {"heads": 4, "kv_heads": 2, "head_dim": 16} if self.dry else {}
        self._timer = Timer(report)
        found = report.case("limits", lambda: limits(report), again=True) or {}
        self._copy = found.get("copy_bytes_per_second")
        self._flops = found.get("bfloat16_flops_per_second")

    def timed(self, run: Callable[[], Any], *, num_bytes: float = 0, flops: float = 0) -> dict[str, float]:
        seconds = self._timer.median(run)
        found = {"microseconds": round(seconds * 1e6, 2)}
        if num_bytes:
            found["bytes_per_second"] = num_bytes / seconds
            if self._copy:
                found["share_of_copy"] = round(num_bytes / seconds / self._copy, 3)
        if flops:
            found["flops_per_second"] = flops / seconds
            if self._flops:
                found["share_of_product"] = round(flops / seconds / self._flops, 3)
        return found


def run(report: Any, _: str) -> None:
    bench = Bench(report)
    for num_seqs, context in _scaled(
        bench, [(1, 1024), (1, 32_768), (8, 8192), (64, 1024), (64, 8192), (256, 1024)]
    ):
        report.case(f"decode {num_seqs} x {context}", lambda n=num_seqs, c=context: decode(bench, n, c))
    for tokens, context in _scaled(bench, [(2048, 2048), (2048, 16_384), (8192, 8192)]):
        report.case(f"chunk {tokens} of {context}", lambda t=tokens, c=context: chunk(bench, t, c))
    for num_seqs, shared in _scaled(bench, [(16, 8192), (64, 8192), (128, 32_768)]):
        report.case(f"shared prefix {num_seqs} x {shared}", lambda n=num_seqs, c=shared: prefix(bench, n, c))
    for name, case in elementwise(bench).items():
        report.case(name, case)
    for count in (1, 64, 256):
        report.case(f"sample {count}", lambda n=count: sampling(bench, 2 if bench.dry else n))


def _scaled(bench: Bench, cases: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Tiny ones for a dry run."""
    return [(min(a, 3), min(b, 48)) for a, b in cases[:2]] if bench.dry else cases


def _kv_bytes(made: Layer, tokens: int, element_size: int = 2) -> int:
    return 2 * made.k_cache.shape[1] * made.k_cache.shape[3] * tokens * element_size


def decode(bench: Bench, num_seqs: int, context: int) -> dict[str, Any]:
    made = layer([(1, context)] * num_seqs, bench.device, **bench.shape)
    arguments = made.arguments() | {"sliding_window": None, "upcast": bench.dry}
    edges = 2 * made.q.nbytes
    whole = _kv_bytes(made, num_seqs * context) + edges
    found = {
        "chosen": bench.timed(lambda: paged_attention(**arguments), num_bytes=whole),
        "unsplit": bench.timed(lambda: paged_attention(**arguments, splits=0), num_bytes=whole),
    }
    for splits in (4, 16):
        found[f"splits {splits}"] = bench.timed(
            lambda n=splits: paged_attention(**arguments, splits=n), num_bytes=whole
        )
    for format in (torch.float8_e4m3fn, torch.int8):
        stored = arguments | quantised(made, format)
        found[str(format).removeprefix("torch.")] = bench.timed(
            lambda a=stored: paged_attention(**a), num_bytes=_kv_bytes(made, num_seqs * context, 1) + edges
        )
    # torch's attention over keys and values that lie in one piece: what paging costs.
    group = made.q.shape[1] // made.k_cache.shape[1]
    k, v = (
        torch.randn(num_seqs, made.k_cache.shape[1], context, made.q.shape[2], device=bench.device).to(
            made.q.dtype
        )
        for _ in range(2)
    )
    q = made.q.view(num_seqs, made.k_cache.shape[1], group, -1)
    found["torch, not paged"] = bench.timed(
        lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v), num_bytes=whole
    )
    return found


def chunk(bench: Bench, tokens: int, context: int) -> dict[str, Any]:
    tokens = min(tokens, context)
    made = layer([(tokens, context)], bench.device, **bench.shape)
    arguments = made.arguments() | {"sliding_window": None, "upcast": bench.dry}
    pairs = tokens * (context - tokens) + tokens * (tokens + 1) / 2
    flops = 4 * made.q.shape[1] * made.q.shape[2] * pairs
    found = {"chosen": bench.timed(lambda: paged_attention(**arguments), flops=flops)}
    if tokens == context:
        q, k, v = (
            torch.randn(1, heads, tokens, made.q.shape[2], device=bench.device).to(made.q.dtype)
            for heads in (made.q.shape[1], made.k_cache.shape[1], made.k_cache.shape[1])
        )
        found["torch, not paged"] = bench.timed(
            lambda: torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=True
            ),
            flops=flops,
        )
    return found


def prefix(bench: Bench, num_seqs: int, shared: int) -> dict[str, Any]:
    own = 16 if bench.dry else 256
    blocks = shared // 16
    made = layer([(1, blocks * 16 + own)], bench.device, **bench.shape)
    # Own blocks are alike for all sequences: only their number matters here, and memory stays small.
    made.block_tables = made.block_tables.repeat(num_seqs, 1)
    made.q = made.q.repeat(num_seqs, 1, 1)
    made.out = torch.zeros_like(made.q)
    made.cu_seqlens_q = torch.arange(num_seqs + 1, dtype=torch.int32, device=bench.device)
    made.context_lens = made.context_lens.repeat(num_seqs)
    arguments = made.arguments() | {"upcast": bench.dry}
    tokens = blocks * 16 + num_seqs * own
    return {
        "cascade": bench.timed(
            lambda: cascade_attention(**arguments, num_shared_blocks=blocks),
            num_bytes=_kv_bytes(made, tokens),
        ),
        "plain": bench.timed(lambda: paged_attention(**arguments, sliding_window=None)),
    }


def elementwise(bench: Bench) -> dict[str, Callable[[], dict[str, float]]]:
    device, dry = bench.device, bench.dry
    tokens, width, inner, layers = (5, 64, 96, 2) if dry else (4096, 4096, 14_336, 32)
    heads, kv_heads, dim = (4, 2, 16) if dry else (32, 8, 128)

    def rows(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, device=device).bfloat16()

    def norm() -> dict[str, float]:
        x, residual, weight = rows(tokens, width), rows(tokens, width), rows(width)
        out = torch.empty_like(x)
        return bench.timed(lambda: rms_norm(x, weight, 1e-5, residual, out), num_bytes=4 * x.nbytes)

    def silu() -> dict[str, float]:
        gate_up = rows(tokens, 2 * inner)
        out = gate_up.new_empty(tokens, inner)
        return bench.timed(lambda: silu_mul(gate_up, out), num_bytes=gate_up.nbytes + out.nbytes)

    def rope() -> dict[str, float]:
        made = layer([(tokens, tokens)], device, **bench.shape)
        fused, slots = rows(tokens, heads + 2 * kv_heads, dim), made.slots()
        q, k, v = fused.split((heads, kv_heads, kv_heads), dim=1)
        cos, sin = torch.rand(2, tokens, dim // 2, device=device)
        return bench.timed(
            lambda: write_kv_rope(q, k, v, cos, sin, made.k_cache, made.v_cache, slots),
            num_bytes=2 * fused.nbytes + 2 * cos.nbytes,
        )

    def narrow() -> dict[str, float]:
        made = layer([(tokens, tokens)], device, **bench.shape)
        stored, slots = quantised(made, torch.float8_e4m3fn), made.slots()
        fused = rows(tokens, heads + 2 * kv_heads, dim)
        q, k, v = fused.split((heads, kv_heads, kv_heads), dim=1)
        cos, sin = torch.rand(2, tokens, dim // 2, device=device)
        caches = (stored["k_cache"], stored["v_cache"], stored["scales"])
        return bench.timed(
            lambda: write_kv_rope_quantised(q, k, v, cos, sin, *caches, slots),
            num_bytes=(4 * heads + 6 * kv_heads) * tokens * dim + 2 * cos.nbytes,
        )

    def blocks(kind: str) -> Callable[[], dict[str, float]]:
        def moved() -> dict[str, float]:
            count = 2 if dry else 32
            kv = rows(layers, 2, 2 * count, kv_heads, 16, dim)
            ids = torch.randperm(2 * count, device=device)
            copies = torch.stack([ids[:count], ids[count:]], dim=1).contiguous()
            staging = kv.new_zeros(count, *kv.shape[:2], *kv.shape[3:])
            run = {
                "copy_blocks": lambda: copy_blocks(kv, copies),
                "gather_blocks": lambda: gather_blocks(kv, ids[:count], staging),
                "scatter_blocks": lambda: scatter_blocks(staging, ids[:count], kv),
            }[kind]
            return bench.timed(run, num_bytes=2 * staging.nbytes)

        return moved

    found: dict[str, Callable[[], dict[str, float]]] = {
        "rms_norm": norm,
        "silu_mul": silu,
        "write_kv_rope": rope,
        "write_kv_rope_quantised": narrow,
    }
    return found | {kind: blocks(kind) for kind in ("copy_blocks", "gather_blocks", "scatter_blocks")}


def sampling(bench: Bench, count: int) -> dict[str, Any]:
    """Whole calls, host work and the copy back included."""
    vocab_size = 300 if bench.dry else 128_256
    logits = torch.randn(count, vocab_size, device=bench.device) * 2
    own, torchs = GpuSampler(bench.device), Sampler()
    found = {}
    for name, options in sampling_options(count).items():
        batch = sampling_batch(count, **options)
        found[name] = {
            "kernel": bench.timed(lambda b=batch: own.sample(logits, b), num_bytes=logits.nbytes),
            "torch": bench.timed(lambda b=batch: torchs.sample(logits, b), num_bytes=logits.nbytes),
        }
    return found
