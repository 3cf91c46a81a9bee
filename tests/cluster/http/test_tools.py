"""Tools over HTTP: what reaches the prompt, what the output is held to, and how calls are told, whole and streamed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from octavo.cluster.openai.app import create_app
from octavo.cluster.openai.config import HttpConfig
from octavo.cluster.tokenizer import Tokenizer
from octavo.protos.errors import ConfigError, InvalidRequestError
from octavo.protos.structured_output import OutputKind
from octavo.worker.default_model import default_model_dir

from .conftest import MODEL, Api, ScriptedBackend, Server, error_of, events

HERMES = """{%- if tools %}<|im_start|>system
<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools> Answer with <tool_call>{"name": ..., "arguments": ...}</tool_call>.<|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich 🧎"}}\n</tool_call>'
TOOLS: dict[str, Any] = {"tools": [WEATHER, CLOCK]}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tokenizer]:
    """The default model's, with a chat template that knows tools."""
    folder: Path = tmp_path_factory.mktemp("hermes")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(default_model_dir() / name, folder / name)
    (folder / "chat_template.jinja").write_text(HERMES)
    made = Tokenizer(folder)
    yield made
    made.close()


@pytest.fixture
def say(backend: ScriptedBackend, tokenizer: Tokenizer) -> Callable[..., None]:
    """What the model says, choice by choice."""

    def set_answer(*texts: str) -> None:
        backend.answer = lambda request, branch: [*tokenizer.encode(texts[branch], False), 2]

    return set_answer


def prompt_of(backend: ScriptedBackend) -> str:
    return backend.tokenizer.decode(backend.submitted[-1].prompt_token_ids.tolist(), False)


def streamed(api: Api, **fields: Any) -> tuple[dict[int, dict[str, Any]], dict[int, str]]:
    """(message, finish reason) by choice, put together as clients do."""
    messages: dict[int, dict[str, Any]] = {}
    reasons: dict[int, str] = {}
    for event in events(api.chat(stream=True, **fields))[:-1]:
        for choice in event["choices"]:
            assert choice["index"] not in reasons, "nothing comes after the end"
            message = messages.setdefault(choice["index"], {"content": "", "tool_calls": []})
            message["content"] += choice["delta"].get("content") or ""
            for call in choice["delta"].get("tool_calls", ()):
                if "id" in call:
                    assert call["index"] == len(message["tool_calls"])
                    assert call["function"]["arguments"] == ""
                    message["tool_calls"].append({**call, "function": dict(call["function"])})
                else:
                    known = message["tool_calls"][call["index"]]
                    known["function"]["arguments"] += call["function"]["arguments"]
            if choice["finish_reason"]:
                reasons[choice["index"]] = choice["finish_reason"]
    return messages, reasons


def functions(message: dict[str, Any]) -> list[dict[str, str]]:
    return [call["function"] for call in message.get("tool_calls") or []]


def test_tools_reach_the_prompt_and_calls_come_back(api: Api, backend: ScriptedBackend, say: Any) -> None:
    say("Let me look.\n" + CALL)
    reply = api.chat(**TOOLS).json()
    assert json.dumps(WEATHER) in prompt_of(backend)
    choice = reply["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Let me look."
    (call,) = choice["message"]["tool_calls"]
    assert call["type"] == "function"
    assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Zürich 🧎"}'}
    messages, reasons = streamed(api, **TOOLS)
    assert functions(messages[0]) == [call["function"]]
    assert messages[0]["content"] == "Let me look."
    assert reasons == {0: "tool_calls"}
    assert backend.compiled == []


@pytest.mark.parametrize("tokens_per_delta", [1, 3, 100])
def test_several_calls_and_choices(
    api: Api, backend: ScriptedBackend, say: Any, tokens_per_delta: int
) -> None:
    backend.tokens_per_delta = tokens_per_delta
    say(CALL + '\n<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>', "No <tool> needed.")
    whole = api.chat(n=2, **TOOLS).json()["choices"]
    messages, reasons = streamed(api, n=2, **TOOLS)
    expected = [
        {"name": "get_weather", "arguments": '{"city": "Zürich 🧎"}'},
        {"name": "clock", "arguments": "{}"},
    ]
    assert functions(whole[0]["message"]) == functions(messages[0]) == expected
    assert len({call["id"] for call in messages[0]["tool_calls"]}) == 2
    assert whole[0]["message"]["content"] is None
    assert whole[1]["message"]["content"] == messages[1]["content"] == "No <tool> needed."
    assert "tool_calls" not in whole[1]["message"]
    assert [choice["finish_reason"] for choice in whole] == [reasons[0], reasons[1]] == ["tool_calls", "stop"]


def test_one_call_where_no_more_are_wanted(api: Api, backend: ScriptedBackend, say: Any) -> None:
    say(CALL + CALL)
    whole = api.chat(parallel_tool_calls=False, **TOOLS).json()["choices"][0]
    messages, _ = streamed(api, parallel_tool_calls=False, **TOOLS)
    assert len(functions(whole["message"])) == len(functions(messages[0])) == 1


def test_a_cut_call_ends_by_length(api: Api, say: Any) -> None:
    say(CALL)
    choice = api.chat(max_tokens=16, **TOOLS).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert functions(choice["message"])[0]["name"] == "get_weather"


def test_required_is_held_to_the_tools(api: Api, backend: ScriptedBackend, say: Any) -> None:
    say('[{"name": "get_weather", "arguments": {"city": "Rom"}}, {"name": "clock", "arguments": {}}]')
    choice = api.chat(tool_choice="required", **TOOLS).json()["choices"][0]
    assert functions(choice["message"]) == [
        {"name": "get_weather", "arguments": '{"city": "Rom"}'},
        {"name": "clock", "arguments": "{}"},
    ]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    wanted = backend.compiled[0]
    assert wanted.kind is OutputKind.JSON_SCHEMA
    schema = json.loads(wanted.text)
    assert [one["properties"]["name"] for one in schema["items"]["anyOf"]] == [
        {"const": "get_weather"},
        {"const": "clock"},
    ]
    assert "maxItems" not in schema
    api.chat(tool_choice="required", parallel_tool_calls=False, **TOOLS)
    assert json.loads(backend.compiled[1].text)["maxItems"] == 1


def test_a_named_tool_is_held_to_its_schema(api: Api, backend: ScriptedBackend, say: Any) -> None:
    say('{"city": "Rom"}')
    choice_of = {"type": "function", "function": {"name": "get_weather"}}
    choice = api.chat(tool_choice=choice_of, **TOOLS).json()["choices"][0]
    assert functions(choice["message"]) == [{"name": "get_weather", "arguments": '{"city": "Rom"}'}]
    assert choice["finish_reason"] == "tool_calls"
    assert json.loads(backend.compiled[0].text) == WEATHER["function"]["parameters"]  # type: ignore[index]
    messages, _ = streamed(api, tool_choice=choice_of, **TOOLS)
    assert functions(messages[0]) == functions(choice["message"])


def test_what_a_schema_refers_to_moves_along(api: Api, backend: ScriptedBackend) -> None:
    parameters = {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/A"}},
        "$defs": {"A": {"type": "integer"}},
    }
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    api.chat(tools=[CLOCK, tool], tool_choice="required")
    arguments = json.loads(backend.compiled[0].text)["items"]["anyOf"][1]["properties"]["arguments"]
    assert arguments["properties"]["a"]["$ref"] == "#/items/anyOf/1/properties/arguments/$defs/A"


def test_none_is_as_if_there_were_no_tools(api: Api, backend: ScriptedBackend, say: Any) -> None:
    say(CALL)
    choice = api.chat(tool_choice="none", **TOOLS).json()["choices"][0]
    assert choice["message"]["content"] == CALL
    assert choice["finish_reason"] == "stop"
    assert "get_weather" not in prompt_of(backend)
    assert api.chat(tools=[], tool_choice="auto").status_code == 200


def test_a_conversation_with_calls_reaches_the_template(api: Api, backend: ScriptedBackend) -> None:
    call = {
        "id": "abc",
        "type": "function",
        "function": {"name": "f", "arguments": '{"n": 12345678901234567890}'},
    }
    messages = [
        {"role": "user", "content": "Use it"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abc", "content": [{"type": "text", "text": "42"}]},
    ]
    assert api.chat(messages=messages, **TOOLS).status_code == 200
    text = prompt_of(backend)
    assert '{"name": "f", "arguments": {"n": 12345678901234567890}}' in text
    assert "<|im_start|>tool\n42<|im_end|>" in text


def test_tools_count_where_a_prompt_is_tokenised(api: Api) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    used = api.chat(messages=messages, **TOOLS).json()["usage"]["prompt_tokens"]
    assert api.post("/tokenize", {"messages": messages, **TOOLS}).json()["count"] == used
    assert api.post("/tokenize", {"messages": messages}).json()["count"] < used
    error_of(api.post("/tokenize", {"messages": messages, "tools": {}}), 400, "tools")


def test_log_probabilities_and_ids_are_all_told(api: Api, say: Any) -> None:
    say(CALL)
    found, ids = [], []
    for event in events(api.chat(stream=True, logprobs=True, return_token_ids=True, **TOOLS))[:-1]:
        choice = event["choices"][0]
        found += (choice["logprobs"] or {}).get("content", [])
        ids += choice.get("token_ids", [])
    whole = api.chat(logprobs=True, return_token_ids=True, **TOOLS).json()["choices"][0]
    assert found == whole["logprobs"]["content"]
    assert ids == whole["token_ids"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": ["x"]}, "tools[0]"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "description": 1}}]},
            "tools[0].function.description",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]},
            "tools[0].function.parameters",
        ),
        ({"tools": [CLOCK, CLOCK]}, "tools"),
        ({"tools": [CLOCK] * 200}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [CLOCK], "tool_choice": "always"}, "tool_choice"),
        ({"tools": [CLOCK], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tools": [CLOCK], "parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"tools": [CLOCK], "guided_regex": "a"}, "guided_regex"),
        ({"tools": [CLOCK], "functions": [{}]}, "functions"),
    ],
    ids=str,
)
def test_what_means_nothing_is_refused_by_name(
    api: Api, backend: ScriptedBackend, fields: dict[str, Any], param: str
) -> None:
    error_of(api.chat(**fields), 400, param)
    assert backend.submitted == []


def test_a_schema_that_cannot_be_compiled_is_refused(api: Api, backend: ScriptedBackend) -> None:
    backend.compile_error = InvalidRequestError("no schema", param="structured_output")
    error_of(api.chat(tool_choice="required", **TOOLS), 400, "tools")


def test_strictness_that_cannot_be_kept_is_said(api: Api) -> None:
    tool = {"type": "function", "function": {"name": "f", "strict": True}}
    assert "tools.function.strict" in api.chat(tools=[tool]).headers["x-octavo-warning"]
    assert "x-octavo-warning" not in api.chat(tools=[tool], tool_choice="required").headers


def test_a_model_that_knows_no_tools_is_not_asked_to_call_any(backend: ScriptedBackend) -> None:
    plain = Tokenizer(default_model_dir())
    try:
        api = Api(create_app(backend, plain))
        error_of(api.chat(**TOOLS), 400, "tools")
        assert api.chat(tool_choice="none", **TOOLS).status_code == 200
    finally:
        plain.close()


def test_the_parser_can_be_named(make_api: Callable[..., Api], backend: ScriptedBackend, say: Any) -> None:
    say('{"name": "clock", "parameters": {}}')
    choice = make_api(tool_call_parser="llama3_json").chat(**TOOLS).json()["choices"][0]
    assert functions(choice["message"]) == [{"name": "clock", "arguments": "{}"}]
    with pytest.raises(ConfigError, match="hermes"):
        HttpConfig(tool_call_parser="xml")


def test_openais_own_client_understands(api: Api, backend: ScriptedBackend, say: Any) -> None:
    say("Hm. " + CALL)
    with Server(api.app) as server, openai.OpenAI(base_url=f"{server.url}/v1", api_key="x") as client:
        with client.chat.completions.stream(
            model=MODEL, messages=[{"role": "user", "content": "Hi"}], tools=[WEATHER]
        ) as stream:
            kinds = [event.type for event in stream]
            message = stream.get_final_completion().choices[0].message
        assert "tool_calls.function.arguments.done" in kinds
        assert message.tool_calls is not None
        assert message.tool_calls[0].function.name == "get_weather"
        assert json.loads(message.tool_calls[0].function.arguments) == {"city": "Zürich 🧎"}
        assert message.content == "Hm."
