"""Log-probabilities of prompts equal Hugging Face's, however the prompt is cut, cached or preempted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from octavo import SamplingParams
from octavo.protos.types import MAX_PROMPT_LOGITS, Request, TokenLogprobs
from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.events import Finished, Preempted, PromptLogprobsOut
from octavo.scheduler.scheduler import Scheduler
from octavo.worker.build import build_executor
from octavo.worker.config import WorkerConfig
from octavo.worker.executor import Executor

VOCAB, TOP = 128, 3


@pytest.fixture(scope="module")
def model_dir(tiny_model_dir: Any) -> Path:
    folder: Path = tiny_model_dir("llama")
    return folder


@pytest.fixture(scope="module")
def executor(model_dir: Path) -> Executor:
    return build_executor(
        WorkerConfig(
            worker_id="w",
            model=str(model_dir),
            device="cpu",
            num_blocks=40,
            num_host_blocks=20,
            max_num_seqs=8,
        )
    )


@pytest.fixture(scope="module")
def expected(model_dir: Path) -> Any:
    """float64 [P - 1, VOCAB] of a prompt: what foretells each token but the first."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)

    def of(prompt: list[int]) -> np.ndarray:
        with torch.inference_mode():
            logits = model(torch.tensor([prompt])).logits[0, :-1].double()
        return logits.log_softmax(dim=1).numpy()

    return of


class Run:
    """One scheduler over the executor, turned to the end."""

    _epoch = 0

    def __init__(self, executor: Executor, **options: Any) -> None:
        Run._epoch += 1
        info = executor.info
        self.executor = executor
        self.scheduler = Scheduler(
            SchedulerConfig(
                num_blocks=info.num_blocks,
                num_host_blocks=info.num_host_blocks,
                kv_bytes_per_block=info.kv_bytes_per_block,
                host_link_bytes_per_second=1e9,
                max_num_seqs=info.max_num_seqs,
                max_model_len=info.model.max_model_len,
                pipeline_depth=1,
                epoch=Run._epoch,
                **options,
            )
        )
        self.events: list[Any] = []
        self.max_looked_at = 0

    def __call__(self, prompts: dict[str, list[int]], **params: Any) -> dict[str, list[TokenLogprobs]]:
        for name, prompt in prompts.items():
            self.scheduler.add(
                Request(
                    request_id=name,
                    prompt_token_ids=np.array(prompt, np.int32),
                    params=SamplingParams(
                        temperature=0, **{"max_tokens": 2, "prompt_logprobs": TOP, **params}
                    ),
                    seed=1,
                ),
                0.0,
            )
        while (plan := self.scheduler.plan(0.0)) is not None:
            result = self.executor.execute(plan)
            told = sum(len(found.entries) for _, found in result.prompt_logprobs)
            self.max_looked_at = max(self.max_looked_at, told)
            self.events += self.scheduler.commit(result, 0.0)
            self.scheduler.check_integrity()
        assert {event.request_id for event in self.events if isinstance(event, Finished)} >= set(prompts)
        found: dict[str, list[TokenLogprobs]] = {name: [] for name in prompts}
        for event in self.events:
            if isinstance(event, PromptLogprobsOut) and event.request_id in found:
                assert event.logprobs.start == len(found[event.request_id]) + 1, "each once, in order"
                found[event.request_id] += event.logprobs.entries
        return found


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB, length).tolist()


def assert_equal(found: list[TokenLogprobs], expected: np.ndarray, prompt: list[int]) -> None:
    assert len(found) == len(prompt) - 1
    for entry, row, token in zip(found, expected, prompt[1:], strict=True):
        assert entry.logprob == pytest.approx(row[token], abs=1e-3)
        assert len(entry.top_ids) == TOP
        assert list(entry.top_logprobs) == pytest.approx(np.sort(row)[: -TOP - 1 : -1].tolist(), abs=1e-3)
        assert [row[index] for index in entry.top_ids] == pytest.approx(list(entry.top_logprobs), abs=1e-3)


@pytest.mark.parametrize("budget", [7, 64, 512])
def test_however_the_prompt_is_cut(executor: Executor, expected: Any, budget: int) -> None:
    prompts = {f"p{length}": prompt_of(length, length) for length in (1, 2, 17, 200)}
    run = Run(executor, max_num_batched_tokens=budget)
    found = run(prompts)
    for name, prompt in prompts.items():
        if len(prompt) > 1:
            assert_equal(found[name], expected(prompt), prompt)
    assert found["p1"] == []
    assert run.max_looked_at <= min(budget, MAX_PROMPT_LOGITS)
    if budget == 512:
        assert run.max_looked_at == MAX_PROMPT_LOGITS


def test_what_is_cached_is_computed_again_and_left_for_others(executor: Executor, expected: Any) -> None:
    run = Run(executor, max_num_batched_tokens=64)
    prompt = prompt_of(100)
    first = run({"first": prompt})
    again = run({"again": prompt}, n=3)
    assert_equal(again["again"], expected(prompt), prompt)
    assert again["again"] == first["first"]
    run({"plain": prompt}, prompt_logprobs=None)
    metrics = {event.request_id: event.metrics for event in run.events if isinstance(event, Finished)}
    assert metrics["again"] is None or metrics["again"].cached_tokens == 0
    assert metrics["plain"].cached_tokens > 64


def test_neighbours_and_samples_are_not_disturbed(executor: Executor, expected: Any) -> None:
    """Rows that sample, some with log-probabilities, beside prompts that are looked at."""
    prompts = {f"r{index}": prompt_of(30 + index, index) for index in range(4)}
    run = Run(executor, max_num_batched_tokens=40)
    plain = Run(executor, max_num_batched_tokens=40)
    found = run(prompts, max_tokens=6, logprobs=2, ignore_eos=True)
    plain(prompts, max_tokens=6, logprobs=2, ignore_eos=True, prompt_logprobs=None)

    def outputs(events: list[Any]) -> dict[str, list[Any]]:
        told: dict[str, list[Any]] = {}
        for event in events:
            if hasattr(event, "token_ids"):
                told.setdefault(event.request_id, []).extend(event.token_ids)
        return told

    assert outputs(run.events) == outputs(plain.events)
    for name, prompt in prompts.items():
        assert_equal(found[name], expected(prompt), prompt)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_preemption_is_invisible(executor: Executor, expected: Any, preemption: str) -> None:
    prompts = {f"r{index}": prompt_of(50, index) for index in range(6)}
    run = Run(executor, max_num_batched_tokens=64, preemption=preemption)
    found = run(prompts, max_tokens=100, ignore_eos=True)
    assert any(isinstance(event, Preempted) for event in run.events)
    for name, prompt in prompts.items():
        assert_equal(found[name], expected(prompt), prompt)
