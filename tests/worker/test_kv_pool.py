"""How many blocks fit, what is refused, and that the pool is the tensor it says it is."""

from __future__ import annotations

import dataclasses
import logging

import numpy as np
import pytest
import torch

from octavo.protos.errors import ConfigError, IntegrityError
from octavo.worker.kv_pool import (
    DeviceMemory,
    KVPool,
    KVShape,
    check_block_size,
    check_cuda_fit,
    cpu_num_blocks,
    cuda_num_blocks,
)

GIB = 1 << 30
SHAPE = KVShape(num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, dtype=torch.float32)
SMALL = KVShape(num_layers=2, num_kv_heads=1, head_dim=2, block_size=4, dtype=torch.float32)
CPU = torch.device("cpu")


def test_bytes_per_block():
    assert SHAPE.bytes_per_block == 2 * 30 * 3 * 16 * 64 * 4
    pool = KVPool(SMALL, num_blocks=5, device=CPU)
    assert pool.kv.shape == (2, 2, 5, 1, 4, 2)
    assert pool.kv.nbytes == 5 * SMALL.bytes_per_block == pool.size_bytes
    pool.check_integrity()


def test_a_quantised_block_has_a_byte_a_number_and_its_scales():
    shape = dataclasses.replace(SHAPE, dtype=torch.int8)
    assert shape.bytes_per_block == 2 * 30 * (3 * 16 * 64 + 16)
    pool = KVPool(shape, num_blocks=5, device=CPU)
    assert pool.kv.nbytes == 5 * shape.bytes_per_block == pool.size_bytes
    pool.check_integrity()
    layers = pool.layers
    assert len(layers) == 30
    pool.kv.zero_()
    layers[7].v[3], layers[7].scales[1][3] = 9, 2.0
    assert pool.kv.count_nonzero(dim=3).nonzero().tolist() == [[7, 1, 3]]
    assert layers[7].v.shape == (5, 3, 16, 64)
    more = (
        cpu_num_blocks(each, available_bytes=GIB, max_num_seqs=9, max_model_len=9**9)
        for each in (SHAPE, shape)
    )
    plain, quantised = more
    assert 3.9 * plain < quantised < 4 * plain


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_copy_blocks_moves_all_layers_and_nothing_else(dtype):
    pool = KVPool(dataclasses.replace(SMALL, dtype=dtype), num_blocks=5, device=CPU)
    pool.kv.copy_(torch.arange(pool.kv.numel()).reshape(pool.kv.shape))
    expected = pool.kv.clone()
    expected[:, :, 4], expected[:, :, 1] = expected[:, :, 0], expected[:, :, 2]
    read_only = np.array([[0, 4], [2, 1]], np.int32)
    read_only.flags.writeable = False
    pool.copy_blocks(read_only)
    assert torch.equal(pool.kv, expected)
    pool.copy_blocks(np.empty((0, 2), np.int32))
    assert torch.equal(pool.kv, expected)


def test_check_integrity_finds_another_tensor():
    pool = KVPool(SMALL, num_blocks=5, device=CPU)
    pool.kv = pool.kv[:, :, :4]
    with pytest.raises(IntegrityError, match="5 blocks"):
        pool.check_integrity()


def test_memory_that_cannot_be_had_is_a_config_error():
    with pytest.raises(ConfigError, match="cannot be allocated") as caught:
        KVPool(SHAPE, num_blocks=2**31, device=CPU)
    assert caught.value.param == "num_blocks"


def test_a_cpu_pool_takes_a_quarter_or_what_all_rows_can_use():
    quarter = cpu_num_blocks(SHAPE, available_bytes=8 * GIB, max_num_seqs=256, max_model_len=8192)
    assert quarter == 2 * GIB // SHAPE.bytes_per_block
    useful = cpu_num_blocks(SHAPE, available_bytes=8 * GIB, max_num_seqs=4, max_model_len=100)
    assert useful == 4 * 7


def test_a_cpu_without_room_for_a_block_is_refused():
    with pytest.raises(ConfigError, match="num_blocks"):
        cpu_num_blocks(SHAPE, available_bytes=SHAPE.bytes_per_block, max_num_seqs=4, max_model_len=100)


def memory(held_by_others: int = 0) -> DeviceMemory:
    weights, reserve, total = 2 * GIB, 3 * GIB, 139 * GIB
    return DeviceMemory(
        total=total, free=total - weights - held_by_others, used_by_us=weights, reserve=reserve
    )


def test_d28_a_small_share_gives_the_same_pool_whoever_else_is_there():
    alone = cuda_num_blocks(SHAPE, memory(), gpu_memory_utilization=0.3)
    beside = cuda_num_blocks(SHAPE, memory(40 * GIB), gpu_memory_utilization=0.3)
    assert alone == beside == (int(0.3 * 139 * GIB) - 5 * GIB) // SHAPE.bytes_per_block


def test_d28_a_share_that_is_not_free_is_refused_with_both_figures():
    assert cuda_num_blocks(SHAPE, memory(), gpu_memory_utilization=0.9) > 0
    with pytest.raises(
        ConfigError, match=r"asks for 123\.\d+ GiB .* only 97\.00 GiB of 139\.00 GiB are free"
    ):
        cuda_num_blocks(SHAPE, memory(40 * GIB), gpu_memory_utilization=0.9)


def test_d28_a_share_smaller_than_the_weights_is_refused():
    with pytest.raises(ConfigError, match="leaves no KV block") as caught:
        cuda_num_blocks(SHAPE, memory(), gpu_memory_utilization=0.02)
    assert caught.value.param == "gpu_memory_utilization"


def test_explicit_num_blocks_must_fit_too():
    check_cuda_fit(SHAPE, memory(), num_blocks=1000, param="num_blocks")
    with pytest.raises(ConfigError, match="num_blocks asks for"):
        check_cuda_fit(SHAPE, memory(), num_blocks=10**6, param="num_blocks")


@pytest.mark.parametrize(("block_size", "reason"), [(4, "too short"), (128, "half a block is lost")])
def test_unusual_block_sizes_warn_and_say_why(caplog, block_size, reason):
    with caplog.at_level(logging.WARNING):
        check_block_size(block_size)
    assert reason in caplog.text


@pytest.mark.parametrize("block_size", [8, 16, 24, 32, 64])
def test_usual_block_sizes_do_not_warn(caplog, block_size):
    check_block_size(block_size)
    assert not caplog.records


@pytest.mark.parametrize("block_size", [0, -16])
def test_impossible_block_sizes_are_refused(block_size):
    with pytest.raises(ConfigError, match="block_size"):
        check_block_size(block_size)
