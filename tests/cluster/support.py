"""What tests of the wire and the coordinator share: a worker without a model, and requests for it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np

from octavo.protos.types import (
    CachedPrefix,
    ModelInfo,
    Request,
    SamplingParams,
    StepPlan,
    StepResult,
    WorkerInfo,
)

from ..scheduler.fake_worker import VOCAB_SIZE, FakeWorker, expected_tokens

MODEL = ModelInfo(name="fake", vocab_size=VOCAB_SIZE, max_model_len=4096, eos_token_ids=())


def worker_info(worker_id: str = "worker-0", **changes: Any) -> WorkerInfo:
    fields = {
        "worker_id": worker_id,
        "model": MODEL,
        "device": "cpu",
        "dtype": "float32",
        "block_size": 16,
        "num_blocks": 256,
        "num_host_blocks": 0,
        "max_num_seqs": 64,
        "kv_bytes_per_block": 1024,
    }
    return WorkerInfo(**{**fields, **changes})


class FakeExecutor(FakeWorker):
    """`FakeWorker` behind the executor's names. `gate`, when cleared, holds steps; `error` fails one."""

    runs_ahead = False

    def __init__(
        self, info: WorkerInfo | None = None, *, budget: int = 512, step_seconds: float = 0.0
    ) -> None:
        self.info = info or worker_info()
        super().__init__(self.info.num_blocks, self.info.block_size, self.info.max_num_seqs, budget)
        self.step_seconds = step_seconds
        self.gate = threading.Event()
        self.gate.set()
        self.error: BaseException | None = None
        self.executed: list[tuple[int, int]] = []
        self.threads: set[str] = set()

    def execute(self, plan: StepPlan) -> StepResult:
        self.executed.append((plan.epoch, plan.step_id))
        self.threads.add(threading.current_thread().name)
        assert self.gate.wait(60)
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        time.sleep(self.step_seconds)
        return super().execute(plan, seconds=max(self.step_seconds, 1e-4))

    def cached_prefixes(self) -> list[CachedPrefix]:
        found = []
        for row in self.rows.values():
            count = row.num_computed // self.block_size
            found.append(
                CachedPrefix(
                    token_ids=np.array(row.tokens[: count * self.block_size], np.int32),
                    blocks=np.array(row.table[:count], np.int32),
                    cache_salt=row.request.cache_salt,
                )
            )
        return found

    def reset(self) -> None:
        self.rows.clear()
        self.last_step = 0


def make_request(name: str, prompt: list[int] | None = None, **params: Any) -> Request:
    prompt = [1, 2, 3, 4, 5] if prompt is None else prompt
    return Request(
        request_id=name,
        prompt_token_ids=np.array(prompt, np.int32),
        params=SamplingParams(**{"max_tokens": 8, **params}),
        seed=7,
    )


def expected(request: Request, branch: int = 0) -> list[int]:
    return expected_tokens(request, branch, request.params.max_tokens or 0)


async def collect(backend: Any, request: Request) -> dict[int, list[int]]:
    """Tokens of each branch; checks that offsets have no gap and that each branch ends once."""
    tokens: dict[int, list[int]] = {}
    ended = set()
    async for delta in backend.submit(request):
        assert delta.error is None, delta.error
        assert delta.branch not in ended
        so_far = tokens.setdefault(delta.branch, [])
        assert delta.offset == len(so_far)
        so_far += delta.token_ids
        if delta.finish_reason is not None:
            ended.add(delta.branch)
    assert ended == set(range(request.params.n))
    return tokens


async def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait for a condition; fails the test when it does not come."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        await asyncio.sleep(0.01)


def run(test: Coroutine[Any, Any, Any], seconds: float = 60.0) -> Any:
    return asyncio.run(asyncio.wait_for(test, seconds))
