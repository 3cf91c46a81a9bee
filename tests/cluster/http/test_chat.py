"""Chats: content in all its forms, and log-probabilities (cases D18 and D19)."""

from __future__ import annotations

from typing import Any

import pytest

from .conftest import Api, ScriptedBackend, error_of, events

EMOJI = [10813, 117, 232]


def prompt_of(backend: ScriptedBackend) -> str:
    return backend.tokenizer.decode(backend.submitted[-1].prompt_token_ids.tolist(), False)


def test_d19_one_text_part_is_the_string(api: Api, backend: ScriptedBackend) -> None:
    replies = [
        api.chat(messages=[{"role": "user", "content": content}]).json()
        for content in ("Say hi", [{"type": "text", "text": "Say hi"}])
    ]
    first, second = backend.submitted
    assert first.prompt_token_ids.tolist() == second.prompt_token_ids.tolist()
    assert replies[0]["usage"] == replies[1]["usage"]
    assert replies[0]["choices"] == replies[1]["choices"]


def test_d19_all_parts_reach_the_prompt_in_order(api: Api, backend: ScriptedBackend) -> None:
    parts = [{"type": "text", "text": "first "}, {"type": "text", "text": "second"}]
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "Be kind."}]},
        {"role": "user", "content": parts},
    ]
    assert api.chat(messages=messages).status_code == 200
    text = prompt_of(backend)
    assert "<|im_start|>system\nBe kind.<|im_end|>" in text
    assert "<|im_start|>user\nfirst second<|im_end|>" in text
    assert text.endswith("<|im_start|>assistant\n")


def test_d19_null_content_is_empty(api: Api, backend: ScriptedBackend) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [
        {"role": "user", "content": "Use it"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "user", "content": None},
    ]
    response = api.chat(messages=messages)
    assert response.status_code == 200, response.text
    text = prompt_of(backend)
    assert "None" not in text
    assert "<|im_start|>assistant\n<|im_end|>" in text
    assert "<|im_start|>tool\n42<|im_end|>" in text


@pytest.mark.parametrize(
    ("message", "param"),
    [
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            "messages[0].content[0]",
        ),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "messages[0].content[0]"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user", "content": {"type": "text"}}, "messages[0].content"),
        ({"role": "user", "content": ["text"]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "text", "text": None}]}, "messages[0].content[0]"),
        ({"role": "queen", "content": "x"}, "messages[0].role"),
        ({"role": 5, "content": "x"}, "messages[0].role"),
        ({"content": "x"}, "messages[0].role"),
        ({"role": "assistant", "content": "", "tool_calls": "x"}, "messages[0].tool_calls"),
        ({"role": "user", "content": "x", "name": 5}, "messages[0].name"),
        ("hi", "messages[0]"),
        (None, "messages[0]"),
    ],
    ids=str,
)
def test_d19_what_a_text_model_cannot_take(
    api: Api, backend: ScriptedBackend, message: Any, param: str
) -> None:
    error_of(api.chat(messages=[message]), 400, param)
    assert backend.submitted == []
    error_of(api.chat(messages={"role": "user"}), 400, "messages")


def test_d19_developer_is_system(api: Api, backend: ScriptedBackend) -> None:
    api.chat(messages=[{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "x"}])
    assert prompt_of(backend).startswith("<|im_start|>system\nBe brief.")


def test_a_chat_goes_on_to_the_limit_unless_told(api: Api, backend: ScriptedBackend) -> None:
    api.chat()
    assert backend.submitted[0].params.max_tokens is None
    assert backend.submitted[0].eos_token_ids == (2,)


def test_the_generation_prompt_can_be_left_out(api: Api, backend: ScriptedBackend) -> None:
    api.chat(add_generation_prompt=False)
    assert not prompt_of(backend).endswith("assistant\n")
    error_of(api.chat(chat_template_kwargs=[1]), 400, "chat_template_kwargs")
    assert api.chat(chat_template_kwargs={"enable_thinking": False, "messages": 1}).status_code == 200


@pytest.mark.parametrize(("top", "expected"), [({}, 0), ({"top_logprobs": 0}, 0), ({"top_logprobs": 5}, 5)])
def test_d18_one_entry_a_token(api: Api, top: dict[str, int], expected: int) -> None:
    reply = api.chat(logprobs=True, **top).json()
    content = reply["choices"][0]["logprobs"]["content"]
    assert len(content) == reply["usage"]["completion_tokens"]
    assert all(len(entry["top_logprobs"]) == expected for entry in content)
    text = b"".join(bytes(entry["bytes"]) for entry in content).decode()
    assert text == reply["choices"][0]["message"]["content"]


def test_d18_twenty_is_the_most(api: Api) -> None:
    assert api.chat(logprobs=True, top_logprobs=20).status_code == 200
    error_of(api.chat(logprobs=True, top_logprobs=21), 400, "top_logprobs")
    error_of(api.chat(logprobs=True, top_logprobs=-1), 400, "top_logprobs")
    error_of(api.chat(top_logprobs=2), 400, "top_logprobs")
    error_of(api.chat(logprobs=False, top_logprobs=2), 400, "top_logprobs")
    error_of(api.chat(logprobs=5), 400, "logprobs")


def test_d18_bytes_of_parts_of_a_character(api: Api, backend: ScriptedBackend) -> None:
    backend.answer = lambda request, branch: [*EMOJI, *EMOJI, 2]
    content = api.chat(logprobs=True, top_logprobs=3).json()["choices"][0]["logprobs"]["content"]
    joined = b"".join(bytes(entry["bytes"]) for entry in content)
    assert joined == "\U0001f9ce\U0001f9ce".encode()
    # Minus infinity became OpenAI's number, so that the JSON is JSON.
    assert content[0]["top_logprobs"][1]["logprob"] == -9999.0


def test_d18_streamed_entries_are_the_same(api: Api, backend: ScriptedBackend) -> None:
    backend.answer = lambda request, branch: [*EMOJI, 64, 64, 2]
    fields: dict[str, Any] = {"logprobs": True, "top_logprobs": 2, "stop": ["zzz"]}
    whole = api.chat(**fields).json()["choices"][0]["logprobs"]["content"]
    streamed = []
    for chunk in events(api.chat(**fields, stream=True))[:-1]:
        if chunk["choices"][0]["logprobs"]:
            streamed += chunk["choices"][0]["logprobs"]["content"]
    assert streamed == whole
