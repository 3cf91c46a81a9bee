"""What reaches the backend, and what is refused before it does (cases D08, D14 to D16)."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import pytest

from octavo.cluster.openai import calls
from octavo.protos.types import Request

from .conftest import HELLO, MODEL, Api, ScriptedBackend, error_of, events


def test_d14_empty_prompts_are_refused_and_the_server_lives(api: Api, backend: ScriptedBackend) -> None:
    prompts: list[Any] = ["", [""], [], [[]], ["ok", ""], [[1], []]]
    for prompt in prompts:
        error_of(api.complete(prompt=prompt), 400, "prompt")
    error_of(api.chat(messages=[]), 400, "messages")
    assert backend.submitted == []
    assert api.complete().json()["choices"][0]["text"] == "Hello world!"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": {"49152": 5}}, "logit_bias"),
        ({"logit_bias": {"-1": 5}}, "logit_bias"),
        ({"logit_bias": {"abc": 1}}, "logit_bias"),
        ({"logit_bias": {"5_0": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 1000}}, "logit_bias"),
        ({"logit_bias": {"5": True}}, "logit_bias"),
        ({"logit_bias": [5]}, "logit_bias"),
        ({"stop_token_ids": [49152]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": 5}, "stop_token_ids"),
        ({"prompt": [49152]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [[1], "x"]}, "prompt"),
        ({"prompt": [1, [1]]}, "prompt"),
        ({"prompt": [10**30]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": 5}, "prompt"),
    ],
    ids=str,
)
def test_d15_ids_outside_the_vocabulary(
    api: Api, backend: ScriptedBackend, fields: dict[str, Any], param: str
) -> None:
    error_of(api.complete(**fields), 400, param)
    assert backend.submitted == []


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e400"])
def test_d15_d16_numbers_that_json_does_not_have(api: Api, text: str) -> None:
    for field in (f'"temperature":{text}', f'"top_p":{text}', '"logit_bias":{"5":' + text + "}"):
        error_of(api.post("/v1/completions", '{"prompt":"x",' + field + "}"), 400)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 999999}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": -1}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -5}, "top_k"),
        ({"top_k": 1.0}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"n": 0}, "n"),
        ({"n": 10**6}, "n"),
        ({"n": 2, "best_of": 1}, "best_of"),
        ({"best_of": 129}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"beam_width": 0}, "beam_width"),
        ({"beam_width": 2.0}, "beam_width"),
        ({"beam_width": 2, "n": 3}, "n"),
        ({"beam_width": 2, "best_of": 2}, "best_of"),
        ({"beam_width": 2, "temperature": 0.5}, "temperature"),
        ({"beam_width": 2, "top_p": 0.5}, "top_p"),
        ({"beam_width": 2, "stop": "x"}, "stop"),
        ({"beam_width": 2, "length_penalty": "1"}, "length_penalty"),
        ({"beam_width": 2, "early_stopping": "soon"}, "early_stopping"),
        ({"length_penalty": 0.5}, "length_penalty"),
        ({"early_stopping": True}, "early_stopping"),
        ({"use_prefix_cache": "no"}, "use_prefix_cache"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "16"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 16.0}, "max_tokens"),
        ({"max_tokens": 2**40}, "max_tokens"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"seed": 2**70}, "seed"),
        ({"seed": "1"}, "seed"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": 5e-324}, "repetition_penalty"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": ["a", 1]}, "stop"),
        ({"stop": list("abcde")}, "stop"),
        ({"stop": 5}, "stop"),
        ({"stream": "true"}, "stream"),
        ({"stream": 1}, "stream"),
        ({"echo": "yes"}, "echo"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"user": 5}, "user"),
        ({"priority": "high"}, "priority"),
        ({"timeout": 0}, "timeout"),
        ({"timeout": 1e9}, "timeout"),
        ({"timeout": "5"}, "timeout"),
        ({"cache_salt": 1}, "cache_salt"),
        ({"model": 5}, "model"),
        ({"stream_options": []}, "stream_options"),
    ],
    ids=str,
)
def test_d16_values_out_of_range_or_of_another_type(
    api: Api, backend: ScriptedBackend, fields: dict[str, Any], param: str
) -> None:
    error_of(api.complete(**fields), 400, param)
    assert backend.submitted == []
    assert api.complete().status_code == 200


def test_d16_tiny_temperatures_are_greedy(api: Api, backend: ScriptedBackend) -> None:
    for temperature in (1e-4, 1e-300, 0):
        assert api.complete(temperature=temperature).status_code == 200
        assert backend.submitted[-1].params.greedy


OPTIONAL = [
    "n",
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "stop",
    "stop_token_ids",
    "min_tokens",
    "ignore_eos",
    "include_stop_str_in_output",
    "logprobs",
    "stream",
    "stream_options",
    "cache_salt",
    "priority",
    "user",
    "echo",
    "return_token_ids",
    "best_of",
    "beam_width",
    "length_penalty",
    "early_stopping",
    "use_prefix_cache",
    "suffix",
    "model",
    "response_format",
    "guided_json",
    "use_beam_search",
    "skip_special_tokens",
    "add_special_tokens",
]


def test_d16_null_is_the_same_as_left_out(api: Api, backend: ScriptedBackend) -> None:
    with_nulls = api.complete(**dict.fromkeys(OPTIONAL), seed=7)
    without = api.complete(seed=7)
    assert with_nulls.json()["choices"] == without.json()["choices"]
    assert "x-octavo-warning" not in with_nulls.headers
    first, second = backend.submitted
    assert first.params == second.params
    assert first.params.max_tokens == 16
    assert (first.seed, second.seed) == (7, 7)


def test_d16_null_is_the_same_as_left_out_in_chats(api: Api, backend: ScriptedBackend) -> None:
    names = [*OPTIONAL, "max_completion_tokens", "top_logprobs", "tools", "tool_choice", "functions", "audio"]
    assert api.chat(**dict.fromkeys(names)).status_code == 200
    assert backend.submitted[0].params.max_tokens is None


def test_every_field_arrives(api: Api, backend: ScriptedBackend) -> None:
    fields = {
        "n": 2,
        "max_tokens": 5,
        "min_tokens": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.1,
        "seed": -3,
        "stop_token_ids": [9],
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "logprobs": 2,
        "skip_special_tokens": False,
    }
    response = api.complete(
        **fields,
        logit_bias={"64": -100},
        stop="x",
        cache_salt="s",
        priority=-2,
        timeout=5,
        user="u",
        best_of=2,
    )
    assert response.status_code == 200, response.text
    (request,) = backend.submitted
    for name, value in fields.items():
        got = getattr(request.params, name)
        assert got == (tuple(value) if isinstance(value, list) else value), name
    assert request.params.logit_bias == {64: -100.0}
    assert request.params.stop == ("x",)
    assert (request.cache_salt, request.priority) == ("s", -2)
    # What is left of the call's five seconds.
    assert 4.0 < (request.timeout_seconds or 0.0) <= 5.0
    assert request.tenant == ""
    assert request.eos_token_ids == ()
    assert request.seed == 2**64 - 3, "a 64-bit key, whatever its sign"
    assert request.request_id.startswith("cmpl-")


def test_d08_a_missing_seed_is_drawn_here(api: Api, backend: ScriptedBackend) -> None:
    for _ in range(4):
        api.complete(n=2)
    seeds = {request.seed for request in backend.submitted}
    assert len(seeds) == 4
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert all(request.params.seed is None for request in backend.submitted)


def test_prompt_forms_and_the_order_of_choices(api: Api, backend: ScriptedBackend) -> None:
    def answer(request: Request, branch: int) -> list[int]:
        return [int(request.prompt_token_ids[-1]), 1000 + branch, 2]

    backend.answer = answer
    tokenizer = backend.tokenizer
    a, b = tokenizer.encode("one")[0], tokenizer.encode("two")[0]
    prompts: list[Any] = [["one", "two"], [[a], [b]]]
    for prompt in prompts:
        reply = api.complete(prompt=prompt, n=2).json()
        assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
        assert [choice["text"] for choice in reply["choices"]] == [
            tokenizer.decode([token, 1000 + branch]) for token in (a, b) for branch in (0, 1)
        ]
        assert reply["usage"]["prompt_tokens"] == 2
        assert reply["usage"]["completion_tokens"] == 12
    assert api.complete(prompt=[a, b]).json()["usage"]["prompt_tokens"] == 2
    ids = [request.request_id for request in backend.submitted]
    assert len(set(ids)) == len(ids)


def test_lengths_are_checked_with_the_numbers(api: Api, backend: ScriptedBackend) -> None:
    exact = api.complete(prompt=[5] * 8000, max_tokens=192, ignore_eos=True)
    assert exact.json()["usage"]["total_tokens"] == 8192
    error = error_of(api.complete(prompt=[5] * 8000, max_tokens=193), 400, "max_tokens")
    assert error["code"] == "context_length_exceeded"
    assert "8193" in error["message"]
    assert "8192" in error["message"]
    error = error_of(api.complete(prompt=[5] * 8192), 400, "prompt")
    assert "8192" in error["message"]
    error = error_of(api.chat(max_completion_tokens=8190), 400)
    assert error["code"] == "context_length_exceeded"
    # A default is cut to what is left; only a wish is refused.
    assert api.complete(prompt=[5] * 8189, ignore_eos=True).json()["usage"]["completion_tokens"] == 3
    assert backend.submitted[-1].params.max_tokens == 3


def test_megabytes_of_text_are_refused_before_they_are_tokenised(
    api: Api, backend: ScriptedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend.tokenizer, "encode", lambda *_: pytest.fail("tokenised"))
    text = "word " * (7 * 2**20 // 5)
    error_of(api.complete(prompt=text), 400, "prompt")
    error_of(api.chat(messages=[{"role": "user", "content": text}]), 400, "messages")


def test_too_many_prompts_or_choices(make_api: Callable[..., Api]) -> None:
    api = make_api(prompts_per_request_max=3, choices_per_request_max=4, messages_per_request_max=2)
    assert api.complete(prompt=["a", "b", "c"]).status_code == 200
    error_of(api.complete(prompt=["a"] * 4), 400, "prompt")
    error_of(api.complete(prompt=["a"] * 3, n=2), 400, "n")
    error_of(api.chat(messages=[{"role": "user", "content": "x"}] * 3), 400, "messages")


UNSUPPORTED: list[tuple[str, Any]] = [
    ("guided_decoding_backend", "xgrammar"),
    ("guided_whitespace_pattern", " "),
    ("use_beam_search", True),
    ("truncate_prompt_tokens", 5),
    ("bad_words", ["x"]),
]


@pytest.mark.parametrize(("name", "value"), UNSUPPORTED)
def test_what_we_know_and_do_not_serve_is_refused_by_name(api: Api, name: str, value: Any) -> None:
    for call in (api.complete, api.chat):
        error = error_of(call(**{name: value}), 400, name)
        assert error["code"] == "unsupported_parameter"


def test_what_only_one_route_has_is_refused_there(api: Api) -> None:
    for name, value in (
        ("functions", [{"name": "f"}]),
        ("audio", {"voice": "x"}),
        ("modalities", ["text", "audio"]),
        ("echo", True),
    ):
        error_of(api.chat(**{name: value}), 400, name)
    error_of(api.complete(suffix="end"), 400, "suffix")


def test_values_that_ask_for_nothing_are_let_through(api: Api) -> None:
    harmless = {"response_format": {"type": "text"}, "use_beam_search": False, "length_penalty": 1.0}
    assert api.complete(**harmless, suffix="", best_of=1).status_code == 200
    assert (
        api.chat(**harmless, tools=[], tool_choice="auto", modalities=["text"], metadata={}).status_code
        == 200
    )


def test_unknown_fields_are_ignored_and_named(api: Api) -> None:
    response = api.complete(**{"foo": 1, "bar": None, "bad\r\nname": 2, "é": 3})
    assert response.status_code == 200
    assert response.headers["x-octavo-warning"] == "unknown fields ignored: ?, foo, ?"
    assert "x-octavo-warning" not in api.complete(user="me").headers
    many = api.complete(**{f"field{i}": i for i in range(200)})
    assert len(many.headers["x-octavo-warning"].split(", ")) == 20
    within = api.complete(stream=True, stream_options={"include_usage": True, "odd": 1})
    assert within.headers["x-octavo-warning"] == "unknown fields ignored: stream_options.odd"
    helper = api.post("/tokenize", {"prompt": "Hi", "odd": 1})
    assert helper.headers["x-octavo-warning"] == "unknown fields ignored: odd"


def test_cors(api: Api, make_api: Callable[..., Api]) -> None:
    asked = {"origin": "https://page.example", "access-control-request-method": "POST"}
    assert "access-control-allow-origin" not in api.get("/health", headers=asked).headers
    shared = make_api(cors_origins=("https://page.example",), api_keys=("key",))
    preflight = shared.send("OPTIONS", "/v1/completions", headers=asked)
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == "https://page.example"
    refused = shared.send_complete({"origin": "https://page.example"})
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "https://page.example"
    assert "x-octavo-request-id" in refused.headers["access-control-expose-headers"]
    other = shared.send("OPTIONS", "/v1/completions", headers={**asked, "origin": "https://other.example"})
    assert other.status_code == 400
    assert "access-control-allow-origin" not in other.headers


def test_max_tokens_by_either_name(api: Api, backend: ScriptedBackend) -> None:
    assert api.chat(max_tokens=2).json()["usage"]["completion_tokens"] == 2
    assert api.chat(max_completion_tokens=2).json()["choices"][0]["finish_reason"] == "length"
    assert api.chat(max_completion_tokens=2, max_tokens=2).status_code == 200
    error_of(api.chat(max_completion_tokens=2, max_tokens=3), 400, "max_tokens")
    error = error_of(api.chat(max_completion_tokens=-1), 400, "max_completion_tokens")
    assert error["message"].startswith("max_completion_tokens")


def test_echo_and_ids(api: Api, backend: ScriptedBackend) -> None:
    assert api.complete(prompt="Say: ", echo=True).json()["choices"][0]["text"] == "Say: Hello world!"
    ids = backend.tokenizer.encode("Say: ")
    reply = api.complete(prompt=ids, echo=True, return_token_ids=True).json()
    (choice,) = reply["choices"]
    assert choice["text"] == "Say: Hello world!"
    assert choice["token_ids"] == HELLO
    assert choice["prompt_token_ids"] == reply["prompt_token_ids"] == ids
    assert reply["metrics"]["cached_tokens"] == 3


def test_echo_with_logprobs_tells_the_prompts_too(api: Api, backend: ScriptedBackend) -> None:
    """What lm-eval scores with: the prompt's own tokens, each with the likeliest in its place."""
    ids = backend.tokenizer.encode("Say: hello")
    text_of = backend.tokenizer.token_text
    whole = api.complete(prompt=ids, echo=True, logprobs=1, max_tokens=1, return_token_ids=True).json()
    (choice,) = whole["choices"]
    block = choice["logprobs"]
    assert block["tokens"] == [*map(text_of, ids), "Hello"]
    assert block["token_logprobs"] == [None, *(-token / 1000 for token in ids[1:]), -0.5]
    assert block["top_logprobs"][0] is None
    assert block["top_logprobs"][1] == {text_of(100): -0.5, text_of(ids[1]): -ids[1] / 1000}
    assert len(block["top_token_ids"]) == len(ids) + 1
    offsets = block["text_offset"]
    assert [choice["text"][start:end] for start, end in itertools.pairwise(offsets)] == (block["tokens"][:-1])
    assert backend.submitted[-1].params.prompt_logprobs == 1
    fields: dict[str, Any] = {"prompt": ids, "echo": True, "logprobs": 1, "max_tokens": 1}
    parts = [chunk["choices"][0] for chunk in events(api.complete(**fields, stream=True))[:-1]]
    told = [part["logprobs"] for part in parts if part["logprobs"]]
    assert [token for part in told for token in part["tokens"]] == block["tokens"]
    assert [number for part in told for number in part["token_logprobs"]] == block["token_logprobs"]


def test_the_prompt_alone(api: Api, backend: ScriptedBackend) -> None:
    """`max_tokens` 0 with `echo`, as OpenAI's old completions had it."""
    for stream in (False, True):
        response = api.complete(
            prompt=["Say: hello", "x"], n=2, echo=True, logprobs=0, max_tokens=0, stream=stream
        )
        if stream:
            choices = [chunk["choices"][0] for chunk in events(response)[:-1]]
        else:
            choices = response.json()["choices"]
            assert response.json()["usage"]["completion_tokens"] == 0
        assert [choice["text"] for choice in choices] == ["Say: hello"] * 2 + ["x"] * 2
        assert [choice["finish_reason"] for choice in choices] == ["length"] * 4
        assert "".join(choices[0]["logprobs"]["tokens"]) == "Say: hello"
        assert choices[3]["logprobs"]["token_logprobs"] == [None]
    error_of(api.complete(max_tokens=0), 400, "max_tokens")
    error_of(api.complete(echo=True, max_tokens=False), 400, "max_tokens")
    assert api.complete(prompt="Say: ", echo=True, max_tokens=0).json()["choices"][0]["text"] == "Say: "


def test_prompt_logprobs_in_vllms_shape(api: Api, backend: ScriptedBackend) -> None:
    ids = backend.tokenizer.encode("Say: hello")
    (choice,) = api.complete(prompt=ids, prompt_logprobs=1).json()["choices"]
    told = choice["prompt_logprobs"]
    assert len(told) == len(ids)
    assert told[0] is None
    assert told[1] == {
        "100": {"logprob": -0.5, "rank": 1, "decoded_token": backend.tokenizer.token_text(100)},
        str(ids[1]): {
            "logprob": -ids[1] / 1000,
            "rank": None,
            "decoded_token": backend.tokenizer.token_text(ids[1]),
        },
    }
    assert choice["logprobs"] is None
    reply = api.chat(prompt_logprobs=0).json()
    assert len(reply["prompt_logprobs"]) == reply["usage"]["prompt_tokens"]
    assert "prompt_logprobs" not in reply["choices"][0]
    error_of(api.complete(prompt_logprobs=1, stream=True), 400, "prompt_logprobs")
    error_of(api.complete(prompt_logprobs=21), 400, "prompt_logprobs")
    error_of(api.post("/v1/responses", {"input": "x", "prompt_logprobs": 1}), 400, "prompt_logprobs")


def test_usage_and_shape_of_a_completion(api: Api) -> None:
    reply = api.complete().json()
    assert reply["object"] == "text_completion"
    assert reply["model"] == MODEL
    assert reply["choices"] == [
        {"index": 0, "text": "Hello world!", "logprobs": None, "finish_reason": "stop"}
    ]
    assert reply["usage"] == {
        "prompt_tokens": 1,
        "completion_tokens": 4,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 3},
    }


def test_completion_logprobs(api: Api, backend: ScriptedBackend) -> None:
    (choice,) = api.complete(logprobs=2, echo=False).json()["choices"]
    block = choice["logprobs"]
    assert block["tokens"] == ["Hello", " world", "!", "<|im_end|>"]
    assert block["token_logprobs"] == [-0.5] * 4
    assert block["text_offset"] == [0, 5, 11, 12]
    assert block["top_logprobs"][0] == {"Hello": -0.5, backend.tokenizer.token_text(100): -9999.0}
    (choice,) = api.complete(logprobs=0).json()["choices"]
    assert choice["logprobs"]["top_logprobs"][0] == {"Hello": -0.5}
    backend.answer = lambda request, branch: [10813, 117, 232, 2]
    block = api.complete(logprobs=0).json()["choices"][0]["logprobs"]
    assert block["tokens"][:3] == ["bytes:\\xf0\\x9f", "bytes:\\xa7", "bytes:\\x8e"]
    assert block["text_offset"] == [0, 0, 0, 1]


def test_tokenize_and_detokenize(api: Api, backend: ScriptedBackend) -> None:
    reply = api.post("/tokenize", {"prompt": "Hello world!", "return_token_strs": True}).json()
    assert reply == {
        "count": 3,
        "max_model_len": 8192,
        "tokens": HELLO[:3],
        "token_strs": ["Hello", " world", "!"],
    }
    assert api.post("/detokenize", {"tokens": HELLO[:3]}).json() == {"prompt": "Hello world!"}
    chat = api.post("/tokenize", {"messages": [{"role": "user", "content": "Hi"}]}).json()
    assert chat["count"] == api.chat().json()["usage"]["prompt_tokens"]
    assert api.post("/tokenize", {"prompt": ""}).json()["count"] == 0
    error_of(api.post("/tokenize", {}), 400)
    error_of(api.post("/tokenize", {"prompt": 5}), 400, "prompt")
    error_of(api.post("/detokenize", {"tokens": "x"}), 400, "tokens")
    error_of(api.post("/detokenize", {"tokens": [49152]}), 400, "tokens")


def test_a_requests_timeline_goes_by_its_internal_id(api: Api) -> None:
    reply = api.complete()
    told = api.get(f"/v1/requests/{reply.headers['x-octavo-request-id']}")
    assert told.status_code == 200
    assert told.json()["object"] == "request.timeline"
    error_of(api.get("/v1/requests/cmpl-nobody"), 404, "request_id")


def test_a_timeout_counts_from_the_calls_arrival(
    api: Api, backend: ScriptedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What tokenising takes of it, others' prompts before this one included, is gone."""
    prompt_of = calls.chat_prompt

    async def slow(*arguments: Any) -> Any:
        await asyncio.sleep(0.2)
        return await prompt_of(*arguments)

    monkeypatch.setattr(calls, "chat_prompt", slow)
    assert error_of(api.chat(timeout=0.1), 504)["code"] == "deadline_exceeded"
    assert backend.submitted == []
    assert api.chat(timeout=30).status_code == 200
    assert 25 < (backend.submitted[0].timeout_seconds or 0.0) <= 29.8
