"""Dataclasses of `types.py` to protobuf messages and back: the only module that knows both.

`encode_*` takes a dataclass and returns a message; `decode_*` takes a message that came from a peer and
returns a dataclass, or raises `ProtocolError` when the message is damaged and `InvalidRequestError` when it
is well formed but asks for the impossible. A decoded array is read-only and shares the bytes of the message.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.protos import common_pb2, coordinator_pb2, worker_pb2
from octavo.protos.errors import OctavoError, OverloadedError, ProtocolError, revive
from octavo.protos.structured_output import OutputKind, StructuredOutput
from octavo.protos.types import (
    BranchSoFar,
    CachedPrefix,
    FinishReason,
    Int32Array,
    ModelInfo,
    NewSequence,
    OutputDelta,
    PromptLogprobs,
    Request,
    RequestMetrics,
    Resume,
    SamplingParams,
    StepPlan,
    StepResult,
    TokenLogprobs,
    WorkerInfo,
)

_INT32 = np.dtype("<i4")
_FLOAT64 = np.dtype("<f8")
_UINT8 = np.dtype("u1")
_SIGN_BIT = 1 << 63

_REASON_TO_WIRE = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: common_pb2.FINISH_REASON_ABORT,
    FinishReason.ERROR: common_pb2.FINISH_REASON_ERROR,
}
_REASON_FROM_WIRE = {wire: reason for reason, wire in _REASON_TO_WIRE.items()}
_EARLY_STOPPING: dict[bool | str, common_pb2.EarlyStopping] = {
    False: common_pb2.EARLY_STOPPING_HEURISTIC,
    True: common_pb2.EARLY_STOPPING_ALWAYS,
    "never": common_pb2.EARLY_STOPPING_NEVER,
}
_EARLY_STOPPING_FROM_WIRE = {wire: value for value, wire in _EARLY_STOPPING.items()}

_OUTPUT_KIND = {
    OutputKind.JSON_SCHEMA: common_pb2.OUTPUT_KIND_JSON_SCHEMA,
    OutputKind.JSON_OBJECT: common_pb2.OUTPUT_KIND_JSON_OBJECT,
    OutputKind.REGEX: common_pb2.OUTPUT_KIND_REGEX,
    OutputKind.CHOICE: common_pb2.OUTPUT_KIND_CHOICE,
    OutputKind.GRAMMAR: common_pb2.OUTPUT_KIND_GRAMMAR,
}
_OUTPUT_KIND_FROM_WIRE = {wire: kind for kind, wire in _OUTPUT_KIND.items()}


# Arrays


def encode_ints(values: Int32Array | Iterable[int]) -> bytes:
    """int32 of any shape as little-endian bytes, C order."""
    array = values if isinstance(values, np.ndarray) else np.fromiter(values, _INT32)
    return np.ascontiguousarray(array, dtype=_INT32).tobytes()


def _decode(name: str, data: bytes, dtype: np.dtype[Any], columns: int | None = None) -> npt.NDArray[Any]:
    row_bytes = dtype.itemsize * (columns or 1)
    if len(data) % row_bytes:
        raise ProtocolError(f"{name} has {len(data)} bytes, not a multiple of {row_bytes}")
    array = np.frombuffer(data, dtype)
    return array if columns is None else array.reshape(-1, columns)


def decode_ints(name: str, data: bytes, columns: int | None = None) -> Int32Array:
    """int32 [N], or [N, columns]. Raises `ProtocolError` naming the field when the bytes do not divide."""
    return _decode(name, data, _INT32, columns)


def _same_length(**fields: npt.NDArray[Any]) -> None:
    if len({len(array) for array in fields.values()}) > 1:
        lengths = ", ".join(f"{name} {len(array)}" for name, array in fields.items())
        raise ProtocolError(f"columns of one table differ in length: {lengths}")


# Errors


def encode_error(error: OctavoError) -> common_pb2.ErrorDetail:
    return common_pb2.ErrorDetail(
        name=type(error).__name__,
        message=error.message,
        param=error.param or "",
        code=error.code or "",
        retry_after_seconds=error.retry_after_seconds if isinstance(error, OverloadedError) else 0.0,
    )


def decode_error(message: common_pb2.ErrorDetail) -> OctavoError:
    error = revive(message.name, message.message, param=message.param or None, code=message.code or None)
    if isinstance(error, OverloadedError):
        error.retry_after_seconds = message.retry_after_seconds
    return error


# Requests


def encode_structured_output(wanted: StructuredOutput) -> common_pb2.StructuredOutput:
    return common_pb2.StructuredOutput(kind=_OUTPUT_KIND[wanted.kind], text=wanted.text)


def decode_structured_output(message: common_pb2.StructuredOutput) -> StructuredOutput:
    kind = _OUTPUT_KIND_FROM_WIRE.get(message.kind)
    if kind is None:
        raise ProtocolError(f"structured output of an unknown kind {message.kind}")
    return StructuredOutput(kind, message.text)


def encode_params(params: SamplingParams) -> common_pb2.SamplingParams:
    return common_pb2.SamplingParams(
        n=params.n,
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        logit_bias=params.logit_bias,
        seed=params.seed,
        stop=params.stop,
        stop_token_ids=encode_ints(params.stop_token_ids),
        include_stop_str_in_output=params.include_stop_str_in_output,
        ignore_eos=params.ignore_eos,
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
        skip_special_tokens=params.skip_special_tokens,
        best_of=params.best_of,
        beam_width=params.beam_width,
        length_penalty=params.length_penalty,
        early_stopping=_EARLY_STOPPING[params.early_stopping],
        structured_output=encode_structured_output(params.structured_output)
        if params.structured_output is not None
        else None,
    )


def decode_params(message: common_pb2.SamplingParams) -> SamplingParams:
    return SamplingParams(
        n=message.n,
        max_tokens=message.max_tokens if message.HasField("max_tokens") else None,
        min_tokens=message.min_tokens,
        temperature=message.temperature,
        top_p=message.top_p,
        top_k=message.top_k,
        min_p=message.min_p,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        repetition_penalty=message.repetition_penalty,
        logit_bias=dict(message.logit_bias),
        seed=message.seed if message.HasField("seed") else None,
        stop=tuple(message.stop),
        stop_token_ids=tuple(decode_ints("stop_token_ids", message.stop_token_ids).tolist()),
        include_stop_str_in_output=message.include_stop_str_in_output,
        ignore_eos=message.ignore_eos,
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        skip_special_tokens=message.skip_special_tokens,
        best_of=message.best_of if message.HasField("best_of") else None,
        beam_width=message.beam_width if message.HasField("beam_width") else None,
        length_penalty=message.length_penalty,
        early_stopping=_EARLY_STOPPING_FROM_WIRE.get(message.early_stopping, False),
        structured_output=decode_structured_output(message.structured_output)
        if message.HasField("structured_output")
        else None,
    )


def _encode_request(request: Request, prompt: bytes) -> common_pb2.Request:
    return common_pb2.Request(
        request_id=request.request_id,
        prompt_token_ids=prompt,
        params=encode_params(request.params),
        # The key is 64 bits whichever way its sign is read; fold [2^63, 2^64) into two's complement.
        seed=(request.seed + _SIGN_BIT) % (1 << 64) - _SIGN_BIT,
        eos_token_ids=encode_ints(request.eos_token_ids),
        priority=request.priority,
        cache_salt=request.cache_salt,
        adapter=request.adapter,
        use_prefix_cache=request.use_prefix_cache,
        fork_of=request.fork_of,
        timeout_seconds=request.timeout_seconds,
        tenant=request.tenant,
        trace_parent=request.trace_parent,
    )


def _decode_request(message: common_pb2.Request, prompt: Int32Array) -> Request:
    if not message.request_id:
        raise ProtocolError("a request has no id")
    if len(prompt) == 0:
        raise ProtocolError(f"request {message.request_id} has no prompt")
    return Request(
        request_id=message.request_id,
        prompt_token_ids=prompt,
        params=decode_params(message.params),
        seed=message.seed,
        eos_token_ids=tuple(decode_ints("eos_token_ids", message.eos_token_ids).tolist()),
        priority=message.priority,
        cache_salt=message.cache_salt,
        adapter=message.adapter,
        use_prefix_cache=message.use_prefix_cache,
        fork_of=message.fork_of,
        timeout_seconds=message.timeout_seconds if message.HasField("timeout_seconds") else None,
        tenant=message.tenant,
        trace_parent=message.trace_parent,
    )


def encode_request(request: Request) -> common_pb2.Request:
    return _encode_request(request, encode_ints(request.prompt_token_ids))


def decode_request(message: common_pb2.Request) -> Request:
    return _decode_request(message, decode_ints("prompt_token_ids", message.prompt_token_ids))


def encode_resume(request: Request, resume: Resume) -> coordinator_pb2.ResumeRequest:
    return coordinator_pb2.ResumeRequest(
        request=encode_request(request),
        branches=(
            coordinator_pb2.BranchSoFar(
                token_ids=encode_ints(branch.token_ids),
                finish_reason=_REASON_TO_WIRE[branch.finish_reason] if branch.finish_reason else None,
            )
            for branch in resume.branches
        ),
        metrics=_encode_metrics(resume.metrics),
    )


def decode_resume(message: coordinator_pb2.ResumeRequest) -> tuple[Request, Resume]:
    branches = tuple(
        BranchSoFar(
            token_ids=decode_ints("token_ids", branch.token_ids),
            finish_reason=_decode_reason(branch.finish_reason),
        )
        for branch in message.branches
    )
    return decode_request(message.request), Resume(
        branches=branches, metrics=_decode_metrics(message.metrics)
    )


# Plans and results


def _encode_new_sequence(new: NewSequence) -> worker_pb2.NewSequence:
    return worker_pb2.NewSequence(
        row=new.row,
        # `token_ids` begins with the prompt; a long one need not travel twice.
        request=_encode_request(new.request, b""),
        branch=new.branch,
        max_tokens=new.max_tokens,
        token_ids=encode_ints(new.token_ids),
        num_prompt_tokens=new.request.num_prompt_tokens,
        num_computed_tokens=new.num_computed_tokens,
    )


def _decode_new_sequence(message: worker_pb2.NewSequence) -> NewSequence:
    token_ids = decode_ints("token_ids", message.token_ids)
    if not 1 <= message.num_prompt_tokens <= len(token_ids):
        raise ProtocolError(f"a prompt of {message.num_prompt_tokens} tokens within {len(token_ids)}")
    return NewSequence(
        row=message.row,
        request=_decode_request(message.request, token_ids[: message.num_prompt_tokens]),
        branch=message.branch,
        max_tokens=message.max_tokens,
        token_ids=token_ids,
        num_computed_tokens=message.num_computed_tokens,
    )


def encode_plan(plan: StepPlan) -> worker_pb2.StepPlan:
    """Columns that a steady decode repeats every step (all ones, every row sampled) are left out."""
    num_rows = len(plan.rows)
    samples_rows = np.array_equal(plan.sample_rows, plan.rows) and np.array_equal(
        plan.sample_indices, np.arange(num_rows)
    )
    return worker_pb2.StepPlan(
        step_id=plan.step_id,
        epoch=plan.epoch,
        released_rows=encode_ints(plan.released_rows),
        swaps_out=encode_ints(plan.swaps_out),
        swaps_in=encode_ints(plan.swaps_in),
        new_sequences=map(_encode_new_sequence, plan.new_sequences),
        beam_moves=encode_ints(plan.beam_moves),
        block_updates=encode_ints(plan.block_updates),
        forks=encode_ints(plan.forks),
        block_copies=encode_ints(plan.block_copies),
        rows=encode_ints(plan.rows),
        num_tokens=b"" if (plan.num_tokens == 1).all() else encode_ints(plan.num_tokens),
        start_positions=encode_ints(plan.start_positions),
        sample_rows=b"" if samples_rows else encode_ints(plan.sample_rows),
        sample_indices=b"" if samples_rows else encode_ints(plan.sample_indices),
        samples_rows=samples_rows,
    )


def decode_plan(message: worker_pb2.StepPlan) -> StepPlan:
    rows = decode_ints("rows", message.rows)
    num_tokens = decode_ints("num_tokens", message.num_tokens)
    if not message.num_tokens:
        num_tokens = np.ones(len(rows), np.int32)
    start_positions = decode_ints("start_positions", message.start_positions)
    _same_length(rows=rows, num_tokens=num_tokens, start_positions=start_positions)
    if message.samples_rows:
        sample_rows, sample_indices = rows, np.arange(len(rows), dtype=np.int32)
    else:
        sample_rows = decode_ints("sample_rows", message.sample_rows)
        sample_indices = decode_ints("sample_indices", message.sample_indices)
        _same_length(sample_rows=sample_rows, sample_indices=sample_indices)
    return StepPlan(
        step_id=message.step_id,
        epoch=message.epoch,
        released_rows=decode_ints("released_rows", message.released_rows),
        swaps_out=decode_ints("swaps_out", message.swaps_out, columns=2),
        swaps_in=decode_ints("swaps_in", message.swaps_in, columns=2),
        new_sequences=tuple(map(_decode_new_sequence, message.new_sequences)),
        beam_moves=decode_ints("beam_moves", message.beam_moves, columns=4),
        block_updates=decode_ints("block_updates", message.block_updates, columns=3),
        forks=decode_ints("forks", message.forks, columns=3),
        block_copies=decode_ints("block_copies", message.block_copies, columns=2),
        rows=rows,
        num_tokens=num_tokens,
        start_positions=start_positions,
        sample_rows=sample_rows,
        sample_indices=sample_indices,
    )


def encode_logprobs(logprobs: Sequence[TokenLogprobs | None]) -> common_pb2.TokenLogprobs | None:
    """None, which leaves the message field absent, for an empty sequence."""
    if not logprobs:
        return None
    given = [entry for entry in logprobs if entry is not None]
    top_ids = list(itertools.chain.from_iterable(entry.top_ids for entry in given))
    top_logprobs = list(itertools.chain.from_iterable(entry.top_logprobs for entry in given))
    assert len(top_ids) == len(top_logprobs)
    return common_pb2.TokenLogprobs(
        present=bytes(entry is not None for entry in logprobs),
        logprobs=np.array([entry.logprob for entry in given], _FLOAT64).tobytes(),
        top_counts=encode_ints(len(entry.top_ids) for entry in given),
        top_ids=encode_ints(top_ids),
        top_logprobs=np.array(top_logprobs, _FLOAT64).tobytes(),
    )


def decode_logprobs(message: common_pb2.TokenLogprobs) -> tuple[TokenLogprobs | None, ...]:
    present = _decode("present", message.present, _UINT8)
    chosen = _decode("logprobs", message.logprobs, _FLOAT64)
    counts = decode_ints("top_counts", message.top_counts)
    top_ids = decode_ints("top_ids", message.top_ids).tolist()
    top_logprobs = _decode("top_logprobs", message.top_logprobs, _FLOAT64).tolist()
    if (present > 1).any() or int(present.sum()) != len(chosen) or (counts < 0).any():
        raise ProtocolError("log-probabilities do not match the positions they are for")
    _same_length(logprobs=chosen, top_counts=counts)
    if not int(counts.sum(dtype=np.int64)) == len(top_ids) == len(top_logprobs):
        raise ProtocolError("alternatives do not match their counts")
    entries = []
    start = 0
    for logprob, count in zip(chosen.tolist(), counts.tolist(), strict=True):
        end = start + count
        entries.append(TokenLogprobs(logprob, tuple(top_ids[start:end]), tuple(top_logprobs[start:end])))
        start = end
    given = iter(entries)
    return tuple(next(given) if flag else None for flag in present.tolist())


def encode_prompt_logprobs(found: PromptLogprobs) -> common_pb2.PromptLogprobs:
    return common_pb2.PromptLogprobs(start=found.start, logprobs=encode_logprobs(found.entries))


def decode_prompt_logprobs(message: common_pb2.PromptLogprobs) -> PromptLogprobs:
    entries = [entry for entry in decode_logprobs(message.logprobs) if entry is not None]
    if message.start < 1 or len(entries) != len(message.logprobs.present):
        raise ProtocolError("log-probabilities of a prompt begin before its second token, or have gaps")
    return PromptLogprobs(message.start, tuple(entries))


def encode_result(result: StepResult) -> worker_pb2.StepResult:
    return worker_pb2.StepResult(
        step_id=result.step_id,
        epoch=result.epoch,
        token_ids=encode_ints(result.token_ids),
        logprobs=encode_logprobs(result.logprobs),
        prompt_logprobs=(
            worker_pb2.RowPrompt(row_index=index, logprobs=encode_prompt_logprobs(found))
            for index, found in result.prompt_logprobs
        ),
        row_errors=(
            worker_pb2.RowError(sample_index=index, message=text) for index, text in result.row_errors
        ),
        step_seconds=result.step_seconds,
        parts_seconds=result.parts_seconds,
    )


def decode_result(message: worker_pb2.StepResult) -> StepResult:
    token_ids = decode_ints("token_ids", message.token_ids)
    logprobs = decode_logprobs(message.logprobs) if message.HasField("logprobs") else ()
    if logprobs and len(logprobs) != len(token_ids):
        raise ProtocolError(f"log-probabilities for {len(logprobs)} rows beside {len(token_ids)} tokens")
    if any(not 0 <= error.sample_index < len(token_ids) for error in message.row_errors):
        raise ProtocolError(f"a row error outside the {len(token_ids)} sampled rows")
    return StepResult(
        step_id=message.step_id,
        epoch=message.epoch,
        token_ids=token_ids,
        logprobs=logprobs,
        prompt_logprobs=tuple(
            (row.row_index, decode_prompt_logprobs(row.logprobs)) for row in message.prompt_logprobs
        ),
        row_errors=tuple((error.sample_index, error.message) for error in message.row_errors),
        step_seconds=message.step_seconds,
        parts_seconds=dict(message.parts_seconds),
    )


# Outputs


def encode_outputs(deltas: Iterable[OutputDelta]) -> coordinator_pb2.OutputBatch:
    """As one message. Made in place and with what is set alone: this is most of what an output token costs here."""
    batch = coordinator_pb2.OutputBatch()
    add = batch.deltas.add
    for delta in deltas:
        add(**_delta_fields(delta))
    return batch


def _delta_fields(delta: OutputDelta) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "request_id": delta.request_id,
        "branch": delta.branch,
        "offset": delta.offset,
        "token_ids": encode_ints(delta.token_ids),
        "error": delta.error,
        "error_name": delta.error_name,
        "score": delta.score,
    }
    if delta.logprobs:
        fields["logprobs"] = encode_logprobs(delta.logprobs)
    if delta.prompt_logprobs:
        fields["prompt_logprobs"] = encode_prompt_logprobs(delta.prompt_logprobs)
    if delta.finish_reason:
        fields["finish_reason"] = _REASON_TO_WIRE[delta.finish_reason]
    if delta.request_finished:
        fields["request_finished"] = True
    if delta.metrics:
        fields["metrics"] = _encode_metrics(delta.metrics)
    return fields


def decode_delta(message: coordinator_pb2.OutputDelta) -> OutputDelta:
    token_ids = decode_ints("token_ids", message.token_ids)
    logprobs = decode_logprobs(message.logprobs) if message.HasField("logprobs") else ()
    if logprobs and len(logprobs) != len(token_ids):
        raise ProtocolError(f"log-probabilities for {len(logprobs)} positions beside {len(token_ids)} tokens")
    return OutputDelta(
        request_id=message.request_id,
        branch=message.branch,
        offset=message.offset,
        token_ids=tuple(token_ids.tolist()),
        logprobs=logprobs,
        prompt_logprobs=decode_prompt_logprobs(message.prompt_logprobs)
        if message.HasField("prompt_logprobs")
        else None,
        finish_reason=_decode_reason(message.finish_reason),
        request_finished=message.request_finished,
        error=message.error if message.HasField("error") else None,
        error_name=message.error_name if message.HasField("error_name") else None,
        metrics=_decode_metrics(message.metrics) if message.HasField("metrics") else None,
        score=message.score if message.HasField("score") else None,
    )


def _decode_reason(reason: common_pb2.FinishReason) -> FinishReason | None:
    if reason == common_pb2.FINISH_REASON_UNSPECIFIED:
        return None
    # A reason of a newer peer still ends the branch; which word it used is the least of it.
    return _REASON_FROM_WIRE.get(reason, FinishReason.STOP)


def _encode_metrics(metrics: RequestMetrics) -> coordinator_pb2.RequestMetrics:
    return coordinator_pb2.RequestMetrics(
        cached_tokens=metrics.cached_tokens,
        num_preemptions=metrics.num_preemptions,
        queue_seconds=metrics.queue_seconds,
        ttft_seconds=metrics.ttft_seconds,
        total_seconds=metrics.total_seconds,
        recomputed_tokens=metrics.recomputed_tokens,
    )


def _decode_metrics(message: coordinator_pb2.RequestMetrics) -> RequestMetrics:
    return RequestMetrics(
        cached_tokens=message.cached_tokens,
        num_preemptions=message.num_preemptions,
        queue_seconds=message.queue_seconds,
        ttft_seconds=message.ttft_seconds,
        total_seconds=message.total_seconds,
        recomputed_tokens=message.recomputed_tokens,
    )


# Models and workers


def encode_model_info(info: ModelInfo) -> common_pb2.ModelInfo:
    return common_pb2.ModelInfo(
        name=info.name,
        vocab_size=info.vocab_size,
        max_model_len=info.max_model_len,
        eos_token_ids=encode_ints(info.eos_token_ids),
    )


def decode_model_info(message: common_pb2.ModelInfo) -> ModelInfo:
    return ModelInfo(
        name=message.name,
        vocab_size=message.vocab_size,
        max_model_len=message.max_model_len,
        eos_token_ids=tuple(decode_ints("eos_token_ids", message.eos_token_ids).tolist()),
    )


def encode_worker_info(info: WorkerInfo) -> worker_pb2.WorkerInfo:
    return worker_pb2.WorkerInfo(
        worker_id=info.worker_id,
        model=encode_model_info(info.model),
        device=info.device,
        dtype=info.dtype,
        block_size=info.block_size,
        num_blocks=info.num_blocks,
        num_host_blocks=info.num_host_blocks,
        max_num_seqs=info.max_num_seqs,
        kv_bytes_per_block=info.kv_bytes_per_block,
        prefill_tokens_per_second=info.prefill_tokens_per_second,
        decode_step_seconds=info.decode_step_seconds,
        host_link_bytes_per_second=info.host_link_bytes_per_second,
    )


def decode_worker_info(message: worker_pb2.WorkerInfo) -> WorkerInfo:
    if not message.worker_id or message.num_blocks < 1 or message.block_size < 1 or message.max_num_seqs < 1:
        raise ProtocolError("a worker's hello lacks its id, blocks or rows")
    return WorkerInfo(
        worker_id=message.worker_id,
        model=decode_model_info(message.model),
        device=message.device,
        dtype=message.dtype,
        block_size=message.block_size,
        num_blocks=message.num_blocks,
        num_host_blocks=message.num_host_blocks,
        max_num_seqs=message.max_num_seqs,
        kv_bytes_per_block=message.kv_bytes_per_block,
        prefill_tokens_per_second=message.prefill_tokens_per_second,
        decode_step_seconds=message.decode_step_seconds,
        host_link_bytes_per_second=message.host_link_bytes_per_second,
    )


def encode_cached_prefix(prefix: CachedPrefix) -> worker_pb2.CachedPrefix:
    return worker_pb2.CachedPrefix(
        token_ids=encode_ints(prefix.token_ids),
        blocks=encode_ints(prefix.blocks),
        cache_salt=prefix.cache_salt,
        adapter=prefix.adapter,
    )


def decode_cached_prefix(message: worker_pb2.CachedPrefix) -> CachedPrefix:
    return CachedPrefix(
        token_ids=decode_ints("token_ids", message.token_ids),
        blocks=decode_ints("blocks", message.blocks),
        cache_salt=message.cache_salt,
        adapter=message.adapter,
    )
