"""Arrays that arrive together are the same arrays, aligned, and hold for as long as was said."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octavo.worker.staging import InputStaging

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")),
]


@pytest.mark.parametrize("device", DEVICES)
def test_shapes_dtypes_and_bits_are_kept(device):
    arrays = [
        np.arange(6, dtype=np.int32).reshape(2, 3)[:, ::2],
        np.array([True, False, True]),
        np.array([2**64 - 1], np.uint64),
        np.empty((0, 4), np.int64),
        np.array([0.5, np.nan]),
        np.float32(3.0).reshape(()),
    ]
    tensors = InputStaging(torch.device(device)).upload(arrays)
    for array, tensor in zip(arrays, tensors, strict=True):
        assert tensor.shape == array.shape
        assert tensor.device.type == device
        assert tensor.data_ptr() % 16 == 0
        found = tensor.cpu().numpy()
        assert found.tobytes() == array.tobytes()
    assert [tensor.dtype for tensor in tensors[:3]] == [torch.int32, torch.bool, torch.int64]


@pytest.mark.parametrize("device", DEVICES)
def test_it_grows_and_the_last_turn_but_one_still_holds(device):
    staging = InputStaging(torch.device(device))
    (small,) = staging.upload([np.arange(10)])
    (large,) = staging.upload([np.arange(100_000)])
    assert small.tolist() == list(range(10))
    assert large[-1] == 99_999
    for turn in range(5):
        (tensor,) = staging.upload([np.full(50_000, turn)])
        assert (tensor == turn).all()
