"""CPU twins of the Triton kernels, in numba."""

from octavo.kernels.cpu.ops import copy_blocks, paged_attention, warm_up, write_kv

__all__ = ["copy_blocks", "paged_attention", "warm_up", "write_kv"]
