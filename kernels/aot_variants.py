"""Which specialisations of the Triton kernels real models launch, for `aot` to compile.

Owns the list. Launch parameters are asked of the kernels' own modules, so that what is compiled is what runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import triton

from octavo.kernels import (
    cascade_attention,
    copy_blocks,
    merge_partials,
    online_softmax,
    paged_attention,
    quantised_kv,
    rms_norm,
    sample,
    silu_mul,
    swap_blocks,
    write_kv,
    write_kv_rope,
)

_POINTER = {"float32": "*fp32", "bfloat16": "*bf16", "float16": "*fp16"}
_SIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
_FORMAT = {"fp8": online_softmax.FP8.value, "int8": online_softmax.INT8.value}


@dataclass(frozen=True)
class Variant:
    """One specialisation: a kernel with the types and constants of its arguments."""

    name: str
    kernel: Any
    types: Mapping[str, str]
    """Triton's type of each argument that isn't an int32 or a constant."""
    constants: Mapping[str, Any]
    """None is a constant too."""
    num_warps: int
    num_stages: int = 3
    """Triton's own default."""
    max_registers: int | None = None
    """Of a thread; None: what the compiler thinks best."""
    reads_wide: bool = True
    """Global memory is read in 16-byte vectors somewhere, as it must be where many bytes are read."""

    def type_of(self, argument: str) -> str:
        return "constexpr" if argument in self.constants else self.types.get(argument, "i32")


@dataclass(frozen=True)
class Heads:
    """Attention shape of a model."""

    heads: int
    kv_heads: int
    head_dim: int

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads


SMALL = Heads(9, 3, 64)
"""SmolLM2-135M"""
LARGE = Heads(32, 8, 128)
"""Llama, 8 billion"""
_BLOCK_SIZE = 16


def _attention(
    name: str,
    shape: Heads,
    *,
    dtype: str = "bfloat16",
    decode: bool,
    split: bool = False,
    shared: bool = False,
    quantised: str | None = None,
    windowed: bool = False,
    capped: bool = False,
) -> Variant:
    """`shared`: the pass over a shared prefix, otherwise the ragged kernel."""
    tiling = paged_attention.Tiling.choose(
        decode=decode,
        group=shape.group,
        head_dim=shape.head_dim,
        element_size=_SIZE[dtype],
        quantised=quantised is not None,
    )
    cache = "*u8" if quantised else _POINTER[dtype]
    types = dict.fromkeys(("q", "out"), _POINTER[dtype]) | dict.fromkeys(("k_cache", "v_cache"), cache)
    types |= dict.fromkeys(("block_tables", "cu_seqlens_q", "context_lens", "shared_blocks"), "*i32")
    types |= dict.fromkeys(("k_scales", "v_scales", "partials", "partial_lse"), "*fp32")
    types |= dict.fromkeys(("scale_log2", "softcap_log2"), "fp32")
    constants: dict[str, Any] = {
        "GROUP": shape.group,
        "NUM_HEADS": shape.heads,
        "HEAD_DIM": shape.head_dim,
        "PADDED_DIM": max(16, triton.next_power_of_2(shape.head_dim)),
        "BLOCK_SIZE": _BLOCK_SIZE,
        "TILE_ROWS": tiling.rows,
        "TILE_KEYS": tiling.keys,
        "SPLIT_KEYS": paged_attention.SPLIT_KEYS_MIN,
        "CAPPED": capped,
        "FORMAT": _FORMAT[quantised] if quantised else online_softmax.PLAIN.value,
        "UPCAST": False,
    }
    if not quantised:
        constants |= {"k_scales": None, "v_scales": None}
    if not shared:
        constants |= {"SPLIT": split, "WINDOWED": windowed}
        if not split:
            constants |= {"partials": None, "partial_lse": None}
    return Variant(
        name=name,
        kernel=(
            cascade_attention.prefix_attention_kernel if shared else paged_attention.paged_attention_kernel
        ),
        types=types,
        constants=constants,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )


def _attention_variants() -> Iterator[Variant]:
    yield _attention("attention decode bf16 64", SMALL, decode=True)
    yield _attention("attention chunk bf16 64", SMALL, decode=False)
    yield _attention("attention chunk fp32 64", SMALL, dtype="float32", decode=False)
    yield _attention("attention decode fp32 128", LARGE, dtype="float32", decode=True)
    yield _attention("attention decode bf16 128", LARGE, decode=True)
    yield _attention("attention decode bf16 128 split", LARGE, decode=True, split=True)
    yield _attention("attention chunk bf16 128", LARGE, decode=False)
    yield _attention("attention chunk bf16 128 split", LARGE, decode=False, split=True)
    yield _attention(
        "attention chunk fp16 128 window cap",
        LARGE,
        dtype="float16",
        decode=False,
        windowed=True,
        capped=True,
    )
    yield _attention("attention decode bf16 128 fp8", LARGE, decode=True, quantised="fp8")
    yield _attention("attention decode bf16 128 int8 split", LARGE, decode=True, split=True, quantised="int8")
    yield _attention("attention chunk bf16 128 fp8", LARGE, decode=False, quantised="fp8")
    yield _attention("attention chunk bf16 128 int8", LARGE, decode=False, quantised="int8")
    yield _attention("shared prefix bf16 128", LARGE, decode=False, shared=True)
    yield _attention("shared prefix bf16 128 fp8", LARGE, decode=False, shared=True, quantised="fp8")


def _merge() -> Variant:
    return Variant(
        name="merge_partials bf16 128",
        kernel=merge_partials.merge_partials_kernel,
        types={"partials": "*fp32", "partial_lse": "*fp32", "out": "*bf16", "cu_seqlens_q": "*i32"},
        constants=merge_partials.constants(paged_attention.SPLITS_MAX, LARGE.heads, LARGE.head_dim),
        num_warps=4,
    )


def _writes() -> Iterator[Variant]:
    pointers = dict.fromkeys(("q", "k", "v", "k_cache", "v_cache"), "*bf16")
    pointers |= {"slot_mapping": "*i64", "cos": "*fp32", "sin": "*fp32"}
    yield Variant(
        name="write_kv bf16 128",
        kernel=write_kv.write_kv_kernel,
        types=pointers,
        constants={"NUM_HEADS": 8, "HEAD_DIM": 128, "BLOCK_SIZE": 16, "PADDED_HEADS": 8, "PADDED_DIM": 128},
        num_warps=4,
    )
    for shape in (SMALL, LARGE):
        yield Variant(
            name=f"write_kv_rope bf16 {shape.head_dim}",
            kernel=write_kv_rope.write_kv_rope_kernel,
            types=pointers,
            constants=write_kv_rope.constants(
                shape.heads, shape.kv_heads, shape.head_dim, shape.head_dim // 2, _BLOCK_SIZE
            ),
            num_warps=write_kv_rope.num_warps(shape.heads, shape.head_dim),
        )
    stored = pointers | dict.fromkeys(("k_cache", "v_cache"), "*u8")
    stored |= dict.fromkeys(("k_scales", "v_scales"), "*fp32")
    for dtype, format in quantised_kv.FORMATS.items():
        for half in (0, LARGE.head_dim // 2):
            name = "fp8" if format is online_softmax.FP8 else "int8"
            constants: dict[str, Any] = quantised_kv.constants(
                LARGE.head_dim, _BLOCK_SIZE, dtype, group=LARGE.group if half else 1, half=half
            )
            yield Variant(
                name=f"write_kv_{'rope_' if half else ''}quantised {name} 128",
                kernel=quantised_kv.write_kv_quantised_kernel,
                types=stored,
                constants=constants if half else constants | {"q": None, "cos": None, "sin": None},
                num_warps=4,
            )


def _rows() -> Iterator[Variant]:
    for width, added in ((576, True), (4096, True), (4096, False)):
        padded_width = triton.next_power_of_2(width)
        yield Variant(
            name=f"rms_norm bf16 {width}" + (" residual" if added else ""),
            kernel=rms_norm.rms_norm_kernel,
            types=dict.fromkeys(("x", "residual", "weight", "out"), "*bf16") | {"eps": "fp32"},
            constants={"WIDTH": width, "PADDED_WIDTH": padded_width, "ADDED": added}
            | ({} if added else {"residual": None}),
            num_warps=rms_norm.num_warps(padded_width),
        )
    yield Variant(
        name="silu_mul bf16",
        kernel=silu_mul.silu_mul_kernel,
        types={"gate_up": "*bf16", "out": "*bf16"},
        constants={"TILE": silu_mul.TILE_ELEMENTS},
        num_warps=4,
    )


def _blocks() -> Iterator[Variant]:
    yield Variant(
        name="copy_blocks bf16",
        kernel=copy_blocks.copy_blocks_kernel,
        types={"kv": "*bf16", "block_copies": "*i64", "plane_stride": "i64"},
        constants={"TILE": copy_blocks.TILE_ELEMENTS},
        num_warps=4,
    )
    for into_pool in (False, True):
        yield Variant(
            name="scatter_blocks bf16" if into_pool else "gather_blocks bf16",
            kernel=swap_blocks.swap_blocks_kernel,
            types={"kv": "*bf16", "staging": "*bf16", "block_ids": "*i64", "plane_stride": "i64"},
            constants={"INTO_POOL": into_pool, "TILE": swap_blocks.TILE_ELEMENTS},
            num_warps=4,
        )


def _sampling() -> Iterator[Variant]:
    types = {"logits": "*fp32", "logit_rows": "*i64", "greedy": "*u8", "kept_values": "*fp32"}
    types |= dict.fromkeys(("temperatures", "top_ps", "min_ps"), "*fp64")
    types |= dict.fromkeys(("top_ks", "seeds"), "*i64")
    types |= dict.fromkeys(("branches", "positions", "kept_ids", "tokens"), "*i32")
    yield Variant(
        name="sample",
        kernel=sample.sample_kernel,
        types=types,
        constants={"SIZE": sample.TILE},
        num_warps=sample.NUM_WARPS,
        max_registers=sample.MAX_REGISTERS,
    )
    edits = {"logits": "*fp32", "rows": "*i64", "ids": "*i64", "amounts": "*fp64", "factors": "*fp64"}
    yield Variant(
        name="edit_logits penalty",
        kernel=sample.edit_logits_kernel,
        types=edits,
        constants={"KIND": sample.PENALTY, "SIZE": 256},
        num_warps=4,
        reads_wide=False,  # single logits
    )


def variants() -> Iterator[Variant]:
    """What SmolLM2-135M and an 8-billion Llama launch in both step shapes, with the options that change the code."""
    yield from _attention_variants()
    yield _merge()
    yield from _writes()
    yield from _rows()
    yield from _blocks()
    yield from _sampling()
