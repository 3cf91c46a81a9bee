"""Compiling every Triton kernel for a GPU that isn't there, and what each then needs of it.

Owns the list of variants that a real model launches and the reading of registers, spills and shared memory out
of the finished machine code. Needs triton with its bundled tools, no GPU and no driver.

    python -m octavo.kernels.aot          prints the table of docs/kernels.md
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from octavo.kernels import copy_blocks, paged_attention, write_kv

SHARED_BYTES_MAX: Mapping[int, int] = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Shared memory that one program may have, by compute capability times ten (CUDA programming guide)."""

_WIDE_LOAD = re.compile(r"ld\.global[\w.:]*\.v4\.b32|cp\.async\.c[ag]\.[^;]*, 0x10\b")
_POINTER = {"float32": "*fp32", "bfloat16": "*bf16", "float16": "*fp16"}
_SIZE = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Variant:
    """One specialisation: a kernel with the types and constants of its arguments."""

    name: str
    kernel: Any
    types: Mapping[str, str]
    """Triton's type of each argument that isn't a constant."""
    constants: Mapping[str, Any]
    num_warps: int
    num_stages: int = 2
    unaligned: frozenset[str] = frozenset()
    """Integer arguments that aren't multiples of 16; pointers and other integers are taken to be."""


@dataclass(frozen=True)
class Resources:
    """What the machine code of one variant uses."""

    registers: int
    """Per thread."""
    spill_bytes: int
    """Per thread, local memory and stack."""
    shared_bytes: int
    """Per program, static and dynamic."""
    moves_16_bytes: bool
    """Global memory is read in 16-byte vectors, the widest there are."""


def _attention(
    name: str, *, dtype: str, decode: bool, heads: int, kv_heads: int, head_dim: int, block_size: int = 16,
    windowed: bool = False, capped: bool = False,
) -> Variant:  # fmt: skip
    group = heads // kv_heads
    tiling = paged_attention.Tiling.choose(
        decode=decode, group=group, head_dim=head_dim, element_size=_SIZE[dtype]
    )
    pointers = dict.fromkeys(("q", "k_cache", "v_cache", "out"), _POINTER[dtype])
    pointers |= dict.fromkeys(("block_tables", "cu_seqlens_q", "context_lens"), "*i32")
    numbers = {"scale_log2": "fp32", "softcap_log2": "fp32", "num_seqs": "i32", "window": "i32"}
    strides = ["q_token_stride", "q_head_stride", "out_token_stride", "out_head_stride", "table_stride"]
    strides += ["block_stride", "head_stride"]
    return Variant(
        name=name,
        kernel=paged_attention.paged_attention_kernel,
        types=pointers | numbers | dict.fromkeys(strides, "i32"),
        constants={
            "GROUP": group,
            "HEAD_DIM": head_dim,
            "PADDED_DIM": max(16, triton.next_power_of_2(head_dim)),
            "BLOCK_SIZE": block_size,
            "TILE_ROWS": tiling.rows,
            "TILE_KEYS": tiling.keys,
            "WINDOWED": windowed,
            "CAPPED": capped,
            "UPCAST": False,
        },
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        unaligned=frozenset({"num_seqs", "window", "table_stride"}),
    )


def variants() -> Iterator[Variant]:
    """What is launched for SmolLM2-135M (9 heads on 3, 64 wide) and an 8-billion Llama (32 on 8, 128 wide), in
    both step shapes, with the options and formats that change the code."""
    small: dict[str, Any] = {"heads": 9, "kv_heads": 3, "head_dim": 64}
    large: dict[str, Any] = {"heads": 32, "kv_heads": 8, "head_dim": 128}
    yield _attention("attention decode bf16 64", dtype="bfloat16", decode=True, **small)
    yield _attention("attention chunk bf16 64", dtype="bfloat16", decode=False, **small)
    yield _attention("attention chunk fp32 64", dtype="float32", decode=False, **small)
    yield _attention("attention decode fp32 128", dtype="float32", decode=True, **large)
    yield _attention("attention decode bf16 128", dtype="bfloat16", decode=True, **large)
    yield _attention("attention chunk bf16 128", dtype="bfloat16", decode=False, **large)
    yield _attention(
        "attention chunk fp16 128 window cap",
        dtype="float16",
        decode=False,
        windowed=True,
        capped=True,
        **large,
    )
    pointers = dict.fromkeys(("k", "v", "k_cache", "v_cache"), "*bf16") | {"slot_mapping": "*i64"}
    strides = (
        "k_token_stride",
        "k_head_stride",
        "v_token_stride",
        "v_head_stride",
        "block_stride",
        "head_stride",
    )
    yield Variant(
        name="write_kv bf16 128",
        kernel=write_kv.write_kv_kernel,
        types=pointers | dict.fromkeys(strides, "i32"),
        constants={"NUM_HEADS": 8, "HEAD_DIM": 128, "BLOCK_SIZE": 16, "PADDED_HEADS": 8, "PADDED_DIM": 128},
        num_warps=4,
    )
    yield Variant(
        name="copy_blocks bf16",
        kernel=copy_blocks.copy_blocks_kernel,
        types={"kv": "*bf16", "block_copies": "*i64", "plane_stride": "i64", "block_elements": "i32"},
        constants={"TILE": copy_blocks.TILE_ELEMENTS},
        num_warps=4,
    )


def compile_variant(variant: Variant, capability: int) -> Resources:
    """Compile for a device of this compute capability (80, 90, 100); raises triton's or ptxas's error."""
    names = variant.kernel.arg_names
    signature = {name: variant.types.get(name, "constexpr") for name in names}
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(names)
        if signature[name].startswith(("*", "i")) and name not in variant.unaligned
    }
    source = ASTSource(
        fn=variant.kernel, signature=signature, constexprs=dict(variant.constants), attrs=aligned
    )
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages, "enable_fp_fusion": True}
    binary = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    used = _resource_usage(binary.asm["cubin"])
    return Resources(
        registers=used["REG"],
        spill_bytes=used.get("STACK", 0) + used.get("LOCAL", 0),
        shared_bytes=used.get("SHARED", 0) + binary.metadata.shared,
        moves_16_bytes=_WIDE_LOAD.search(binary.asm["ptx"]) is not None,
    )


def _resource_usage(cubin: bytes) -> dict[str, int]:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        report = subprocess.run(
            [str(tool), "--dump-resource-usage", file.name],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
    used = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL|SHARED):(\d+)", report)}
    if "REG" not in used:
        raise RuntimeError(f"cuobjdump said nothing of registers: {report!r}")
    return used


def main() -> None:
    """Print the table as Markdown."""
    print("| kernel | sm | registers a thread | spilled bytes | shared KiB | 16-byte loads |")
    print("|---|---|---|---|---|---|")
    for variant in variants():
        for capability in SHARED_BYTES_MAX:
            used = compile_variant(variant, capability)
            shared_kib = used.shared_bytes / 1024
            wide = "yes" if used.moves_16_bytes else "no"
            cells = (variant.name, capability, used.registers, used.spill_bytes, f"{shared_kib:.1f}", wide)
            print("|", " | ".join(map(str, cells)), "|")


if __name__ == "__main__":
    main()
