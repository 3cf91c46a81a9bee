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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from octavo.cluster.detokenizer import BranchText
from octavo.cluster.engine_loop import EngineLoop
from octavo.cluster.outputs import CompletionOutput, RequestOutput
from octavo.cluster.progress import progress_bar
from octavo.cluster.tokenizer import Tokenizer
from octavo.protos import errors
from octavo.protos.errors import InvalidRequestError
from octavo.protos.types import (
    FinishReason,
    Int32Array,
    ModelInfo,
    OutputDelta,
    Request,
    RequestMetrics,
    SamplingParams,
    TokenLogprobs,
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


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamDelta:
    """What is new in one branch of a streamed request."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None


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
        block_size: int = 16,
        num_blocks: int | None = None,
        host_blocks: int | None = None,
        max_num_batched_tokens: int = 512,
        max_num_seqs: int = 256,
        max_model_len: int | None = None,
        preemption: str = "auto",
        victims: str = "least_lost",
        prefix_cache: bool = True,
        itl_target: float | None = None,
        seed: int = 0,
    ) -> None:
        from octavo.worker.build import build_executor
        from octavo.worker.config import WorkerConfig
        from octavo.worker.loader import resolve_model

        self._seed = seed
        self._count = itertools.count()
        source = resolve_model(model)
        executor = build_executor(
            WorkerConfig(
                model=model,
                worker_id="engine",
                device=device,
                dtype=dtype,
                quantization=quantization,
                block_size=block_size,
                num_blocks=num_blocks,
                num_host_blocks=host_blocks,
                max_num_batched_tokens=max_num_batched_tokens,
                max_num_seqs=max_num_seqs,
                max_model_len=max_model_len,
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
    ) -> list[RequestOutput]:
        """Answer all `prompts` (strings or lists of token ids), in their order.

        `params`: one for all, or one each. `progress`: a bar on standard error; None shows one for long work in
        a terminal. Raises `InvalidRequestError` before anything runs when any prompt or parameter is wrong, and
        the error of the first request that failed.
        """
        given = _as_list(prompts)
        requests = self._requests(given, params)
        done: queue.SimpleQueue[_Collector] = queue.SimpleQueue()
        collectors = [
            _Collector(self, request, prompt, done) for request, prompt in zip(requests, given, strict=True)
        ]
        show = (
            progress
            if progress is not None
            else (len(requests) >= PROGRESS_FROM_REQUESTS and sys.stderr.isatty())
        )
        # A window, not all at once: a list of 100,000 prompts must not become a queue of 100,000.
        waiting = iter(collectors)
        submitted: list[_Collector] = []

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

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[StreamDelta]:
        """Answer one prompt as it is made. Closing the iterator early aborts the request.

        Raises like `generate`, at once and not at the first item.
        """
        (request,) = self._requests([prompt], params)
        deltas: queue.SimpleQueue[OutputDelta] = queue.SimpleQueue()
        self.loop.submit(request, deltas.put)
        return self._stream(request, deltas)

    def _stream(self, request: Request, deltas: queue.SimpleQueue[OutputDelta]) -> Iterator[StreamDelta]:
        texts = [BranchText(self.tokenizer, request.params) for _ in range(request.params.n)]
        live = set(range(request.params.n))
        try:
            while live:
                delta = deltas.get()
                if delta.error is not None:
                    raise errors.revive(delta.error_name or "RequestFailedError", delta.error)
                branch = delta.branch
                if branch not in live:
                    continue
                text, stopped = _push(texts[branch], delta)
                reason = FinishReason.STOP if stopped else delta.finish_reason
                if stopped and delta.finish_reason is None:
                    self.loop.stop_branch(request.request_id, branch)
                if reason is not None:
                    live.discard(branch)
                if text or delta.token_ids or reason:
                    yield StreamDelta(
                        index=branch,
                        text=text,
                        token_ids=delta.token_ids,
                        finish_reason=reason.value if reason else None,
                    )
        finally:
            self.loop.abort(request.request_id)

    def _requests(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[Request]:
        if params is None:
            params = SamplingParams()
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise InvalidRequestError(
                f"params must be one, or one for each of the {len(prompts)} prompts; got {len(each)}",
                param="params",
            )
        vocab_size = self.model.vocab_size
        for one in each:
            one.check_vocab(vocab_size)
        return [
            self._request(self._prompt_ids(prompt, vocab_size), one)
            for prompt, one in zip(prompts, each, strict=True)
        ]

    def _prompt_ids(self, prompt: Prompt, vocab_size: int) -> Int32Array:
        if isinstance(prompt, str):
            return checked_prompt_ids(self.tokenizer.encode(prompt), vocab_size)
        return checked_prompt_ids(prompt, vocab_size)

    def _request(self, prompt_token_ids: Int32Array, params: SamplingParams) -> Request:
        request = Request(
            request_id=uuid.uuid4().hex,
            prompt_token_ids=prompt_token_ids,
            params=params,
            seed=(params.seed if params.seed is not None else self._draw_seed()) & SEED_MASK,
            eos_token_ids=() if params.ignore_eos else self.model.eos_token_ids,
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


class _Collector:
    """Gathers the deltas of one request on the loop's thread and tells `done` once, at its end."""

    def __init__(
        self, engine: Engine, request: Request, prompt: Prompt, done: queue.SimpleQueue[_Collector]
    ) -> None:
        self.request = request
        self._prompt = prompt if isinstance(prompt, str) else None
        self._engine = engine
        self._done = done
        n, params = request.params.n, request.params
        self._texts = [BranchText(engine.tokenizer, params) for _ in range(n)]
        self._parts: list[list[str]] = [[] for _ in range(n)]
        self._token_ids: list[list[int]] = [[] for _ in range(n)]
        self._logprobs: list[list[TokenLogprobs | None]] = [[] for _ in range(n)]
        self._reasons: list[FinishReason | None] = [None] * n
        self._metrics = RequestMetrics()
        self._error: tuple[str, str] | None = None

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self._token_ids))

    def take(self, delta: OutputDelta) -> None:
        branch = delta.branch
        if delta.error is not None:
            self._error = (delta.error_name or "RequestFailedError", delta.error)
        elif self._reasons[branch] is None:
            self._take_tokens(branch, delta)
        if delta.request_finished:
            self._metrics = delta.metrics or self._metrics
            self._done.put(self)

    def _take_tokens(self, branch: int, delta: OutputDelta) -> None:
        text, stopped = _push(self._texts[branch], delta)
        self._parts[branch].append(text)
        self._token_ids[branch] += delta.token_ids
        self._logprobs[branch] += delta.logprobs or (None,) * len(delta.token_ids)
        self._reasons[branch] = delta.finish_reason
        if stopped:
            self._reasons[branch] = FinishReason.STOP
            if delta.finish_reason is None:
                self._engine.loop.stop_branch(self.request.request_id, branch)

    def raise_error(self) -> None:
        if self._error is not None:
            raise errors.revive(*self._error)

    def output(self) -> RequestOutput:
        params = self.request.params
        outputs = []
        for branch, text in enumerate(self._texts):
            # A stop string ends the branch at the token that completed it; the same step may have made more.
            count = text.num_tokens
            logprobs = tuple(self._logprobs[branch][:count]) if params.logprobs is not None else None
            reason = self._reasons[branch]
            outputs.append(
                CompletionOutput(
                    index=branch,
                    text="".join(self._parts[branch]),
                    token_ids=tuple(self._token_ids[branch][:count]),
                    finish_reason=reason.value if reason else None,
                    logprobs=logprobs,
                    cumulative_logprob=None
                    if logprobs is None
                    else sum(entry.logprob for entry in logprobs if entry is not None),
                )
            )
        return RequestOutput(
            request_id=self.request.request_id,
            prompt=self._prompt,
            prompt_token_ids=tuple(self.request.prompt_token_ids.tolist()),
            outputs=tuple(outputs),
            metrics=self._metrics,
        )


def _push(text: BranchText, delta: OutputDelta) -> tuple[str, bool]:
    return text.push(
        delta.token_ids,
        finished=delta.finish_reason is not None,
        stop_token=delta.finish_reason is FinishReason.STOP and bool(delta.token_ids),
    )


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
