"""What a graph replays is what the step would have computed. The recorder here calls instead of replaying."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from octavo.worker.cuda_graphs import GraphedRunner, decode_sizes
from octavo.worker.forward_batch import ForwardBatch

CPU = torch.device("cpu")


class Caller:
    """Runs `run` again where a graph would be replayed: same memory, and the shapes of the recording."""

    def __init__(self, *, fail: bool = False):
        self.fail = fail
        self.num_recorded = 0

    def record(self, run):
        if self.fail:
            raise RuntimeError("operation not permitted when stream is capturing")
        run()
        self.num_recorded += 1
        return run


class SumRunner:
    """Logits of a row: what the row's inputs are, and the sum of the table entries that it may read."""

    def __init__(self):
        self.sizes = []

    def forward(self, batch):
        self.sizes.append(len(batch.context_lens))
        rows = []
        for row, length in enumerate(batch.context_lens.tolist()):
            blocks = -(-length // 4)
            seen = (batch.input_ids[row], batch.positions[row], batch.slot_mapping[row], length)
            rows.append([*map(int, seen), int(batch.block_tables[row, :blocks].sum())])
            if batch.slot_mapping[row] < 0:  # padding
                assert length == 1
        return torch.tensor(rows, dtype=torch.float32)[batch.logit_rows]


def decode(num_seqs, *, width=3, seed=0, logit_rows=None):
    generator = torch.Generator().manual_seed(seed)
    return ForwardBatch(
        input_ids=torch.randint(0, 100, (num_seqs,), generator=generator),
        positions=torch.randint(0, 12, (num_seqs,), generator=generator),
        slot_mapping=torch.randint(0, 99, (num_seqs,), generator=generator),
        block_tables=torch.randint(0, 50, (num_seqs, width), generator=generator, dtype=torch.int32),
        cu_seqlens_q=torch.arange(num_seqs + 1, dtype=torch.int32),
        context_lens=torch.randint(1, 4 * width + 1, (num_seqs,), generator=generator, dtype=torch.int32),
        logit_rows=torch.arange(num_seqs) if logit_rows is None else torch.tensor(logit_rows),
    )


def graphed(*, recorder=None, max_num_seqs=20):
    inner = SumRunner()
    runner = GraphedRunner(
        inner, max_num_seqs=max_num_seqs, max_blocks_per_seq=3, device=CPU, recorder=recorder or Caller()
    )
    runner.record()
    inner.sizes.clear()
    return runner, inner


def test_decodes_are_padded_to_the_next_size_and_come_out_the_same():
    runner, inner = graphed()
    for num_seqs in (1, 5, 20, 2, 13, 4):
        batch = decode(num_seqs, width=1 + num_seqs % 3, seed=num_seqs)
        assert torch.equal(runner.forward(batch), SumRunner().forward(batch))
    assert inner.sizes == [1, 8, 20, 2, 16, 4]
    assert (runner.num_replays, runner.num_others) == (6, 0)


def test_logits_of_some_rows():
    runner, _ = graphed()
    batch = decode(6, logit_rows=[4, 1])
    assert torch.equal(runner.forward(batch), SumRunner().forward(batch))


def test_what_is_not_recorded_runs_as_it_is():
    runner, inner = graphed()
    chunk = decode(3)
    chunk = dataclasses.replace(
        chunk, block_tables=chunk.block_tables[:2], context_lens=chunk.context_lens[:2]
    )
    shared = dataclasses.replace(decode(5), num_shared_blocks=1)
    for batch, size in ((decode(21), 21), (decode(2, width=4), 2), (shared, 5)):
        assert torch.equal(runner.forward(batch), SumRunner().forward(batch))
        assert inner.sizes[-1] == size
    chunk = dataclasses.replace(chunk, logit_rows=torch.tensor([1]))
    runner.forward(chunk)
    assert runner.num_others == 4
    assert runner.num_replays == 0


def test_a_model_that_cannot_be_recorded_runs_without(caplog):
    runner, _ = graphed(recorder=Caller(fail=True))
    batch = decode(4)
    assert torch.equal(runner.forward(batch), SumRunner().forward(batch))
    assert "not permitted" in caplog.text
    assert runner.num_others == 1


@pytest.mark.parametrize("max_num_seqs", [1, 3, 20, 64, 256, 1000])
def test_sizes_waste_little(max_num_seqs):
    sizes = decode_sizes(max_num_seqs)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == min(max_num_seqs, 256)
    for num_seqs in range(1, sizes[-1] + 1):
        size = min(size for size in sizes if size >= num_seqs)
        assert size - num_seqs <= max(3, num_seqs // 2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_real_graph_replays_what_it_recorded():
    class Doubler:
        def forward(self, batch):
            return (batch.input_ids + batch.context_lens).float()[:, None] * 2

    device = torch.device("cuda")
    runner = GraphedRunner(Doubler(), max_num_seqs=4, max_blocks_per_seq=3, device=device)
    runner.record()
    for seed in range(3):
        batch = decode(3, seed=seed)
        tensors = {
            field.name: getattr(batch, field.name).to(device)
            for field in dataclasses.fields(ForwardBatch)
            if field.name != "num_shared_blocks"
        }
        moved = ForwardBatch(**tensors)
        assert torch.equal(runner.forward(moved).cpu(), Doubler().forward(batch))
    assert runner.num_replays == 3
