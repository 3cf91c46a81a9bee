"""Section of `gpu.py`: blocks of an 8-billion Llama between device and pinned host memory, alone and under compute."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from gpu_device import device_of

from octavo.worker.kv_pool import KVPool, KVShape
from octavo.worker.swap import SwapSpace


def run(report: Any, _: str) -> None:
    device, dry = device_of(report), report.dry_run
    shape = KVShape(
        num_layers=2 if dry else 32,
        num_kv_heads=2 if dry else 8,
        head_dim=16 if dry else 128,
        block_size=16,
        dtype=torch.bfloat16,
    )
    num_blocks = 8 if dry else 1024
    pool = KVPool(shape, num_blocks=num_blocks, device=device)
    pool.kv.normal_()
    space: list[SwapSpace] = []

    def allocate() -> dict[str, float]:
        started = time.perf_counter()
        space.append(SwapSpace(pool, num_blocks=num_blocks))
        return {"seconds": time.perf_counter() - started, "bytes": space[0].size_bytes}

    if report.case("pinned memory", allocate, again=True) is None:
        return
    report.case("as measured at start", lambda: {"bytes_per_second": space[0].measure_bandwidth()})
    for count in (2,) if dry else (16, 64, 512):
        report.case(f"{count} blocks", lambda n=count: moved(pool, space[0], n))
    report.case("beside compute", lambda: beside_compute(pool, space[0], 2 if dry else 256, dry=dry))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def moved(pool: KVPool, space: SwapSpace, count: int) -> dict[str, Any]:
    """Scattered blocks out and back; what returns must be what left."""
    device = pool.kv.device
    ids = np.random.default_rng(0).permutation(pool.num_blocks)[:count].astype(np.int32)
    hosts = np.arange(count, dtype=np.int32)
    before = pool.kv[:, :, torch.from_numpy(ids).long().to(device)].clone()
    seconds: dict[str, list[float]] = {"out": [], "back": []}
    for _ in range(3):
        for way, run, pairs in (
            ("out", space.swap_out, np.stack([ids, hosts], axis=1)),
            ("back", space.swap_in, np.stack([hosts, ids], axis=1)),
        ):
            _wait(device)
            started = time.perf_counter()
            run(pairs)
            _wait(device)
            seconds[way].append(time.perf_counter() - started)
            if way == "out":
                pool.kv[:, :, torch.from_numpy(ids).long().to(device)] = 0
    after = pool.kv[:, :, torch.from_numpy(ids).long().to(device)]
    num_bytes = count * pool.shape.bytes_per_block
    same = torch.equal(before.view(torch.int16), after.view(torch.int16))
    return {f"{way}_bytes_per_second": num_bytes / min(found) for way, found in seconds.items()} | {
        "right": same
    }


def beside_compute(pool: KVPool, space: SwapSpace, count: int, *, dry: bool) -> dict[str, float]:
    """How much a swap-out slows matrix products that are launched behind it."""
    device = pool.kv.device
    width = 64 if dry else 8192
    a, b = (torch.randn(width, width, device=device).bfloat16() for _ in range(2))
    pairs = np.stack([np.arange(count, dtype=np.int32)] * 2, axis=1)

    def seconds(*, swap: bool, compute: bool) -> float:
        _wait(device)
        started = time.perf_counter()
        if swap:
            space.swap_out(pairs)
        if compute:
            for _ in range(2 if dry else 40):
                torch.mm(a, b)
        _wait(device)
        return time.perf_counter() - started

    seconds(swap=True, compute=True)
    alone = {name: seconds(swap=name == "swap", compute=name == "compute") for name in ("swap", "compute")}
    both = seconds(swap=True, compute=True)
    hidden = (alone["swap"] + alone["compute"] - both) / max(min(alone.values()), 1e-9)
    return {f"{name}_seconds": value for name, value in alone.items()} | {
        "both_seconds": both,
        "share_hidden": round(hidden, 3),
    }
