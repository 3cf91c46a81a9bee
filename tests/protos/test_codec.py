"""Dataclass -> message -> bytes -> message -> dataclass gives the same value, and damage gives an error type."""

import dataclasses
import math

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.protos import codec, common_pb2, coordinator_pb2, errors, worker_pb2
from octavo.protos.structured_output import OutputKind, StructuredOutput
from octavo.protos.types import (
    FinishReason,
    ModelInfo,
    NewSequence,
    OutputDelta,
    PromptLogprobs,
    Request,
    RequestMetrics,
    SamplingParams,
    StepPlan,
    StepResult,
    TokenLogprobs,
    WorkerInfo,
)

INT32 = st.integers(0, 2**31 - 1)
UNIT = st.floats(0, 1, exclude_min=True)
TEXT = st.text(max_size=20)
FINITE = st.floats(allow_nan=False)
SECONDS = st.floats(0, 1e6)


def same(left, right) -> bool:
    """Equality of dataclasses that hold arrays, which are equal when shape, type and elements are."""
    if dataclasses.is_dataclass(left):
        return type(left) is type(right) and all(
            same(getattr(left, field.name), getattr(right, field.name)) for field in dataclasses.fields(left)
        )
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and np.array_equal(left, right)
    if isinstance(left, tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right


def over_the_wire(message):
    return type(message).FromString(message.SerializeToString())


def ints(max_size=20, columns=None):
    if columns:
        rows = st.lists(st.tuples(*[INT32] * columns), max_size=max_size)
        return rows.map(lambda values: np.array(values, np.int32).reshape(-1, columns))
    return st.lists(INT32, max_size=max_size).map(lambda values: np.array(values, np.int32))


sampling = st.builds(
    SamplingParams,
    n=st.integers(1, 100),
    best_of=st.none() | st.integers(100, 128),
    max_tokens=st.none() | st.integers(100, 2**31 - 1),
    min_tokens=st.integers(0, 100),
    temperature=st.floats(0, 2),
    top_p=UNIT,
    top_k=st.integers(-1, 2**31 - 1),
    min_p=st.floats(0, 1),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    repetition_penalty=st.floats(0.01, 10),
    logit_bias=st.dictionaries(INT32, st.floats(-100, 100), max_size=5),
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    stop=st.lists(st.text(min_size=1, max_size=8), max_size=4).map(tuple),
    stop_token_ids=st.lists(INT32, max_size=4).map(tuple),
    include_stop_str_in_output=st.booleans(),
    ignore_eos=st.booleans(),
    logprobs=st.none() | st.integers(0, 20),
    prompt_logprobs=st.none() | st.integers(0, 20),
    skip_special_tokens=st.booleans(),
)
structured = st.builds(
    SamplingParams,
    structured_output=st.builds(StructuredOutput, st.sampled_from(OutputKind), TEXT),
)
beams = st.builds(
    SamplingParams,
    n=st.integers(1, 4),
    max_tokens=st.integers(1, 100),
    beam_width=st.integers(4, 32),
    length_penalty=st.floats(-10, 10),
    early_stopping=st.sampled_from([True, False, "never"]),
)
params = sampling | structured | beams
requests = st.builds(
    Request,
    request_id=st.text(min_size=1, max_size=32),
    prompt_token_ids=st.lists(INT32, min_size=1, max_size=50).map(lambda ids: np.array(ids, np.int32)),
    params=params,
    seed=st.integers(-(2**63), 2**63 - 1),
    eos_token_ids=st.lists(INT32, max_size=3).map(tuple),
    priority=st.integers(-(2**31), 2**31 - 1),
    cache_salt=TEXT,
    adapter=TEXT,
    use_prefix_cache=st.booleans(),
    fork_of=TEXT,
    trace_parent=TEXT,
    timeout_seconds=st.none() | SECONDS,
    tenant=TEXT,
)
given_entries = st.builds(
    lambda logprob, top: TokenLogprobs(
        logprob, tuple(key for key, _ in top), tuple(value for _, value in top)
    ),
    FINITE,
    st.lists(st.tuples(INT32, FINITE), max_size=4),
)
logprob_entries = st.none() | given_entries
prompt_logprobs = st.builds(
    PromptLogprobs, st.integers(1, 2**31 - 1), st.lists(given_entries, min_size=1, max_size=3).map(tuple)
)


@st.composite
def new_sequences(draw):
    request = draw(requests)
    outputs = draw(ints(max_size=10))
    return NewSequence(
        row=draw(INT32),
        request=request,
        branch=draw(st.integers(0, 127)),
        max_tokens=draw(INT32),
        token_ids=np.concatenate([request.prompt_token_ids, outputs]),
        num_computed_tokens=draw(INT32),
    )


@st.composite
def plans(draw):
    rows = draw(ints(max_size=8))
    column = st.lists(INT32, min_size=len(rows), max_size=len(rows)).map(lambda v: np.array(v, np.int32))
    ones = st.just(np.ones(len(rows), np.int32))
    every_row = (rows, np.arange(len(rows), dtype=np.int32))
    some = draw(
        st.lists(st.tuples(INT32, INT32), max_size=8).map(lambda v: np.array(v, np.int32).reshape(-1, 2))
    )
    sample_rows, sample_indices = draw(st.sampled_from([every_row, (some[:, 0], some[:, 1])]))
    return StepPlan(
        step_id=draw(st.integers(1, 2**63)),
        epoch=draw(st.integers(1, 2**63)),
        released_rows=draw(ints()),
        swaps_out=draw(ints(columns=2)),
        swaps_in=draw(ints(columns=2)),
        new_sequences=tuple(draw(st.lists(new_sequences(), max_size=2))),
        beam_moves=draw(ints(columns=4)),
        block_updates=draw(ints(columns=3)),
        forks=draw(ints(columns=3)),
        block_copies=draw(ints(columns=2)),
        rows=rows,
        num_tokens=draw(ones | column),
        start_positions=draw(column),
        sample_rows=sample_rows,
        sample_indices=sample_indices,
    )


@st.composite
def results(draw):
    count = draw(st.integers(0, 8))
    tokens = draw(st.lists(st.integers(-1, 2**31 - 1), min_size=count, max_size=count))
    logprobs = draw(st.just([]) | st.lists(logprob_entries, min_size=count, max_size=count))
    row_errors = draw(st.lists(st.tuples(st.integers(0, count - 1), TEXT), max_size=2)) if count else []
    return StepResult(
        step_id=draw(st.integers(1, 2**63)),
        epoch=draw(st.integers(1, 2**63)),
        token_ids=np.array(tokens, np.int32),
        logprobs=tuple(logprobs),
        prompt_logprobs=tuple(draw(st.lists(st.tuples(INT32, prompt_logprobs), max_size=2))),
        row_errors=tuple(row_errors),
        step_seconds=draw(SECONDS),
        parts_seconds=draw(st.dictionaries(TEXT, SECONDS, max_size=3)),
    )


@st.composite
def deltas(draw):
    tokens = draw(st.lists(INT32, max_size=4))
    logprobs = draw(st.just([]) | st.lists(logprob_entries, min_size=len(tokens), max_size=len(tokens)))
    return OutputDelta(
        request_id=draw(TEXT),
        branch=draw(st.integers(0, 127)),
        offset=draw(INT32),
        token_ids=tuple(tokens),
        logprobs=tuple(logprobs),
        prompt_logprobs=draw(st.none() | prompt_logprobs),
        finish_reason=draw(st.none() | st.sampled_from(FinishReason)),
        request_finished=draw(st.booleans()),
        error=draw(st.none() | TEXT),
        error_name=draw(st.none() | TEXT),
        metrics=draw(
            st.none()
            | st.builds(
                RequestMetrics,
                cached_tokens=INT32,
                num_preemptions=INT32,
                queue_seconds=SECONDS,
                ttft_seconds=SECONDS,
                total_seconds=SECONDS,
                recomputed_tokens=INT32,
            )
        ),
        score=draw(st.none() | FINITE),
    )


models = st.builds(
    ModelInfo,
    name=TEXT,
    vocab_size=INT32,
    max_model_len=INT32,
    eos_token_ids=st.lists(INT32, max_size=3).map(tuple),
)
workers = st.builds(
    WorkerInfo,
    worker_id=st.text(min_size=1, max_size=20),
    model=models,
    device=TEXT,
    dtype=TEXT,
    block_size=st.integers(1, 64),
    num_blocks=st.integers(1, 2**31 - 1),
    num_host_blocks=INT32,
    max_num_seqs=st.integers(1, 4096),
    kv_bytes_per_block=st.integers(0, 2**62),
    prefill_tokens_per_second=SECONDS,
    decode_step_seconds=SECONDS,
    host_link_bytes_per_second=SECONDS,
)


class TestRoundTrips:
    @given(requests)
    def test_request(self, request_):
        assert same(codec.decode_request(over_the_wire(codec.encode_request(request_))), request_)

    @given(plans())
    @settings(max_examples=60)
    def test_plan(self, plan):
        assert same(codec.decode_plan(over_the_wire(codec.encode_plan(plan))), plan)

    @given(results())
    def test_result(self, result):
        assert same(codec.decode_result(over_the_wire(codec.encode_result(result))), result)

    @given(deltas())
    def test_delta(self, delta):
        sent = over_the_wire(codec.encode_outputs([delta, delta]))
        assert same([codec.decode_delta(message) for message in sent.deltas], [delta, delta])

    @given(workers)
    def test_worker_info(self, info):
        assert codec.decode_worker_info(over_the_wire(codec.encode_worker_info(info))) == info

    def test_logprobs_keep_infinities(self):
        entry = TokenLogprobs(-math.inf, (3,), (-math.inf,))
        assert codec.decode_logprobs(codec.encode_logprobs([entry, None])) == (entry, None)

    def test_what_no_peer_may_say(self):
        gap = codec.encode_prompt_logprobs(PromptLogprobs(1, (TokenLogprobs(-1.0),)))
        gap.logprobs.present = b"\1\0"
        early = common_pb2.PromptLogprobs(start=0, logprobs=codec.encode_logprobs([TokenLogprobs(-1.0)]))
        for message in (gap, early):
            with pytest.raises(errors.ProtocolError, match="prompt"):
                codec.decode_prompt_logprobs(message)
        with pytest.raises(errors.ProtocolError, match="kind"):
            codec.decode_structured_output(common_pb2.StructuredOutput(text="a"))

    def test_a_key_with_the_top_bit_set_keeps_its_64_bits(self):
        request = Request(
            request_id="a", prompt_token_ids=np.array([1], np.int32), params=SamplingParams(), seed=2**64 - 5
        )
        assert codec.decode_request(codec.encode_request(request)).seed == -5

    @pytest.mark.parametrize("name", sorted(errors._tree(errors.OctavoError)))
    def test_errors_keep_class_message_param_and_code(self, name):
        error = errors.by_name(name)("it is so", param="top_p")
        revived = codec.decode_error(over_the_wire(codec.encode_error(error)))
        assert type(revived) is type(error)
        assert (revived.message, revived.param, revived.code) == ("it is so", "top_p", error.code)

    def test_overload_keeps_its_retry_time(self):
        error = errors.OverloadedError("full", retry_after_seconds=2.5)
        assert codec.decode_error(codec.encode_error(error)).retry_after_seconds == 2.5


class TestDamage:
    def test_bytes_that_do_not_divide(self):
        message = codec.encode_plan(StepPlan(step_id=1, epoch=1))
        message.rows = b"12345"
        with pytest.raises(errors.ProtocolError, match="rows has 5 bytes"):
            codec.decode_plan(message)

    @pytest.mark.parametrize(
        "change",
        [
            {"start_positions": b""},
            {"num_tokens": bytes(4)},
            {"samples_rows": False, "sample_rows": bytes(4), "sample_indices": bytes(8)},
            {"block_updates": bytes(8)},
            {"block_copies": bytes(4)},
            {"swaps_out": bytes(4)},
            {"swaps_in": bytes(12)},
        ],
    )
    def test_columns_that_do_not_match(self, change):
        two = np.array([1, 2], np.int32)
        plan = StepPlan(step_id=1, epoch=1, rows=two, num_tokens=two, start_positions=two)
        message = codec.encode_plan(plan)
        for name, value in change.items():
            setattr(message, name, value)
        with pytest.raises(errors.ProtocolError):
            codec.decode_plan(message)

    @pytest.mark.parametrize("length", [0, 3])
    def test_a_prompt_longer_than_its_tokens(self, length):
        new = worker_pb2.NewSequence(token_ids=bytes(8), num_prompt_tokens=length)
        new.request.request_id = "a"
        with pytest.raises(errors.ProtocolError):
            codec.decode_plan(worker_pb2.StepPlan(new_sequences=[new]))

    def test_an_empty_request(self):
        with pytest.raises(errors.ProtocolError):
            codec.decode_request(common_pb2.Request())

    def test_impossible_params(self):
        request = common_pb2.Request(request_id="a", prompt_token_ids=bytes(4))
        with pytest.raises(errors.InvalidRequestError):
            codec.decode_request(request)

    @pytest.mark.parametrize(
        "change",
        [
            {"present": b"\x01"},
            {"present": b"\x02\x01"},
            {"top_counts": b"\xff\xff\xff\xff" * 2},
            {"top_ids": b""},
            {"top_logprobs": b""},
            {"logprobs": b""},
        ],
    )
    def test_logprobs_that_do_not_match(self, change):
        message = codec.encode_logprobs(
            [TokenLogprobs(-1.0, (1,), (-1.0,)), TokenLogprobs(-2.0, (2,), (-2.0,))]
        )
        for name, value in change.items():
            setattr(message, name, value)
        with pytest.raises(errors.ProtocolError):
            codec.decode_logprobs(message)

    def test_results_beside_the_point(self):
        result = StepResult(step_id=1, epoch=1, token_ids=np.array([5], np.int32))
        message = codec.encode_result(result)
        message.row_errors.add(sample_index=1, message="no such row")
        with pytest.raises(errors.ProtocolError):
            codec.decode_result(message)

    @given(plans(), st.data())
    @settings(max_examples=100)
    def test_any_damage_gives_an_error_type(self, plan, data):
        raw = bytearray(codec.encode_plan(plan).SerializeToString())
        for _ in range(data.draw(st.integers(1, 4))):
            position = data.draw(st.integers(0, len(raw) - 1))
            raw[position] = data.draw(st.integers(0, 255))
        raw = raw[: data.draw(st.integers(0, len(raw)))]
        try:
            codec.decode_plan(worker_pb2.StepPlan.FromString(bytes(raw)))
        except (DecodeError, errors.ProtocolError, errors.InvalidRequestError):
            pass

    @given(st.binary(max_size=200))
    def test_any_bytes_give_an_error_type(self, raw):
        for message_type, decode in (
            (worker_pb2.StepResult, codec.decode_result),
            (coordinator_pb2.OutputDelta, codec.decode_delta),
            (common_pb2.Request, codec.decode_request),
        ):
            try:
                decode(message_type.FromString(raw))
            except (DecodeError, errors.ProtocolError, errors.InvalidRequestError):
                pass


class TestSizes:
    """Counts, not timings: what a step costs on the wire."""

    def steady(self, context: int, rows: int = 64) -> int:
        every = np.arange(rows, dtype=np.int32)
        plan = StepPlan(
            step_id=1000,
            epoch=1,
            rows=every,
            num_tokens=np.ones(rows, np.int32),
            start_positions=np.full(rows, context, np.int32),
            sample_rows=every,
            sample_indices=every,
        )
        return codec.encode_plan(plan).ByteSize()

    def test_a_steady_decode_does_not_grow_with_context(self):
        assert self.steady(10) == self.steady(8_000) == self.steady(1_000_000)

    def test_a_steady_decode_costs_8_bytes_a_row(self):
        assert self.steady(100, rows=256) - self.steady(100, rows=128) <= 128 * 8 + 4

    def test_a_swap_costs_8_bytes_a_block_and_a_plan_without_one_nothing(self):
        def size(count):
            pairs = np.full((count, 2), 7, np.int32)
            return codec.encode_plan(StepPlan(step_id=1, epoch=1, swaps_out=pairs, swaps_in=pairs)).ByteSize()

        assert size(0) == codec.encode_plan(StepPlan(step_id=1, epoch=1)).ByteSize()
        assert size(15) - size(5) == 2 * 8 * 10

    def test_a_prompt_travels_once(self):
        def size(length):
            prompt = np.arange(length, dtype=np.int32)
            request = Request(request_id="a", prompt_token_ids=prompt, params=SamplingParams(), seed=1)
            new = NewSequence(
                row=0, request=request, branch=0, max_tokens=16, token_ids=prompt, num_computed_tokens=0
            )
            return codec.encode_plan(StepPlan(step_id=1, epoch=1, new_sequences=(new,))).ByteSize()

        assert 0 <= size(6_000) - size(2_000) - 4 * 4_000 <= 8
