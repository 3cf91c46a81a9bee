"""What models write when they call tools: each family, whole and cut anywhere, and what only looks like a call."""

from __future__ import annotations

import json

import pytest

from octavo.cluster.openai.tool_parsers import (
    TOOL_PARSERS,
    ArrayParser,
    NamedParser,
    ToolParser,
    parser_of_template,
)

ARGUMENTS = (
    '{"city": "São \\"P\\"\\u00e9", "n": 12345678901234567890, "x": 1.0e5, '
    '"deep": {"a": [1, {"b": "}"}]}, "n": 2}'
)
"""Of all that reading and writing again would change."""

Said = tuple[str, list[tuple[str, str]]]


def said(parser: ToolParser, text: str, sizes: int) -> Said:
    """(content, [(name, arguments)]) of `text` in pieces of `sizes` characters."""
    content, calls = "", []
    pieces = []
    for start in range(0, len(text), sizes):
        pieces += parser.push(text[start : start + sizes])
    for piece in [*pieces, *parser.finish()]:
        if piece.call is None:
            content += piece.text
        elif piece.name is not None:
            assert piece.call == len(calls)
            assert piece.text == "", "the name comes first, alone"
            calls.append((piece.name, ""))
        else:
            assert piece.call == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + piece.text)
    return content, calls


CASES: dict[str, list[tuple[str, Said]]] = {
    "hermes": [
        (
            f'<tool_call>\n{{"name": "f", "arguments": {ARGUMENTS}}}\n</tool_call>',
            ("", [("f", ARGUMENTS)]),
        ),
        (
            'Let me see.\n\n<tool_call>\n{"arguments": {"a": 1}, "name": "f"}\n</tool_call>\n'
            '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>\n',
            ("Let me see.", [("f", '{"a": 1}'), ("g", "{}")]),
        ),
        ('<tool_call>{"name": "f"}</tool_call> bye', (" bye", [("f", "{}")])),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', ("", [("f", '{"a": 1}')])),
        ('<tool_call>{"name": "f", "arguments": null}</tool_call>', ("", [("f", "{}")])),
        ('<tool_call>{"name": "f", "arguments": {"a": 1', ("", [("f", '{"a": 1')])),
        ("a < b and <tool> and <tool_cal", ("a < b and <tool> and <tool_cal", [])),
        ("<tool_call>no JSON</tool_call>", ("<tool_call>no JSON</tool_call>", [])),
        ('<tool_call>{"a": 1}</tool_call>', ('<tool_call>{"a": 1}</tool_call>', [])),
        ('<tool_call>{"name": 3}</tool_call>', ('<tool_call>{"name": 3}</tool_call>', [])),
        (" plain \n", (" plain \n", [])),
        ("", ("", [])),
    ],
    "llama3_json": [
        (f'{{"name": "f", "parameters": {ARGUMENTS}}}', ("", [("f", ARGUMENTS)])),
        (
            '<|python_tag|>{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}',
            ("", [("f", '{"a": 1}'), ("g", "{}")]),
        ),
        ('{"type": "function", "name": "f", "parameters": {"a": true}}', ("", [("f", '{"a": true}')])),
        ('{"weather": "fine"}', ('{"weather": "fine"}', [])),
        ('I use {"name": "f", "parameters": {}}', ('I use {"name": "f", "parameters": {}}', [])),
        ("<|python", ("<|python", [])),
    ],
    "mistral": [
        (
            f'[TOOL_CALLS] [{{"name": "f", "arguments": {ARGUMENTS}}}, {{"name": "g", "arguments": {{}}}}]',
            ("", [("f", ARGUMENTS), ("g", "{}")]),
        ),
        (
            f'Well.[TOOL_CALLS]f[ARGS]{ARGUMENTS}[TOOL_CALLS]g[ARGS]{{"a": 1}}',
            ("Well.", [("f", ARGUMENTS), ("g", '{"a": 1}')]),
        ),
        ('[TOOL_CALLS]f{"a": 1}', ("", [("f", '{"a": 1}')])),
        ("[1, 2] and [TOOL", ("[1, 2] and [TOOL", [])),
    ],
}


@pytest.mark.parametrize(
    ("family", "text", "expected"),
    [(family, text, expected) for family, cases in CASES.items() for text, expected in cases],
)
def test_however_it_is_cut(family: str, text: str, expected: Said) -> None:
    for sizes in (1, 2, 3, 5, 7, len(text) + 1):
        assert said(TOOL_PARSERS[family](), text, sizes) == expected


def test_a_list_of_calls_that_must_come() -> None:
    text = f'[{{"name": "f", "arguments": {ARGUMENTS}}}, {{"name": "g", "arguments": {{}}}}]'
    for sizes in (1, 4, len(text)):
        assert said(ArrayParser(), text, sizes) == ("", [("f", ARGUMENTS), ("g", "{}")])


def test_the_arguments_of_a_named_tool() -> None:
    assert said(NamedParser("f"), ARGUMENTS, 4) == ("", [("f", ARGUMENTS)])


def test_arguments_come_while_they_are_written() -> None:
    parser = TOOL_PARSERS["hermes"]()
    assert parser.push('<tool_call>{"name": "f", "arguments": {"te') != []
    assert [piece.text for piece in parser.push('xt": "abc')] == ['xt": "abc']


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("{{ '<tool_call>' }}", "hermes"),
        ("{{ '[TOOL_CALLS]' }}", "mistral"),
        ("{{ '<|python_tag|>' }}", "llama3_json"),
        ("<tool_call><function=x>", None),
        ("{{ messages }}", None),
    ],
)
def test_the_template_says_how_its_model_calls(source: str, name: str | None) -> None:
    assert parser_of_template(source) == name


def test_what_reading_and_writing_would_change_is_in_the_example() -> None:
    assert json.dumps(json.loads(ARGUMENTS)) != ARGUMENTS
