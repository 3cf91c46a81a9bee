"""Paged attention on the GPU: one ragged Triton kernel for prefill chunks and decodes alike.

Owns the kernel, its tile sizes, the choice to cut keys, and its launch. What it computes is
`reference.paged_attention`; its twin is `cpu.attention`. Arguments were checked by `dispatch`.

A program takes a tile of query rows against all their keys: a few tokens of one sequence times the query heads
that share one KV head, so keys and values are read once for the whole group. Which sequence a program serves is
found on the device by bisection, and the grid depends on shapes alone, so a launch never waits for the device and
can be recorded in a CUDA graph; programs past the last tile return at once.

A step too small to fill the device (a few sequences, however long) has its keys cut into splits, which
`merge_partials` puts together. Where the cuts lie depends on the sequence and their number on shapes.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from octavo.kernels.layer_cache import Scales
from octavo.kernels.merge_partials import Partials, merge_partials
from octavo.kernels.online_softmax import FP8, INT8, LOG2_E, PLAIN, attend, store_partial

SPLITS_MAX = 32
SPLIT_KEYS_MIN = 256
"""A shorter split costs more to start and to merge than it saves; a multiple of every key tile."""
_PROGRAMS_PER_MULTIPROCESSOR = 2
_FORMATS = {torch.float8_e4m3fn: FP8, torch.int8: INT8}


@triton.jit
def _sequence_of_tile(cu_seqlens_q, tile, num_seqs, TILE_TOKENS: tl.constexpr):
    """The sequence that owns `tile`: sequence s starts at tile cu_seqlens_q[s] // TILE_TOKENS + s, which leaves
    each at least as many tiles as it needs."""
    low = 0
    high = num_seqs - 1
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(cu_seqlens_q + middle) // TILE_TOKENS + middle <= tile:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit(
    do_not_specialize=["num_seqs", "num_rows_all", "window", "skipped_keys", "first_partial", "table_stride"]
)
def paged_attention_kernel(
    q,
    k_cache,
    v_cache,
    k_scales,
    v_scales,
    out,
    partials,
    partial_lse,
    block_tables,
    cu_seqlens_q,
    context_lens,
    scale_log2,
    softcap_log2,
    num_seqs,
    num_rows_all,
    window,
    skipped_keys,
    first_partial,
    q_token_stride,
    q_head_stride,
    out_token_stride,
    out_head_stride,
    table_stride,
    block_stride,
    head_stride,
    scale_stride,
    GROUP: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    SPLIT: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    FORMAT: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Grid (tiles, num_kv_heads, splits). Rows of a tile: row // GROUP is its token, row % GROUP its head in the
    group.

    SPLIT: False writes `out` with one split; True cuts the keys into runs of at least SPLIT_KEYS and writes parts
    from first_partial on. Keys before skipped_keys are left out. For the rest see `attend`.
    """
    TILE_TOKENS: tl.constexpr = TILE_ROWS // GROUP
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    sequence = _sequence_of_tile(cu_seqlens_q, tile, num_seqs, TILE_TOKENS)
    first_row = tl.load(cu_seqlens_q + sequence)
    num_rows = tl.load(cu_seqlens_q + sequence + 1) - first_row
    token = (tile - first_row // TILE_TOKENS - sequence) * TILE_TOKENS
    if token >= num_rows:
        return
    position = tl.load(context_lens + sequence) - num_rows + token
    end = position + tl.minimum(TILE_TOKENS, num_rows - token)

    rows = tl.arange(0, TILE_ROWS)
    row_tokens = rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    dims = tl.arange(0, PADDED_DIM)
    row_mask = (row_tokens < TILE_TOKENS) & (token + row_tokens < num_rows)
    mask = row_mask[:, None] & (dims < HEAD_DIM)[None, :]
    q_rows = (first_row + token + row_tokens).to(tl.int64)
    queries = tl.load(
        q + q_rows[:, None] * q_token_stride + heads[:, None] * q_head_stride + dims[None, :],
        mask=mask,
        other=0.0,
    )
    begin = skipped_keys
    if WINDOWED:
        begin = tl.maximum(begin, position - window + 1)
    if SPLIT:
        keys = tl.cdiv(tl.cdiv(end - begin, tl.num_programs(2)), TILE_KEYS) * TILE_KEYS
        keys = tl.maximum(keys, SPLIT_KEYS)
        begin = begin + tl.program_id(2) * keys
        end = tl.minimum(end, begin + keys)
    maxima, sums, result = attend(
        queries,
        position + row_tokens,
        k_cache,
        v_cache,
        k_scales,
        v_scales,
        block_tables + sequence.to(tl.int64) * table_stride,
        kv_head,
        begin,
        end,
        scale_log2,
        softcap_log2,
        window,
        block_stride,
        head_stride,
        scale_stride,
        HEAD_DIM=HEAD_DIM,
        PADDED_DIM=PADDED_DIM,
        BLOCK_SIZE=BLOCK_SIZE,
        TILE_ROWS=TILE_ROWS,
        TILE_KEYS=TILE_KEYS,
        CAUSAL=True,
        WINDOWED=WINDOWED,
        CAPPED=CAPPED,
        FORMAT=FORMAT,
        UPCAST=UPCAST,
    )
    if SPLIT:
        store_partial(
            partials,
            partial_lse,
            first_partial + tl.program_id(2),
            q_rows,
            heads,
            num_rows_all,
            maxima,
            sums,
            result,
            row_mask,
            NUM_HEADS=NUM_HEADS,
            HEAD_DIM=HEAD_DIM,
            PADDED_DIM=PADDED_DIM,
        )
    else:
        # Only a row of padding can have seen nothing; it is not stored.
        result = result / tl.where(sums == 0.0, 1.0, sums)[:, None]
        tl.store(
            out + q_rows[:, None] * out_token_stride + heads[:, None] * out_head_stride + dims[None, :],
            result.to(out.dtype.element_ty),
            mask=mask,
        )


@dataclass(frozen=True)
class Tiling:
    """Compile-time sizes of one launch."""

    rows: int
    """Query rows of a tile (tokens times group), a power of two >= 16 and >= the group."""
    keys: int
    """Keys of a step of the inner loop, a power of two >= 16; may span several blocks."""
    num_warps: int
    num_stages: int

    @classmethod
    def choose(
        cls, *, decode: bool, group: int, head_dim: int, element_size: int, quantised: bool = False
    ) -> Tiling:
        """Small tiles for decodes, which are bound by reading; larger ones for chunks, bound by arithmetic.

        `element_size` in bytes, of the queries. Sized so that nothing spills on compute capability 8.0, 9.0 and
        10.0 (`kernels.aot` shows it); widening a quantised cache takes registers, which more warps share.
        """
        rows = max(16 if decode else 64, triton.next_power_of_2(group))
        light = element_size == 2 and head_dim <= 128
        if light:
            num_warps = 8 if quantised and not decode else 4
            return cls(rows=rows, keys=64 if decode else 32, num_warps=num_warps, num_stages=3)
        keys = 16 if element_size == 4 and head_dim > 64 else 32
        return cls(rows=rows, keys=keys, num_warps=4 if decode else 8, num_stages=2)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """How many programs run side by side at the least; 1 where the interpreter runs them in turn."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def choose_splits(*, programs: int, keys_max: int, num_multiprocessors: int) -> int:
    """Into how many runs to cut the keys of a step of `programs` programs, none of which sees more than `keys_max`
    keys; 0: not at all. By shapes alone, so a CUDA graph records one answer."""
    wanted = num_multiprocessors * _PROGRAMS_PER_MULTIPROCESSOR // max(1, programs)
    splits = min(wanted, -(-keys_max // SPLIT_KEYS_MIN), SPLITS_MAX)
    return splits if splits > 1 else 0


@dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """One attention over a ragged batch, arguments as in `dispatch.paged_attention`, with what they imply."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_tables: torch.Tensor
    cu_seqlens_q: torch.Tensor
    context_lens: torch.Tensor
    scale: float
    sliding_window: int | None
    softcap: float | None
    scales: Scales | None
    """Of a quantised cache."""
    upcast: bool

    @property
    def group(self) -> int:
        return self.q.shape[1] // self.k_cache.shape[1]

    @property
    def is_decode(self) -> bool:
        """By shapes: a step of as many rows as sequences. Any tiling is right for any batch."""
        return self.q.shape[0] <= self.context_lens.shape[0]

    def tiling(self) -> Tiling:
        return Tiling.choose(
            decode=self.is_decode,
            group=self.group,
            head_dim=self.q.shape[2],
            element_size=self.q.element_size(),
            quantised=self.scales is not None,
        )

    def num_tiles(self) -> int:
        """Enough for any division of the rows among the sequences; the kernel finds out which exist."""
        return self.q.shape[0] // (self.tiling().rows // self.group) + self.context_lens.shape[0]

    def choose_splits(self, *, skipped_keys: int = 0) -> int:
        """Into how many runs to cut the keys from skipped_keys on."""
        longest = self.block_tables.shape[1] * self.k_cache.shape[2] - skipped_keys
        if self.sliding_window is not None:
            longest = min(longest, self.sliding_window + self.tiling().rows)
        # A decode's tile is its sequence: the grid has more only so that its size is known without the device.
        useful = self.context_lens.shape[0] if self.is_decode else self.num_tiles()
        return choose_splits(
            programs=useful * self.k_cache.shape[1],
            keys_max=longest,
            num_multiprocessors=multiprocessors(self.q.device),
        )

    def caches(self) -> tuple[torch.Tensor, torch.Tensor]:
        """As the kernels read them: a quantised cache as bytes."""
        if self.scales is None:
            return self.k_cache, self.v_cache
        return self.k_cache.view(torch.uint8), self.v_cache.view(torch.uint8)

    def scale_arguments(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """`k_scales` and `v_scales` of the kernels."""
        return (None, None) if self.scales is None else self.scales

    @property
    def scale_stride(self) -> int:
        return 0 if self.scales is None else self.scales[0].stride(0)

    def numbers(self) -> tuple[float, float]:
        """`scale_log2` and `softcap_log2` of the kernels."""
        factor = self.scale / self.softcap if self.softcap is not None else self.scale * LOG2_E.value
        return factor, (self.softcap or 0.0) * LOG2_E.value

    def constants(self) -> dict[str, Any]:
        """Compile-time arguments that all attention kernels share."""
        head_dim = self.q.shape[2]
        return {
            "GROUP": self.group,
            "NUM_HEADS": self.q.shape[1],
            "HEAD_DIM": head_dim,
            "PADDED_DIM": max(16, triton.next_power_of_2(head_dim)),
            "BLOCK_SIZE": self.k_cache.shape[2],
            "CAPPED": self.softcap is not None,
            "FORMAT": (PLAIN if self.scales is None else _FORMATS[self.k_cache.dtype]).value,
            "UPCAST": self.upcast,
        }


def launch(
    call: AttentionCall,
    out: torch.Tensor,
    partials: Partials | None,
    *,
    splits: int,
    first_partial: int = 0,
    skipped_keys: int = 0,
) -> None:
    """Launch the kernel: into `out`, or with `splits` into that many of `partials` from `first_partial` on."""
    num_seqs = call.context_lens.shape[0]
    tiling = call.tiling()
    k_cache, v_cache = call.caches()
    paged_attention_kernel[(call.num_tiles(), k_cache.shape[1], max(1, splits))](
        call.q,
        k_cache,
        v_cache,
        *call.scale_arguments(),
        out,
        None if partials is None else partials.results,
        None if partials is None else partials.lse,
        call.block_tables,
        call.cu_seqlens_q,
        call.context_lens,
        *call.numbers(),
        num_seqs,
        call.q.shape[0],
        call.sliding_window or 0,
        skipped_keys,
        first_partial,
        call.q.stride(0),
        call.q.stride(1),
        out.stride(0),
        out.stride(1),
        call.block_tables.stride(0),
        k_cache.stride(0),
        k_cache.stride(1),
        call.scale_stride,
        **call.constants(),
        TILE_ROWS=tiling.rows,
        TILE_KEYS=tiling.keys,
        SPLIT=splits > 0,
        SPLIT_KEYS=SPLIT_KEYS_MIN,
        WINDOWED=call.sliding_window is not None,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        enable_fp_fusion=True,
    )


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
    out: torch.Tensor,
    *,
    scales: Scales | None = None,
    splits: int | None = None,
    upcast: bool = False,
) -> None:
    """As `dispatch.paged_attention`.

    splits  None: `choose_splits`; tests ask for a number, 0 for none
    upcast  for the interpreter
    """
    call = AttentionCall(
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        block_tables=block_tables,
        cu_seqlens_q=cu_seqlens_q,
        context_lens=context_lens,
        scale=scale,
        sliding_window=sliding_window,
        softcap=softcap,
        scales=scales,
        upcast=upcast,
    )
    if splits is None:
        splits = call.choose_splits()
    partials = Partials.empty(splits, q) if splits else None
    launch(call, out, partials, splits=splits)
    if partials is not None:
        merge_partials(partials, cu_seqlens_q, out)
