"""The in-process engine: a model, a scheduler and a worker in this process, without Ray and gRPC.

    from octavo import Engine, SamplingParams
    with Engine() as engine:
        outputs = engine.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=16))

Owns the life of the parts and the way from text to text. The scheduling is `octavo.scheduler`, as everywhere.
"""

from __future__ import annotations

import hashlib
import itertools
import queue
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

from octavo.cluster.engine_loop import EngineLoop
from octavo.cluster.engine_output import Collector, EngineStream
from octavo.cluster.forking import params_of_fork
from octavo.cluster.outputs import RequestOutput
from octavo.cluster.progress import progress_bar
from octavo.cluster.tokenizer import Tokenizer
from octavo.protos.errors import InvalidRequestError
from octavo.protos.types import (
    Int32Array,
    ModelInfo,
    Request,
    SamplingParams,
    WorkerInfo,
    checked_prompt_ids,
)
from octavo.scheduler.admission import resolve_max_tokens
from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.scheduler import Scheduler
from octavo.scheduler.step_time import StepTimeModel

Prompt = str | Sequence[int]

WINDOW_REQUESTS = 1024
"""Requests of one `generate` that may be unfinished at once; several calls together stay below `max_waiting`."""
SEED_MASK = 2**64 - 1
"""`Request.seed` is unsigned; a negative `params.seed` stands for its two's complement."""
PROGRESS_FROM_REQUESTS = 8
"""Fewer than this are done before a bar could be read."""


class Engine:
    """One model on one device of this machine.

    Arguments beyond `model` (None: the default model; a folder; a hub id; a .gguf file) are those of
    `WorkerConfig` and `SchedulerConfig` and mean the same; `host_blocks` is their `num_host_blocks`, the swap space.
    Raises `ConfigError` for a wrong option and `ModelLoadError` for a wrong checkpoint. Calls may come from several
    threads; their requests share batches.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        device: str = "auto",
        dtype: str = "auto",
        quantization: str | None = None,
        kv_cache_dtype: str = "auto",
        block_size: int = 16,
        num_blocks: int | None = None,
        host_blocks: int | None = None,
        max_num_batched_tokens: int | None = None,
        max_num_seqs: int = 256,
        max_model_len: int | None = None,
        preemption: str = "auto",
        victims: str = "least_lost",
        prefix_cache: bool = True,
        host_tier: bool = True,
        itl_target: float | None = None,
        guided_backend: str = "xgrammar",
        seed: int = 0,
    ) -> None:
        from octavo.worker.build import build_executor, choose_device
        from octavo.worker.config import TOKEN_BUDGETS, WorkerConfig
        from octavo.worker.loader import resolve_model

        self._seed = seed
        self._count = itertools.count()
        source = resolve_model(model)
        if max_num_batched_tokens is None:
            max_num_batched_tokens = TOKEN_BUDGETS[choose_device(device).type]
        executor = build_executor(
            WorkerConfig(
                model=model,
                worker_id="engine",
                device=device,
                dtype=dtype,
                quantization=quantization,
                kv_cache_dtype=kv_cache_dtype,
                block_size=block_size,
                num_blocks=num_blocks,
                num_host_blocks=host_blocks,
                max_num_batched_tokens=max_num_batched_tokens,
                max_num_seqs=max_num_seqs,
                max_model_len=max_model_len,
                guided_backend=guided_backend,
            )
        )
        self.info: WorkerInfo = executor.info
        self.model: ModelInfo = executor.info.model
        self.tokenizer = Tokenizer(source.tokenizer_dir)
        self._scheduler_config = SchedulerConfig(
            num_blocks=self.info.num_blocks,
            num_host_blocks=self.info.num_host_blocks,
            kv_bytes_per_block=self.info.kv_bytes_per_block,
            host_link_bytes_per_second=self.info.host_link_bytes_per_second,
            block_size=self.info.block_size,
            max_num_seqs=self.info.max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=self.model.max_model_len,
            pipeline_depth=1,
            preemption=preemption,
            victims=victims,
            prefix_cache=prefix_cache,
            host_tier=host_tier,
            itl_target=itl_target,
        )
        scheduler = Scheduler(self._scheduler_config, StepTimeModel.of_worker(self.info))
        self.loop = EngineLoop(scheduler, executor)

    # --- generation ----------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
        cache_salt: str = "",
        use_prefix_cache: bool = True,
    ) -> list[RequestOutput]:
        """Answer all `prompts` (strings or lists of token ids), in their order.

        `params`: one for all, or one each. `progress`: a bar on standard error; None shows one for long work in
        a terminal. `cache_salt`: prefixes are shared only with requests of the same one. `use_prefix_cache` False:
        cached prefixes are neither used nor left.

        Raises `InvalidRequestError` before anything runs when any prompt or parameter is wrong, and the error of the
        first request that failed.
        """
        given = _as_list(prompts)
        requests = self._requests(given, params, cache_salt, use_prefix_cache)
        done: queue.SimpleQueue[Collector] = queue.SimpleQueue()
        collectors = [
            Collector(
                self.loop, self.tokenizer, request, prompt if isinstance(prompt, str) else None, done.put
            )
            for request, prompt in zip(requests, given, strict=True)
        ]
        show = (
            progress
            if progress is not None
            else (len(requests) >= PROGRESS_FROM_REQUESTS and sys.stderr.isatty())
        )
        # A window, not all at once: a list of 100,000 prompts must not become a queue of 100,000.
        waiting = iter(collectors)
        submitted: list[Collector] = []

        def submit_next() -> None:
            collector = next(waiting, None)
            if collector is not None:
                self.loop.submit(collector.request, collector.take)
                submitted.append(collector)

        try:
            for _ in range(WINDOW_REQUESTS):
                submit_next()
            with progress_bar("generate", len(requests), enabled=show) as bar:
                for _ in requests:
                    finished = done.get()
                    finished.raise_error()
                    bar.advance(tokens=finished.num_tokens)
                    submit_next()
        except BaseException:
            for collector in submitted:
                self.loop.abort(collector.request.request_id)
            raise
        return [collector.output() for collector in collectors]

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        cache_salt: str = "",
        use_prefix_cache: bool = True,
    ) -> EngineStream:
        """Answer one prompt as it is made. Closing the iterator early aborts the request.

        Raises like `generate`, at once and not at the first item, and for `best_of` above n, whose best branches are
        known at the end only.
        """
        (request,) = self._requests([prompt], params, cache_salt, use_prefix_cache)
        return self._stream(request)

    def fork(
        self, request: EngineStream | str, params: SamplingParams | None = None, *, branch: int = 0
    ) -> EngineStream:
        """Go on, in a request of its own, from where one branch of a running request stands now.

        `request`: what `stream` gave, or its `request_id`. The new stream's prompt is the parent's prompt and the
        `forked_at` output tokens that the branch had, whose blocks the two share while both run; it gives what comes
        after them. Both go on, and neither depends on the other any more. `params`: None means the parent's, for one
        branch, with what is left of its limits and a seed of its own. The prefix cache's salt is the parent's.

        Raises `NotFoundError` for a request that has ended, `InvalidRequestError` (param "branch") for a branch that
        has, and like `stream`.
        """
        request_id = request if isinstance(request, str) else request.request_id
        parent, token_ids = self.loop.parent_of(request_id, branch)
        forked_at = len(token_ids) - parent.num_prompt_tokens
        if params is None:
            params = params_of_fork(parent.params, forked_at)
        self._check_params(params)
        fork = self._request(token_ids, params, parent.cache_salt, parent.use_prefix_cache)
        return self._stream(replace(fork, adapter=parent.adapter, fork_of=request_id), forked_at)

    def _stream(self, request: Request, forked_at: int | None = None) -> EngineStream:
        if request.params.ranks_by_logprob:
            raise InvalidRequestError(
                f"best_of above n ({request.params.n}) cannot be streamed: which branches are the best is known at "
                "the end",
                param="best_of",
            )
        return EngineStream(self.loop, self.tokenizer, request, forked_at=forked_at)

    def _requests(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        cache_salt: str,
        use_prefix_cache: bool,
    ) -> list[Request]:
        if params is None:
            params = SamplingParams()
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise InvalidRequestError(
                f"params must be one, or one for each of the {len(prompts)} prompts; got {len(each)}",
                param="params",
            )
        if not isinstance(cache_salt, str):
            raise InvalidRequestError(
                f"cache_salt must be a string, got {cache_salt!r:.80}", param="cache_salt"
            )
        vocab_size = self.model.vocab_size
        for one in each:
            self._check_params(one)
        return [
            self._request(self._prompt_ids(prompt, vocab_size), one, cache_salt, bool(use_prefix_cache))
            for prompt, one in zip(prompts, each, strict=True)
        ]

    def _check_params(self, params: SamplingParams) -> None:
        """Raises `InvalidRequestError` for what the model cannot do. What an output must match is ready then."""
        params.check_vocab(self.model.vocab_size)
        if params.structured_output is not None:
            self.loop.compile_grammar(params.structured_output).result()

    def _prompt_ids(self, prompt: Prompt, vocab_size: int) -> Int32Array:
        if isinstance(prompt, str):
            return checked_prompt_ids(self.tokenizer.encode(prompt), vocab_size)
        return checked_prompt_ids(prompt, vocab_size)

    def _request(
        self, prompt_token_ids: Int32Array, params: SamplingParams, cache_salt: str, use_prefix_cache: bool
    ) -> Request:
        request = Request(
            request_id=uuid.uuid4().hex,
            prompt_token_ids=prompt_token_ids,
            params=params,
            seed=(params.seed if params.seed is not None else self._draw_seed()) & SEED_MASK,
            eos_token_ids=() if params.ignore_eos else self.model.eos_token_ids,
            cache_salt=cache_salt,
            use_prefix_cache=use_prefix_cache,
        )
        resolve_max_tokens(request, self._scheduler_config)
        return request

    def _draw_seed(self) -> int:
        """Seeds of requests that name none follow from the engine's: the same calls repeat the same tokens."""
        digest = hashlib.blake2b(f"{self._seed}/{next(self._count)}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little")

    # --- state ---------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Steps, requests running, waiting and swapped, blocks free, cached and used, preemptions, waste."""
        return self.loop.snapshot()

    def check_integrity(self) -> None:
        """Raise `IntegrityError` on any broken invariant (rule R2)."""
        self.loop.check_integrity()

    def close(self) -> None:
        """Abort what runs and end the engine's thread."""
        self.loop.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, Mapping) or not isinstance(prompts, Sequence):
        raise InvalidRequestError(
            f"prompts must be a string, a list of token ids or a list of these, got {type(prompts).__name__}",
            param="prompts",
        )
    if prompts and isinstance(prompts[0], int):
        return [prompts]  # type: ignore[list-item]  # one prompt of token ids
    return list(prompts)  # type: ignore[arg-type]
