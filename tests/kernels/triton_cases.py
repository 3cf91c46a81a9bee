"""Script: run the Triton kernels on a set of cases and print one JSON line a case with its differences.

A process of its own, because triton decides at import whether it compiles or interprets. With TRITON_INTERPRET=1
it runs on the CPU; without, on the GPU. `against` says what the result is compared with.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from batches import Shape, ragged_batch

from octavo.kernels import copy_blocks, dispatch, paged_attention, reference, write_kv

INTERPRETED = not hasattr(paged_attention.paged_attention_kernel, "device_caches")
DEVICE = "cpu" if INTERPRETED else "cuda"

MIXED = [(5, 5), (1, 37), (16, 48), (0, 9), (30, 77)]
DECODES = [(1, 37), (1, 1), (0, 20), (1, 90), (1, 16)]

ATTENTION: dict[str, tuple[list[tuple[int, int]], Shape, dict[str, object]]] = {
    "mixed": (MIXED, Shape(heads=9, kv_heads=3, head_dim=64), {}),
    "decodes": (DECODES, Shape(heads=9, kv_heads=3, head_dim=64), {}),
    "window": (MIXED, Shape(), {"sliding_window": 7}),
    "window decodes": (DECODES, Shape(), {"sliding_window": 17}),
    "softcap": (MIXED, Shape(), {"softcap": 2.0}),
    "window and softcap": (MIXED, Shape(block_size=8), {"sliding_window": 20, "softcap": 30.0}),
    "one head a group": (MIXED, Shape(heads=2, kv_heads=2, head_dim=64), {}),
    "eight heads a group": (MIXED, Shape(heads=8, kv_heads=1, head_dim=16), {}),
    "more heads a group than rows a tile": (DECODES, Shape(heads=20, kv_heads=1, head_dim=16), {}),
    "head_dim 72": (MIXED, Shape(head_dim=72), {}),
    "head_dim 8": (MIXED, Shape(head_dim=8), {}),
    "block 8": (MIXED, Shape(block_size=8), {}),
    "block 24": (MIXED, Shape(block_size=24), {}),
    "block 64": (MIXED, Shape(block_size=64), {}),
    "bfloat16": (MIXED, Shape(dtype=torch.bfloat16), {}),
    "float16 decodes": (DECODES, Shape(dtype=torch.float16), {}),
    "long": ([(1, 700), (3, 130)], Shape(), {}),
}


def attention_case(name: str) -> dict[str, object]:
    sequences, shape, options = ATTENTION[name]
    window = options.get("sliding_window")
    batch = ragged_batch(sequences, shape, seed=len(name), sliding_window=window, strided=True)  # type: ignore[arg-type]
    twin = dispatch.paged_attention(**batch.arguments(), **options)
    oracle = reference.paged_attention(**batch.arguments(), **options)
    moved = {
        key: value.to(DEVICE) if isinstance(value, torch.Tensor) else value
        for key, value in vars(batch).items()
    }
    q = moved.pop("q")
    out = torch.zeros(q.shape, dtype=q.dtype, device=DEVICE)
    if INTERPRETED:
        paged_attention.paged_attention(
            q, **moved, sliding_window=window, softcap=options.get("softcap"), out=out, upcast=True
        )
    else:
        dispatch.paged_attention(q, **moved, **options, out=out)
    return {
        "case": name,
        "dtype": str(shape.dtype),
        "twin": (out.cpu().double() - twin.double()).abs().max().item(),
        "oracle": (out.cpu().double() - oracle.double()).abs().max().item(),
    }


def write_case(dtype: torch.dtype, head_dim: int, block_size: int) -> dict[str, object]:
    cache = torch.randn(2, 4, 3, block_size, head_dim).to(dtype)
    rows = torch.randn(7, 9, head_dim).to(dtype)
    k, v = rows[:, 3:6], rows[:, 6:]
    slots = torch.randperm(4 * block_size)[:7]
    slots[2] = -1
    expected = cache.clone()
    reference.write_kv(k, v, expected[0], expected[1], slots)
    moved = cache.to(DEVICE, copy=True)
    write_kv.write_kv(k.to(DEVICE), v.to(DEVICE), moved[0], moved[1], slots.to(DEVICE))
    return {"case": f"write {dtype} {head_dim}", "equal": torch.equal(moved.cpu(), expected)}


def copy_case(dtype: torch.dtype, index_dtype: torch.dtype) -> dict[str, object]:
    kv = torch.randn(2, 2, 9, 2, 24, 72).to(dtype)
    copies = torch.tensor([[8, 0], [1, 2], [1, 3]], dtype=index_dtype)
    expected = kv.clone()
    reference.copy_blocks(expected, copies)
    moved = kv.to(DEVICE, copy=True)
    copy_blocks.copy_blocks(moved, copies.to(DEVICE))
    return {"case": f"copy {dtype} {index_dtype}", "equal": torch.equal(moved.cpu(), expected)}


def main() -> None:
    torch.manual_seed(0)
    for name in ATTENTION:
        print(json.dumps(attention_case(name)), flush=True)
    for dtype, head_dim, block_size in ((torch.float32, 64, 16), (torch.bfloat16, 20, 24)):
        print(json.dumps(write_case(dtype, head_dim, block_size)), flush=True)
    for dtype, index_dtype in ((torch.float32, torch.int64), (torch.bfloat16, torch.int32)):
        print(json.dumps(copy_case(dtype, index_dtype)), flush=True)


if __name__ == "__main__":
    main()
