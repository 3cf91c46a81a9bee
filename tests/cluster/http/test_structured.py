"""What an output must match, as clients say it: which field means what, and which answer names it."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.protos.errors import InvalidRequestError
from octavo.protos.structured_output import OutputKind, StructuredOutput

from .conftest import Api, ScriptedBackend, error_of

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {}}}
WANTED = StructuredOutput.json_schema(SCHEMA)


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"response_format": {"type": "json_object"}}, StructuredOutput.json_object()),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
            WANTED,
        ),
        ({"guided_json": SCHEMA}, WANTED),
        ({"guided_json": '{"type":"object","properties":{"b":{"type":"integer"},"a":{}}}'}, WANTED),
        ({"guided_regex": "a+"}, StructuredOutput.regex("a+")),
        ({"guided_choice": ["yes", "no"]}, StructuredOutput.choice(["yes", "no"])),
        ({"guided_grammar": 'root ::= "a"'}, StructuredOutput.grammar('root ::= "a"')),
        ({"structured_outputs": {"json": SCHEMA}}, WANTED),
        ({"structured_outputs": {"regex": "a+"}}, StructuredOutput.regex("a+")),
        ({"structured_outputs": {"choice": ["yes"]}}, StructuredOutput.choice(["yes"])),
        ({"structured_outputs": {"json_object": True}}, StructuredOutput.json_object()),
        ({"response_format": {"type": "text"}, "guided_json": None, "structured_outputs": {}}, None),
    ],
    ids=str,
)
def test_every_way_of_saying_it(
    api: Api, backend: ScriptedBackend, fields: dict[str, Any], wanted: StructuredOutput | None
) -> None:
    for call in (api.chat, api.complete):
        response = call(**fields)
        assert response.status_code == 200, response.text
        assert "x-octavo-warning" not in response.headers
        assert backend.submitted[-1].params.structured_output == wanted
    assert backend.compiled == [wanted] * 2 if wanted is not None else backend.compiled == []


def test_properties_keep_their_order(api: Api, backend: ScriptedBackend) -> None:
    api.chat(guided_json=SCHEMA)
    assert backend.compiled[0].kind is OutputKind.JSON_SCHEMA
    assert backend.compiled[0].text.index('"b"') < backend.compiled[0].text.index('"a"')


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": "{"}}},
            "response_format.json_schema.schema",
        ),
        ({"guided_json": [1]}, "guided_json"),
        ({"guided_regex": 5}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a", 1]}, "guided_choice"),
        ({"guided_grammar": ""}, "guided_grammar"),
        ({"structured_outputs": {"choice": "a"}}, "structured_outputs.choice"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
        ({"guided_regex": "a", "min_tokens": 3}, "min_tokens"),
        ({"guided_regex": "a", "beam_width": 2, "temperature": 0}, "structured_output"),
        ({"guided_decoding_backend": "outlines"}, "guided_decoding_backend"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
    ],
    ids=str,
)
def test_what_means_nothing_is_refused_by_name(
    api: Api, backend: ScriptedBackend, fields: dict[str, Any], param: str
) -> None:
    error_of(api.chat(**fields), 400, param)
    assert backend.submitted == backend.compiled == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_regex": "("}, "guided_regex"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "banana"}}}},
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {"grammar": "x"}}, "structured_outputs.grammar"),
    ],
    ids=str,
)
def test_what_cannot_be_compiled_is_refused_before_anything_runs(
    api: Api, backend: ScriptedBackend, fields: dict[str, Any], param: str
) -> None:
    backend.compile_error = InvalidRequestError("not a thing that works here", param="structured_output")
    assert "works here" in error_of(api.chat(**fields), 400, param)["message"]
    assert backend.submitted == []


def test_a_response_says_it_in_its_own_way(api: Api, backend: ScriptedBackend) -> None:
    form = {"type": "json_schema", "name": "x", "strict": True, "schema": SCHEMA}
    reply = api.post("/v1/responses", {"input": "Hi", "text": {"format": form}})
    assert reply.status_code == 200, reply.text
    assert backend.submitted[-1].params.structured_output == WANTED
    assert reply.json()["text"]["format"] == form
    api.post("/v1/responses", {"input": "Hi", "text": {"format": {"type": "json_object"}}})
    assert backend.submitted[-1].params.structured_output == StructuredOutput.json_object()
    error_of(
        api.post("/v1/responses", {"input": "Hi", "text": {"format": {"type": "json_schema"}}}),
        400,
        "text.format.schema",
    )
