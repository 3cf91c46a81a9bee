"""Oracles: what every kernel of this package must compute, in plain torch, slowly and obviously.

Owns the definition of each operation (shapes, dtypes, masking, what padding means); the numba twins and the
Triton kernels are tested against it. Arithmetic is float64 and the result is rounded once, so a difference
belongs to the kernel under test. Knows nothing of speed: no production path may call it.
"""

from __future__ import annotations

import torch


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Store the keys and values of this step's tokens in their slots, in place.

    k, v            [T, Hkv, D]
    k_cache,v_cache [num_blocks, Hkv, block_size, D], one layer
    slot_mapping    int64 [T], block_id * block_size + offset; negative: the row is padding and is skipped
    """
    block_size = k_cache.shape[2]
    for row, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            k_cache[slot // block_size, :, slot % block_size] = k[row].to(k_cache.dtype)
            v_cache[slot // block_size, :, slot % block_size] = v[row].to(v_cache.dtype)


def write_kv_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Rotate queries and keys to their positions; store the rotated keys and the values; all in place.

    q               [T, Hq, D], rotated in place, padding rows too; q, k and v may be views of one [T, N] tensor
    k, v            [T, Hkv, D], left alone
    cos, sin        float32 [T, R / 2] of each token's position, R <= D. Of a head's first R dimensions i turns
                    with i + R / 2 ("rotate half", as Llama); the others stay
    k_cache,v_cache [num_blocks, Hkv, block_size, D], one layer; a rotated key is rounded once, to their dtype
    slot_mapping    int64 [T], as in `write_kv`
    """
    write_kv(_rotated(k, cos, sin), v, k_cache, v_cache, slot_mapping)
    q.copy_(_rotated(q, cos, sin))


def _rotated(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """float64 [T, H, D] of `heads` [T, H, D]."""
    half = cos.shape[1]
    first, second, rest = heads.double().split((half, half, heads.shape[2] - 2 * half), dim=2)
    c, s = cos.double()[:, None], sin.double()[:, None]
    return torch.cat((first * c - second * s, second * c + first * s, rest), dim=2)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """Divide each row by its root mean square and scale it; with `residual`, of the sum, which stays there.

    x        [T, H], left alone
    weight   [H]
    eps      added to the mean of squares
    residual [T, H] of x's dtype: becomes residual + x, rounded to that dtype before the norm is taken of it

    Returns a new [T, H] in x's dtype.
    """
    if residual is not None:
        residual.copy_(residual.double() + x.double())
        x = residual
    wide = x.double()
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (wide * scale * weight.double()).to(x.dtype)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of [T, 2 * I], gate in the first half of each row. Returns a new [T, I] in its dtype."""
    gate, up = gate_up.double().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)


def multiply(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, gated: bool = False
) -> torch.Tensor:
    """x [T, K] @ weight [N, K].T + bias [N]; if `gated`, silu(first half) * second half of that, [T, N / 2]."""
    product = x.double() @ weight.double().T
    if bias is not None:
        product += bias.double()
    if gated:
        gate, up = product.chunk(2, dim=1)
        product = gate * torch.sigmoid(gate) * up
    return product.to(x.dtype)


def quantised_multiply(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    gated: bool = False,
    group_size: int,
) -> torch.Tensor:
    """`multiply` of rounded numbers, both float32.

    Each output's weights are integers from -127 to 127 times one scale, and so are each row's numbers, which have a
    scale for each of ceil(K / group_size) groups; these end at multiples of 4, as evenly as these allow.
    """
    in_features = x.shape[1]
    words, per_group = -(-in_features // 4), group_size // 4
    num_groups = -(-words // per_group)
    ends = [min(4 * (words * (group + 1) // num_groups), in_features) for group in range(num_groups)]
    groups = torch.tensor_split(x, ends[:-1], dim=1)
    rounded = torch.cat([_rounded(group) for group in groups], dim=1)
    return multiply(rounded, _rounded(weight).double(), bias, gated=gated).to(x.dtype)


def _rounded(x: torch.Tensor) -> torch.Tensor:
    """float64: the rows of x, float32, as integers times a scale each; rows below 1e-30 are zeros."""
    peaks = x.abs().amax(dim=1, keepdim=True)
    # Divided once: torch's 127 / peaks rounds twice, and a number in the middle would go the other way.
    factors = torch.where(peaks > 1e-30, torch.tensor(127.0) / peaks, 0.0)
    return (x * factors).round().double() * (peaks.double() / 127)


def normalize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Divide each row by its largest magnitude, and add a row that makes the whole range from -1 to 1.

    x  [T, N], N >= 2; a row of zeros stays so

    Returns new [T + 1, N], its last row 1, -1, 0, 0, ..., and the magnitudes [T].
    """
    peaks = x.double().abs().amax(dim=1)
    rows = x.double() / peaks.where(peaks > 0, 1.0)[:, None]
    last = torch.zeros(1, x.shape[1], dtype=torch.float64)
    last[0, 0], last[0, 1] = 1.0, -1.0
    return torch.cat((rows, last)).to(x.dtype), peaks.to(x.dtype)


def scale_rows(x: torch.Tensor, factors: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    """x [T, N] *= factors [T], row by row, then += bias [N]; in place."""
    x.copy_(x.double() * factors.double()[:, None] + (0.0 if bias is None else bias.double()))


def copy_blocks(kv: torch.Tensor, block_copies: torch.Tensor) -> None:
    """Copy whole blocks, all layers, keys and values, in place.

    kv            [num_layers, 2, num_blocks, ...]
    block_copies  integer [C, 2] of (source, destination); no destination is also a source, none is named twice
    """
    for source, destination in block_copies.tolist():
        kv[:, :, destination] = kv[:, :, source]


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    block_tables: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of a ragged batch over paged keys and values.

    q               [T, Hq, D]; rows of sequence s are cu_seqlens_q[s] .. cu_seqlens_q[s + 1]
    k_cache,v_cache [num_blocks, Hkv, block_size, D], this step's tokens included; Hq is a multiple of Hkv and
                    query head h reads KV head h // (Hq // Hkv)
    block_tables    int32 [S, M]; entries past a sequence's last block are never read
    cu_seqlens_q    int32 [S + 1], starts at 0; equal neighbours: a sequence without rows in this step
    context_lens    int32 [S], tokens of the sequence including this step's, so >= its rows
    scale           factor on q . k, before the soft cap
    sliding_window  a row at position p sees p - sliding_window + 1 .. p; None: all of 0 .. p
    softcap         scores become softcap * tanh(score / softcap); None: unchanged

    Returns [T, Hq, D] in q's dtype (`out` when given). Rows from cu_seqlens_q[S] on are padding: left alone in
    `out`, zero in a result allocated here. Slots that no row of the sequence sees may hold anything, NaN too.
    """
    if out is None:
        out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    num_kv_heads, block_size = k_cache.shape[1], k_cache.shape[2]
    group = q.shape[1] // num_kv_heads
    bounds = cu_seqlens_q.tolist()
    for s, context_len in enumerate(context_lens.tolist()):
        first, last = bounds[s], bounds[s + 1]
        positions = torch.arange(context_len, device=q.device)
        blocks = block_tables[s].long()[positions // block_size]
        keys = k_cache[blocks, :, positions % block_size].double().repeat_interleave(group, dim=1)
        values = v_cache[blocks, :, positions % block_size].double().repeat_interleave(group, dim=1)
        for row in range(first, last):
            position = context_len - (last - row)
            start = 0 if sliding_window is None else max(0, position - sliding_window + 1)
            seen = slice(start, position + 1)
            scores = torch.einsum("hd,khd->hk", q[row].double(), keys[seen]) * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            out[row] = torch.einsum("hk,khd->hd", scores.softmax(dim=-1), values[seen]).to(out.dtype)
    return out


def gather_blocks(kv: torch.Tensor, block_ids: torch.Tensor, staging: torch.Tensor) -> None:
    """Copy blocks of the pool into staging memory, in place.

    kv         [num_layers, 2, num_blocks, ...]
    block_ids  integer [N]
    staging    [N or more, num_layers, 2, ...]; what is past N stays
    """
    staging[: len(block_ids)] = kv[:, :, block_ids.long()].movedim(2, 0)


def scatter_blocks(staging: torch.Tensor, block_ids: torch.Tensor, kv: torch.Tensor) -> None:
    """The way back: staging[i] becomes block block_ids[i], no id twice. Shapes as in `gather_blocks`."""
    kv[:, :, block_ids.long()] = staging[: len(block_ids)].movedim(0, 2)
