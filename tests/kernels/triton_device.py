"""Where the Triton tests run: on the CPU under TRITON_INTERPRET=1, which triton reads at import, else on the GPU."""

from __future__ import annotations

import torch

from octavo.kernels import paged_attention

INTERPRETED = not hasattr(paged_attention.paged_attention_kernel, "device_caches")
DEVICE = "cpu" if INTERPRETED else "cuda"

ULP = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
"""A unit in the last place, relative."""


def assert_within_ulps(
    actual: torch.Tensor, expected: torch.Tensor, ulps: float, floor: float = 1e-6
) -> None:
    """The interpreter truncates where it rounds to bfloat16, hence one unit more than a correct rounding."""
    torch.testing.assert_close(
        actual.cpu().double(),
        expected.cpu().double(),
        rtol=ulps * ULP[expected.dtype],
        atol=floor,
        equal_nan=True,
    )
