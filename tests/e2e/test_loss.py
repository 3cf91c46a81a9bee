"""Worker and coordinator are lost with the real model, and the answers are those of an undisturbed run."""

from __future__ import annotations

import asyncio
import gc

import pytest

from octavo.cluster.backend import HealthStatus
from octavo.cluster.tokenizer import Tokenizer
from octavo.protos.structured_output import StructuredOutput
from octavo.protos.types import Request, SamplingParams, checked_prompt_ids

from ..cluster.fake_cluster import Cluster
from ..cluster.support import until

pytestmark = pytest.mark.model
GREEDY = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
SAMPLED = SamplingParams(
    temperature=0.8, top_p=0.95, n=2, max_tokens=48, seed=11, presence_penalty=0.3, ignore_eos=True
)
GUIDED = SamplingParams(
    temperature=0.8,
    n=2,
    max_tokens=48,
    seed=12,
    structured_output=StructuredOutput.regex("([a-z]{1,9} [0-9]{1,3}, ){80,99}"),
)
NUM_GREEDY = 4
OTHERS = [SAMPLED, GUIDED]


class RealCluster(Cluster):
    """One worker with a model, which stays loaded when the worker is lost; its rows and its address do not."""

    def __init__(self, executor):
        super().__init__(1, budget=256, lease_seconds=60.0)
        self._executor = executor
        self.model = executor.info.model

    def make_executor(self, worker_id):
        return self._executor

    def release(self, executor):
        pass


async def follow(backend, request, so_far):
    async for delta in backend.submit(request):
        assert delta.error is None, delta.error
        tokens = so_far.setdefault(delta.branch, [])
        assert delta.offset == len(tokens)
        tokens += delta.token_ids


@pytest.mark.timeout(600)
def test_d22_lost_worker_and_coordinator_are_invisible(golden, default_model_dir):
    from octavo.worker.build import build_executor
    from octavo.worker.config import WorkerConfig

    executor = build_executor(
        WorkerConfig(worker_id="worker-0", num_blocks=1000, max_num_batched_tokens=256, max_num_seqs=32)
    )
    tokenizer = Tokenizer(default_model_dir)
    vocab_size = executor.info.model.vocab_size

    def requests(name):
        params = [GREEDY] * NUM_GREEDY + OTHERS
        return [
            Request(
                request_id=f"{name} {index}",
                prompt_token_ids=checked_prompt_ids(
                    tokenizer.encode(golden.prompts[index].prompt), vocab_size
                ),
                params=param,
                seed=param.seed or 0,
            )
            for index, param in enumerate(params)
        ]

    def start(backend, name, first=0):
        asked = requests(name)[first:]
        outputs = [{} for _ in asked]
        pairs = zip(asked, outputs, strict=True)
        return [asyncio.create_task(follow(backend, *pair)) for pair in pairs], outputs

    async def test():
        async with RealCluster(executor) as cluster:
            backend = await cluster.backend()
            tasks, calm = start(backend, "calm", NUM_GREEDY)
            await asyncio.gather(*tasks)
            tasks, outputs = start(backend, "disturbed")

            def count():
                return sum(len(tokens) for output in outputs for tokens in output.values())

            await until(lambda: count() > 40, 120)
            assert cluster.scheduler("worker-0").has_work
            await cluster.kill_worker("worker-0")
            await cluster.start_worker("worker-0")
            await until(lambda: count() > 120, 120)
            await cluster.server.stop(0)
            await cluster.core.close()
            await cluster.start_coordinator()
            cluster.core.announce("worker-0", cluster.addresses["worker-0"])
            await asyncio.gather(*tasks)
            assert cluster.core.stats()["moved"] > 0
            await until(lambda: cluster.core.health().status is HealthStatus.READY)
            await cluster.idle()
            executor.check_integrity()
            return calm, outputs

    calm, outputs = asyncio.run(asyncio.wait_for(test(), 300))
    for index in range(NUM_GREEDY):
        assert len(outputs[index][0]) == 48
        golden.assert_equals_reference(index, outputs[index][0])
    assert outputs[NUM_GREEDY:] == calm
    gc.collect()
