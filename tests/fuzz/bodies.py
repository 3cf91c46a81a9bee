"""Request bodies that are nearly right: valid ones, each damaged in one to three places, the same for the same seed."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

Path = tuple[Any, ...]

CHAT: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Count to three."}]},
    ],
    "max_tokens": 3,
    "temperature": 0.7,
    "logprobs": True,
    "top_logprobs": 2,
    "stop": ["\n\n"],
    "seed": 7,
}
VALID: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", {**CHAT, "stream": True, "stream_options": {"include_usage": True}, "n": 2}),
    (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "Weather?"}],
            "max_tokens": 4,
            "tools": [
                {
                    "type": "function",
                    "function": {
                        "name": "weather",
                        "parameters": {"type": "object", "properties": {"city": {}}},
                    },
                }
            ],
            "tool_choice": "auto",
        },
    ),
    (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "Hi"}],
            "max_tokens": 4,
            "response_format": {
                "type": "json_schema",
                "json_schema": {
                    "name": "a",
                    "schema": {"type": "object", "properties": {"b": {"type": "integer"}}},
                },
            },
        },
    ),
    (
        "/v1/completions",
        {
            "prompt": ["Once upon", "A time"],
            "max_tokens": 3,
            "n": 2,
            "best_of": 3,
            "logprobs": 2,
            "logit_bias": {"64": 1.5},
            "top_k": 5,
            "min_p": 0.05,
            "presence_penalty": 0.1,
            "stop_token_ids": [5],
        },
    ),
    (
        "/v1/completions",
        {"prompt": [64, 65, 66], "max_tokens": 4, "stream": True, "echo": True, "ignore_eos": True},
    ),
    (
        "/v1/completions",
        {"prompt": "Hi", "max_tokens": 3, "beam_width": 2, "length_penalty": 0.5, "temperature": 0},
    ),
    (
        "/v1/responses",
        {"input": [{"role": "user", "content": "Hi"}], "instructions": "Be brief.", "max_output_tokens": 3},
    ),
    (
        "/v1/responses",
        {"input": "Hi", "max_output_tokens": 3, "stream": True, "text": {"format": {"type": "text"}}},
    ),
    ("/v1/fork", {"request_id": "cmpl-none", "branch": 0, "max_tokens": 3}),
    ("/tokenize", {"prompt": "Hello there", "add_special_tokens": False, "return_token_strs": True}),
    ("/tokenize", {"messages": [{"role": "user", "content": "Hi"}], "add_generation_prompt": True}),
    ("/detokenize", {"tokens": [64, 65], "skip_special_tokens": True}),
    (
        "/v1/batches",
        {"input_file_id": "file-none", "endpoint": "/v1/completions", "completion_window": "24h"},
    ),
)
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2**31, 2**53 + 1, 10**23, -(2**70), 0.5, -0.0, 1e-300, 1e308),
    *(float("nan"), float("inf"), float("-inf")),
    *("", " ", "a", "16", "null", "\x00", "\ud800", "\U0001f9ce" * 20, "x" * 5000, "../../etc/passwd"),
    *([], {}, [[]], [{}], [None], [1, "x"], {"a": {"b": {}}}, {"": 1}, [[1], [2]], [0] * 300),
    *("{{7*7}}", "<|im_end|>", "data: [DONE]\n\n", "\r\nx: y", "%s%n"),
)
"""Values that have broken servers."""
FIELDS = (
    *(
        "n",
        "best_of",
        "beam_width",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "max_tokens",
        "min_tokens",
        "stop",
    ),
    *(
        "seed",
        "logprobs",
        "top_logprobs",
        "logit_bias",
        "stream",
        "stream_options",
        "priority",
        "cache_salt",
        "echo",
    ),
    *(
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "stop_token_ids",
        "ignore_eos",
        "suffix",
        "user",
    ),
    *(
        "tools",
        "tool_choice",
        "response_format",
        "guided_regex",
        "guided_choice",
        "structured_outputs",
        "metadata",
    ),
    *(
        "prompt_logprobs",
        "truncate_prompt_tokens",
        "return_token_ids",
        "chat_template_kwargs",
        "use_prefix_cache",
    ),
    *(
        "max_completion_tokens",
        "include_stop_str_in_output",
        "skip_special_tokens",
        "model",
        "reasoning",
        "store",
    ),
)
"""Added to bodies that lack them."""


def mutated(seed: int, count: int) -> Iterator[tuple[str, bytes]]:
    """(path, body) of each call."""
    chance = random.Random(seed)
    for _ in range(count):
        path, body = chance.choice(VALID)
        if chance.random() < 0.05:
            yield path, _not_quite_json(chance, body)
            continue
        value: Any = copy.deepcopy(body)
        for _ in range(chance.choices((1, 2, 3), (6, 3, 1))[0]):
            value = _damaged(chance, value)
        yield path, _encoded(chance, value)


def _places(value: Any, at: Path = ()) -> Iterator[Path]:
    yield at
    if isinstance(value, dict):
        for key in value:
            yield from _places(value[key], (*at, key))
    elif isinstance(value, list):
        for index in range(len(value)):
            yield from _places(value[index], (*at, index))


def _damaged(chance: random.Random, value: Any) -> Any:
    """`value`, changed in one place."""
    if isinstance(value, dict) and chance.random() < 0.35:
        value[chance.choice(FIELDS)] = copy.deepcopy(chance.choice(ODD))
        return value
    place = chance.choice(list(_places(value)))
    if not place:
        return copy.deepcopy(chance.choice(ODD)) if chance.random() < 0.2 else value
    holder = value
    for step in place[:-1]:
        holder = holder[step]
    last, kind = place[-1], chance.random()
    if kind < 0.2:
        del holder[last]
    elif kind < 0.3 and isinstance(holder, list):
        holder.extend(copy.deepcopy(holder[last]) for _ in range(chance.choice((1, 5, 40))))
    elif kind < 0.4:
        holder[last] = [holder[last]]
    elif kind < 0.5:
        holder[last] = {"x": holder[last]}
    elif kind < 0.6 and isinstance(last, str):
        holder[chance.choice((last.upper(), f"{last} ", f"x_{last}"))] = holder.pop(last)
    else:
        holder[last] = copy.deepcopy(chance.choice(ODD))
    return value


def _encoded(chance: random.Random, value: Any) -> bytes:
    """NaN and lone surrogates included, as careless clients write them."""
    return json.dumps(value, ensure_ascii=chance.random() < 0.7).encode("utf-8", "surrogatepass")


def _not_quite_json(chance: random.Random, body: Any) -> bytes:
    text = _encoded(chance, body)
    cut = chance.randrange(len(text))
    return chance.choice(
        (
            text[:cut],
            text + b"}",
            text[:cut] + bytes([chance.randrange(256)]) + text[cut + 1 :],
            b"[" * 5000,
            b"{" + b'"a":{' * 3000,
            b"",
            b"\xff\xfe" + text,
            text + text,
        )
    )
