"""Script: compile every launch as the launchers make it, for an sm_90 that isn't there, and print how many there were.

The interpreter knows nothing of types, specialisation and compiler options, and `kernels.aot` compiles from a list of
its own. Here the real launchers run with real tensors; a stand-in for the driver lets triton bind and compile the
arguments, and nothing is launched.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from octavo.kernels import sample
from octavo.kernels.cascade_attention import cascade_attention
from octavo.kernels.copy_blocks import copy_blocks
from octavo.kernels.paged_attention import paged_attention
from octavo.kernels.quantised_kv import write_kv_quantised, write_kv_rope_quantised
from octavo.kernels.rms_norm import rms_norm
from octavo.kernels.silu_mul import silu_mul
from octavo.kernels.swap_blocks import gather_blocks, scatter_blocks
from octavo.kernels.write_kv import write_kv
from octavo.kernels.write_kv_rope import write_kv_rope
from octavo.worker import gpu_sampler

HEADS, KV_HEADS, DIM, BLOCK = 32, 8, 128, 16


class Driver:
    """What `warmup` asks of one."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


compiled: Counter[str] = Counter()


def compile_instead(kernel: Any, grid: Any) -> Any:
    def call(*arguments: Any, **options: Any) -> None:
        assert all(size > 0 for size in grid), grid
        kernel.warmup(*arguments, grid=grid, **options)
        compiled[kernel.__name__] += 1

    return call


def rows(*sizes: int) -> torch.Tensor:
    return torch.randn(*sizes).bfloat16()


def attention(num_tokens: int, bounds: list[int], contexts: list[int]) -> None:
    cache = rows(2, 20, KV_HEADS, BLOCK, DIM)
    q = rows(num_tokens, HEADS, DIM)
    arguments: dict[str, Any] = {
        "q": q,
        "k_cache": cache[0],
        "v_cache": cache[1],
        "block_tables": torch.zeros(len(contexts), 7, dtype=torch.int32),
        "cu_seqlens_q": torch.tensor(bounds, dtype=torch.int32),
        "context_lens": torch.tensor(contexts, dtype=torch.int32),
        "scale": DIM**-0.5,
        "softcap": None,
        "out": torch.empty_like(q),
    }
    plain = arguments | {"sliding_window": None}
    for splits in (0, 4):
        paged_attention(**plain, splits=splits)
    paged_attention(**plain | {"sliding_window": 5, "softcap": 3.0})
    cascade_attention(**arguments, num_shared_blocks=2)
    for format in (torch.float8_e4m3fn, torch.int8):
        stored, scales = cache.to(format), torch.ones(2, 20, KV_HEADS)
        quantised = {"k_cache": stored[0], "v_cache": stored[1], "scales": tuple(scales)}
        paged_attention(**plain | quantised, splits=4)
        k, v = rows(2, num_tokens, KV_HEADS, DIM)
        write_kv_quantised(k, v, *stored, tuple(scales), torch.arange(num_tokens))
        angles = torch.rand(num_tokens, DIM // 2)
        write_kv_rope_quantised(q, k, v, angles, angles, *stored, tuple(scales), torch.arange(num_tokens))


def elementwise() -> None:
    x = rows(3, 4096)
    rms_norm(x, x[0], 1e-5, None, torch.empty_like(x))
    rms_norm(x, x[0], 1e-5, rows(3, 4096), torch.empty_like(x))
    silu_mul(x, rows(3, 2048))
    kv, staging = rows(2, 2, 5, KV_HEADS, BLOCK, DIM), rows(3, 2, 2, KV_HEADS, BLOCK, DIM)
    copy_blocks(kv, torch.tensor([[0, 1]]))
    gather_blocks(kv, torch.tensor([0, 1]), staging)
    scatter_blocks(staging, torch.tensor([0, 1]), kv)
    q, k, v = rows(3, HEADS + 2 * KV_HEADS, DIM).split((HEADS, KV_HEADS, KV_HEADS), dim=1)
    write_kv(k, v, kv[0, 0], kv[0, 1], torch.arange(3))
    # As rotary modules give them: every angle twice, side by side.
    angles = torch.rand(3, DIM)[:, : DIM // 2]
    write_kv_rope(q, k, v, angles, angles, kv[0, 0], kv[0, 1], torch.arange(3))


def sampling() -> None:
    logits = torch.randn(8, 4096)
    gpu_sampler.GpuSampler(torch.device("cpu"))._tokens(logits, gpu_sampler._made_up(8), None)
    index, number = torch.tensor([0]), torch.tensor([0.5], dtype=torch.float64)
    sample.edit_logits(logits, sample.BAN, index, index)
    sample.edit_logits(logits, sample.BIAS, index, index, number)
    sample.edit_logits(logits, sample.PENALTY, index, index, number, number)


def main() -> None:
    driver.set_active(Driver())
    JITFunction.__getitem__ = compile_instead  # type: ignore[method-assign, assignment]
    attention(3, [0, 1, 2, 3], [100, 1, 40])
    attention(25, [0, 20, 20, 25], [60, 40, 45])
    elementwise()
    sampling()
    print(json.dumps(compiled))


if __name__ == "__main__":
    main()
