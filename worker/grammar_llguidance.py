"""Grammars through llguidance."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import llguidance
import numpy as np

from octavo.protos.errors import InvalidRequestError
from octavo.protos.structured_output import PARAM, OutputKind, StructuredOutput
from octavo.protos.types import Int32Array
from octavo.worker.grammars import Compiled
from octavo.worker.vocabulary import Vocabulary

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

_ANY_OBJECT = '{"type":"object"}'
# As the other backend writes: small models that may write any white space write nothing else.
_JSON_OPTIONS: JsonCompileOptions = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}


class LLGuidanceBackend:
    """Implements `grammars.GrammarBackend`."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        # Not the tokens alone: text that a grammar forces must come in the tokens that the model would write.
        self._tokenizer = llguidance.LLTokenizer(
            vocabulary.tokenizer.to_str(), n_vocab=vocabulary.size, eos_token=list(vocabulary.eos_token_ids)
        )

    def compile(self, wanted: StructuredOutput) -> Compiled:
        """See `GrammarBackend.compile`."""
        matcher = llguidance.LLMatcher(self._tokenizer, _grammar(wanted), log_level=0)
        if matcher.is_error():
            raise InvalidRequestError(
                f"not a {wanted.kind.value} that works here: {matcher.get_error()}", param=PARAM
            )
        return lambda: LLGuidanceMatcher(matcher.deep_copy())


def _grammar(wanted: StructuredOutput) -> str:
    text = wanted.text
    if wanted.kind is OutputKind.REGEX:
        return llguidance.grammar_from("regex", text)
    if wanted.kind is OutputKind.GRAMMAR:
        return llguidance.grammar_from("grammar", text)
    if wanted.kind is OutputKind.CHOICE:
        options = [json.dumps(option, ensure_ascii=False) for option in json.loads(text)]
        return llguidance.grammar_from("lark", "start: " + " | ".join(options))
    return llguidance.LLMatcher.grammar_from_json_schema(text or _ANY_OBJECT, overrides=_JSON_OPTIONS)


class LLGuidanceMatcher:
    """Implements `grammars.Matcher`."""

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self._matcher = matcher

    def accept(self, token: int) -> bool:
        return bool(self._matcher.consume_token(token))

    def fill(self, words: Int32Array, index: int) -> None:
        allowed = np.frombuffer(self._matcher.compute_bitmask(), np.int32)
        words[index] = allowed[: words.shape[1]]

    def fork(self) -> LLGuidanceMatcher:
        return LLGuidanceMatcher(self._matcher.deep_copy())
