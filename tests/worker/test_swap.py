"""Blocks that go to the host pool and come back are the same bits, and nothing else changes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octavo.protos.errors import ConfigError, IntegrityError
from octavo.worker.kv_pool import KVPool, KVShape
from octavo.worker.swap import STAGING_BLOCKS, SwapSpace, choose_num_host_blocks

GIB = 1 << 30
LARGE = KVShape(num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, dtype=torch.float32)
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")),
]


def pools(device, *, num_blocks=6, num_host_blocks=4, dtype=torch.float32):
    shape = KVShape(num_layers=2, num_kv_heads=1, head_dim=2, block_size=4, dtype=dtype)
    pool = KVPool(shape, num_blocks=num_blocks, device=torch.device(device))
    pool.kv.copy_(torch.arange(pool.kv.numel()).reshape(pool.kv.shape))
    space = SwapSpace(pool, num_blocks=num_host_blocks)
    space.host.fill_(-1)
    return pool, space


def pairs(*values):
    array = np.array(values, np.int32).reshape(-1, 2)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_come_back_elsewhere_unchanged(device, dtype):
    pool, space = pools(device, dtype=dtype)
    before = pool.kv.clone()
    assert space.host.shape == (2, 2, 4, 1, 4, 2)
    space.swap_out(pairs((1, 3), (4, 0)))
    # At once, as the step behind it would: what arrives must be what was there.
    pool.kv[:, :, [1, 4]] = -5
    space.swap_in(pairs((0, 2), (3, 5)))
    expected = before.clone()
    expected[:, :, [1, 4]] = -5
    expected[:, :, 2], expected[:, :, 5] = before[:, :, 4], before[:, :, 1]
    assert torch.equal(pool.kv, expected)
    if device == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(space.host[:, :, [3, 0]], before[:, :, [1, 4]].cpu())
    assert (space.host[:, :, [1, 2]] == -1).all()
    space.check_integrity()


@pytest.mark.parametrize("device", DEVICES)
def test_more_blocks_than_staging_holds(device):
    count = 2 * STAGING_BLOCKS + 5
    pool, space = pools(device, num_blocks=count, num_host_blocks=count)
    before = pool.kv.clone()
    ids = np.arange(count, dtype=np.int32)
    for _ in range(3):
        space.swap_out(np.stack([ids, ids[::-1]], axis=1))
        pool.kv.fill_(-5)
        space.swap_in(np.stack([ids[::-1], ids], axis=1))
        assert torch.equal(pool.kv, before)


def test_no_swap_is_no_work():
    pool, space = pools("cpu", num_host_blocks=0)
    before = pool.kv.clone()
    space.swap_out(pairs())
    space.swap_in(pairs())
    assert torch.equal(pool.kv, before)
    assert space.measure_bandwidth() == 0.0
    space.check_integrity()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("num_blocks", "num_host_blocks"), [(1, 9), (40, 1), (40, 40)])
def test_the_bandwidth_is_measured_with_as_many_blocks_as_there_are(device, num_blocks, num_host_blocks):
    _, space = pools(device, num_blocks=num_blocks, num_host_blocks=num_host_blocks)
    assert 0 < space.measure_bandwidth() < 1e13


def test_check_integrity_finds_another_tensor():
    _, space = pools("cpu")
    space._blocks = space._blocks[:3]
    with pytest.raises(IntegrityError, match="4 blocks"):
        space.check_integrity()


def test_a_tenth_of_memory_or_as_many_blocks_as_the_device_has():
    def choose(asked=None, *, device_blocks=10**6, available=8 * GIB):
        return choose_num_host_blocks(
            asked, LARGE, num_device_blocks=device_blocks, available_bytes=available
        )

    assert choose() == int(0.8 * GIB) // LARGE.bytes_per_block
    assert choose(device_blocks=24) == 24
    assert choose(available=LARGE.bytes_per_block) == 0
    assert choose(0) == 0
    assert choose(100, device_blocks=24) == 100


def test_more_than_is_available_is_refused_with_both_figures():
    with pytest.raises(ConfigError, match=r"num_host_blocks 100000 need .* GiB .* 8\.00 GiB are") as caught:
        choose_num_host_blocks(100_000, LARGE, num_device_blocks=10, available_bytes=8 * GIB)
    assert caught.value.param == "num_host_blocks"


def test_memory_that_cannot_be_had_is_a_config_error():
    pool = KVPool(LARGE, num_blocks=1, device=torch.device("cpu"))
    with pytest.raises(ConfigError, match="cannot be allocated") as caught:
        SwapSpace(pool, num_blocks=2**31)
    assert caught.value.param == "num_host_blocks"
