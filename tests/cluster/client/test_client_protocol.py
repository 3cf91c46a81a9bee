"""The pure half of the client: bodies, replies, waits."""

from __future__ import annotations

from dataclasses import fields

import orjson
import pytest

from octavo.cluster import client_protocol as protocol
from octavo.protos import errors
from octavo.protos.structured_output import StructuredOutput
from octavo.protos.types import SamplingParams, TokenLogprobs

CHAT = [{"role": "user", "content": "hi"}]

DIFFERENT = {
    "n": 2,
    "max_tokens": 5,
    "min_tokens": 1,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 4,
    "min_p": 0.1,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.25,
    "repetition_penalty": 1.1,
    "logit_bias": {5: 1.0},
    "seed": 3,
    "stop": ("a",),
    "stop_token_ids": (9,),
    "include_stop_str_in_output": True,
    "ignore_eos": True,
    "logprobs": 2,
    "prompt_logprobs": 3,
    "skip_special_tokens": False,
    "best_of": 3,
}
BEAMS = {"n": 2, "beam_width": 4, "length_penalty": 0.5, "early_stopping": "never"}


def test_every_sampling_parameter_travels():
    assert {*DIFFERENT, *BEAMS, "structured_output"} == {spec.name for spec in fields(SamplingParams)}
    beams = protocol.build_call("p", SamplingParams(**BEAMS), model="m").body
    assert {name: beams[name] for name in BEAMS} == BEAMS
    body = protocol.build_call("p", SamplingParams(**DIFFERENT), model="m").body
    sent = orjson.loads(orjson.dumps(body))
    assert {name: sent[name] for name in DIFFERENT} == {
        **DIFFERENT,
        "logit_bias": {"5": 1.0},
        "stop": ["a"],
        "stop_token_ids": [9],
    }


@pytest.mark.parametrize(
    ("wanted", "sent"),
    [
        (StructuredOutput.json_schema({"b": 1, "a": 2}), {"json": {"b": 1, "a": 2}}),
        (StructuredOutput.json_object(), {"json_object": True}),
        (StructuredOutput.regex("a+"), {"regex": "a+"}),
        (StructuredOutput.choice(["a", "b"]), {"choice": ["a", "b"]}),
        (StructuredOutput.grammar("root ::= x"), {"grammar": "root ::= x"}),
    ],
)
def test_structured_output_travels_as_vllm_has_it(wanted, sent):
    body = protocol.build_call("p", SamplingParams(structured_output=wanted), model="m").body
    assert body["structured_outputs"] == sent


@pytest.mark.parametrize("in_choice", [True, False])
def test_log_probabilities_of_a_prompt_are_read(in_choice):
    told = [
        None,
        {"7": {"logprob": -0.5, "rank": 1}, "5": {"logprob": -2.0, "rank": None}},
        {"6": {"logprob": -1.0, "rank": 2}, "9": {"logprob": -0.25, "rank": 1}},
    ]
    choice = {"index": 0, "text": "a", "prompt_token_ids": [4, 5, 6]}
    reply = {"id": "1", "choices": [choice]}
    (choice if in_choice else reply)["prompt_logprobs"] = told
    assert protocol.parse_output("p", reply, seconds=1.0).prompt_logprobs == (
        None,
        TokenLogprobs(-2.0, (7,), (-0.5,)),
        TokenLogprobs(-1.0, (9, 6), (-0.25, -1.0)),
    )


def test_defaults_do_not_travel_unless_openais_differ():
    body = protocol.build_call("p", SamplingParams(), model="m").body
    assert body == {
        "model": "m",
        "prompt": "p",
        "temperature": 1.0,
        "max_tokens": 16,
        "return_token_ids": True,
    }


def test_what_concerns_the_prefix_cache_travels_when_it_is_said():
    body = protocol.build_call("p", SamplingParams(), model="m", cache_salt="a", use_prefix_cache=False).body
    assert (body["cache_salt"], body["use_prefix_cache"]) == ("a", False)


def test_the_score_of_a_beam_is_read():
    reply = {"id": "x", "choices": [{"index": 0, "text": "a", "score": -0.5}, {"index": 1, "text": "b"}]}
    found = protocol.parse_output("p", reply, seconds=1.0)
    assert [output.score for output in found.outputs] == [-0.5, None]


def test_chat_asks_for_logprobs_in_its_own_way():
    body = protocol.build_call(CHAT, SamplingParams(logprobs=2), model="m").body
    assert (body["logprobs"], body["top_logprobs"]) == (True, 2)


@pytest.mark.parametrize("shape", ["chat", "completion"])
def test_logprobs_of_both_shapes(shape):
    if shape == "chat":
        block = {
            "content": [
                {"token": "a", "logprob": -0.5, "top_logprobs": [{"logprob": -0.5}, {"logprob": -1.5}]},
                {"token": "b", "logprob": -0.25, "top_logprobs": []},
            ]
        }
        choice = {"index": 0, "message": {"content": "ab"}, "logprobs": block}
    else:
        block = {"token_logprobs": [-0.5, -0.25], "top_logprobs": [{"a": -0.5, "c": -1.5}, {}]}
        choice = {"index": 0, "text": "ab", "logprobs": block}
    out = protocol.parse_output("p", {"id": "1", "choices": [choice]}, seconds=2.0)
    first, second = out.outputs[0].logprobs
    assert (first.logprob, first.top_logprobs, second.logprob) == (-0.5, (-0.5, -1.5), -0.25)
    assert out.outputs[0].cumulative_logprob == -0.75
    assert out.metrics.total_seconds == 2.0


def test_the_servers_own_timings_win():
    reply = {
        "id": "1",
        "choices": [{"index": 0, "text": "a"}],
        "metrics": {"ttft_seconds": 0.5, "total_seconds": 1.5, "num_preemptions": 2, "of_the_future": 1},
    }
    metrics = protocol.parse_output("p", reply, seconds=9.0).metrics
    assert (metrics.ttft_seconds, metrics.total_seconds, metrics.num_preemptions) == (0.5, 1.5, 2)


def test_waits_double_up_to_a_maximum_and_never_overflow():
    waits = [protocol.backoff_seconds(attempt, None, 0.0) for attempt in (1, 2, 3, 7, 100_000)]
    assert waits == [0.5, 1.0, 2.0, 20.0, 20.0]
    assert protocol.backoff_seconds(1, None, 0.999) > 0.25
    assert protocol.backoff_seconds(1, 30.0, 0.5) >= 30.0
    assert protocol.backoff_seconds(1, 1e9, 0.5) is None


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (None, None),
        ("3", 3.0),
        ("0.5", 0.5),
        ("-1", 0.0),
        ("nan", None),
        ("soon", None),
        ("Thu, 01 Jan 1970 00:01:40 GMT", 40.0),
        ("Thu, 01 Jan 1970 00:00:01 GMT", 0.0),
    ],
)
def test_retry_after_as_seconds_or_date(value, seconds):
    assert protocol.parse_retry_after(value, now=60.0) == seconds


def test_an_endless_event_is_refused(monkeypatch):
    monkeypatch.setattr(protocol, "MAX_EVENT_BYTES", 100)
    decoder = protocol.EventDecoder()
    assert list(decoder.feed(b"data: " + b"x" * 90)) == []
    with pytest.raises(errors.RequestFailedError, match="longer than"):
        list(decoder.feed(b"x" * 10))
