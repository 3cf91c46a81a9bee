"""Compiled grammars: what each kind allows, token by token, with both backends; and what is refused."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from octavo.cluster.tokenizer import Tokenizer
from octavo.protos.errors import InvalidRequestError
from octavo.protos.structured_output import MAX_NESTING, MAX_PROPERTIES, StructuredOutput
from octavo.worker.config import GUIDED_BACKENDS
from octavo.worker.default_model import default_model_dir
from octavo.worker.grammars import Grammars, TokenMasks
from octavo.worker.vocabulary import Vocabulary, read_vocabulary

VOCAB = 49152
EOS = 2
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = Tokenizer(default_model_dir())
    yield tokenizer
    tokenizer.close()


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return read_vocabulary(default_model_dir(), VOCAB, (EOS,))


@pytest.fixture(scope="module", params=GUIDED_BACKENDS)
def grammars(request, vocabulary) -> Grammars:
    return Grammars(lambda: vocabulary, request.param)


def allowed(row) -> np.ndarray:
    """bool [VOCAB]."""
    masks = TokenMasks.collect({0: row}, VOCAB)
    assert not masks.errors
    return np.unpackbits(masks.words.view(np.uint8), bitorder="little")[:VOCAB].astype(bool)


def matches(grammars: Grammars, tokenizer: Tokenizer, wanted: StructuredOutput, text: str) -> bool:
    """Whether `text`, written in the tokenizer's usual way, may be the whole output."""
    row = grammars.start(wanted, [])
    for token in [*tokenizer.encode(text, False), EOS]:
        if not allowed(row)[token]:
            return False
        row.add(token)
    return True


@pytest.mark.parametrize(
    ("wanted", "good", "bad"),
    [
        (
            StructuredOutput.json_schema(PERSON),
            ['{"name": "Bo \\"x\\" é🧎", "age": 3}'],
            ['{"name": "Bo", "age": "3"}', '{"age": 3}', '{"name": "Bo", "age": 3} ', "[]", ""],
        ),
        (StructuredOutput.json_object(), ['{"a": [1, null, {"b": true}]}', "{}"], ["[]", "3", '{"a": }']),
        (StructuredOutput.regex(r"\d{4}-\d\d"), ["2024-07"], ["2024-7", "x2024-07", "2024-07x"]),
        (
            StructuredOutput.choice(["yes", 'a "b"\\c', "new\nline\ttab", "é🧎", "a\x07\x85"]),
            ["yes", 'a "b"\\c', "new\nline\ttab", "é🧎", "a\x07\x85"],
            ["ye", "yes ", "no"],
        ),
        (
            StructuredOutput.grammar('root ::= "a" rest\nrest ::= "b" rest | "c"'),
            ["ac", "abbbc"],
            ["ab", "c", "acc"],
        ),
    ],
    ids=lambda value: value.kind.value if isinstance(value, StructuredOutput) else None,
)
def test_each_kind_allows_what_it_says(grammars, tokenizer, wanted, good, bad):
    assert [matches(grammars, tokenizer, wanted, text) for text in good] == [True] * len(good)
    assert [matches(grammars, tokenizer, wanted, text) for text in bad] == [False] * len(bad)


def test_nothing_but_the_end_follows_a_complete_output(grammars, tokenizer):
    row = grammars.start(StructuredOutput.choice(["yes"]), tokenizer.encode("yes", False))
    assert np.flatnonzero(allowed(row)).tolist() == [EOS]


def test_special_tokens_are_never_allowed_inside_a_text(grammars, tokenizer):
    row = grammars.start(StructuredOutput.json_object(), tokenizer.encode('{"a": "', False))
    found = allowed(row)
    assert found.sum() > 1000
    assert not found[sorted(tokenizer.special_ids)].any()


def test_the_state_is_a_function_of_the_tokens_and_forks_go_their_own_ways(grammars, tokenizer):
    wanted = StructuredOutput.json_schema(PERSON)
    tokens = tokenizer.encode('{"name": "Bo", "age": 12', False)
    stepwise = grammars.start(wanted, [])
    for token in tokens:
        allowed(stepwise)
        stepwise.add(token)
    twin = stepwise.fork()
    again = grammars.start(wanted, tokens)
    assert (allowed(stepwise) == allowed(again)).all()
    twin.add(tokenizer.encode("}", False)[0])
    assert np.flatnonzero(allowed(twin)).tolist() == [EOS]
    assert (allowed(stepwise) == allowed(again)).all()


@pytest.mark.parametrize(
    "wanted",
    [
        StructuredOutput.json_schema({"type": "banana"}),
        StructuredOutput.json_schema({"$ref": "#/nope"}),
        StructuredOutput.json_schema({"type": "string", "pattern": "["}),
        StructuredOutput.regex("(a"),
        StructuredOutput.regex("a(?=b)"),
        StructuredOutput.grammar('root ::= "a" | b'),
        StructuredOutput.grammar("not a grammar"),
    ],
    ids=lambda wanted: wanted.text[:20],
)
def test_what_means_nothing_is_refused(grammars, wanted):
    with pytest.raises(InvalidRequestError, match=wanted.kind.value) as caught:
        grammars.compile(wanted).result(20)
    assert caught.value.param == "structured_output"
    # A row that gets there all the same fails alone.
    masks = TokenMasks.collect({5: grammars.start(wanted, [])}, VOCAB)
    assert list(masks.errors) == [5]
    assert not masks.words.any()


def test_what_was_compiled_once_is_kept(grammars):
    wanted = StructuredOutput.regex("kept+")
    assert grammars.compile(wanted) is grammars.compile(StructuredOutput.regex("kept+"))


def test_an_output_that_left_its_grammar_is_an_error(grammars, tokenizer):
    row = grammars.start(StructuredOutput.choice(["yes"]), tokenizer.encode("no", False))
    assert re.search("left its grammar", TokenMasks.collect({0: row}, VOCAB).errors[0])


@pytest.mark.parametrize(
    ("make", "given"),
    [
        (StructuredOutput.json_schema, "{"),
        (StructuredOutput.json_schema, "[1]"),
        (StructuredOutput.json_schema, {"a": {1, 2}}),
        (StructuredOutput.json_schema, {"a": float("nan")}),
        (
            StructuredOutput.json_schema,
            json.loads('{"a":' * (MAX_NESTING + 1) + "1" + "}" * (MAX_NESTING + 1)),
        ),
        (
            StructuredOutput.json_schema,
            {"properties": {str(index): {} for index in range(MAX_PROPERTIES + 1)}},
        ),
        (StructuredOutput.regex, ""),
        (StructuredOutput.regex, "a" * 300_000),
        (StructuredOutput.regex, "\ud800"),
        (StructuredOutput.choice, []),
        (StructuredOutput.choice, "yes"),
        (StructuredOutput.choice, [""]),
        (StructuredOutput.grammar, 3),
    ],
)
def test_texts_are_checked_before_any_compiler_sees_them(make, given):
    with pytest.raises(InvalidRequestError) as caught:
        make(given)
    assert caught.value.param == "structured_output"


def test_no_string_of_json_holds_a_control_character(grammars, tokenizer, vocabulary):
    """JSON forbids them bare; escaped they are fine."""
    control = [index for index, token in enumerate(vocabulary.tokens) if any(byte < 0x20 for byte in token)]
    assert len(control) > 32
    for wanted, begin in (
        (StructuredOutput.json_schema(PERSON), '{"name": "a'),
        (StructuredOutput.json_object(), '{"a'),
    ):
        row = grammars.start(wanted, tokenizer.encode(begin, False))
        assert not allowed(row)[control].any()
    assert matches(
        grammars, tokenizer, StructuredOutput.json_schema(PERSON), '{"name": "\\u0000\\n", "age": 3}'
    )
