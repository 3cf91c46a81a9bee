"""The door to gather and scatter refuses what the kernels would take for memory of another shape."""

from __future__ import annotations

import pytest
import torch

from octavo.kernels import dispatch


def arguments() -> dict[str, torch.Tensor]:
    return {
        "kv": torch.zeros(2, 2, 5, 1, 8, 4),
        "block_ids": torch.tensor([0, 3]),
        "staging": torch.zeros(3, 2, 2, 1, 8, 4),
    }


@pytest.mark.parametrize("operation", [dispatch.gather_blocks, dispatch.scatter_blocks])
@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"staging": torch.zeros(3, 2, 2, 1, 4, 8)}, "staging must be"),
        ({"staging": torch.zeros(3, 2, 2, 1, 8, 4, dtype=torch.float16)}, "staging must be"),
        ({"staging": torch.zeros(3, 2, 2, 1, 8, 8)[..., ::2]}, "contiguous"),
        ({"block_ids": torch.arange(4)}, "at most 3"),
        ({"block_ids": torch.tensor([0], dtype=torch.int32)}, "int64"),
        ({"kv": torch.zeros(2, 2, 5, 1, 8)}, "staging must be"),
        ({}, "without staging"),
    ],
)
def test_wrong_arguments_are_named(operation, changed, words) -> None:
    with pytest.raises(ValueError, match=words):
        operation(**{**arguments(), **changed})


@pytest.mark.parametrize("operation", [dispatch.gather_blocks, dispatch.scatter_blocks])
def test_no_blocks_are_no_work(operation) -> None:
    operation(**{**arguments(), "block_ids": torch.empty(0, dtype=torch.int64)})
