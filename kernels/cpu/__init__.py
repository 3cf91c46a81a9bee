"""CPU twins of the Triton kernels, in numba."""

from octavo.kernels.cpu.ops import (
    copy_blocks,
    multiply,
    normalize_rows,
    paged_attention,
    rms_norm,
    scale_rows,
    silu_mul,
    warm_up,
    write_kv,
    write_kv_quantised,
    write_kv_rope,
    write_kv_rope_quantised,
)
from octavo.kernels.cpu.packing import has_int8_products, pack_int8_weight, pack_weight

__all__ = [
    "copy_blocks",
    "has_int8_products",
    "multiply",
    "normalize_rows",
    "pack_int8_weight",
    "pack_weight",
    "paged_attention",
    "rms_norm",
    "scale_rows",
    "silu_mul",
    "warm_up",
    "write_kv",
    "write_kv_quantised",
    "write_kv_rope",
    "write_kv_rope_quantised",
]
