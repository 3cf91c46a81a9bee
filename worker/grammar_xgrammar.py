"""Grammars through xgrammar (Dong et al. 2024, arXiv:2411.15100)."""

from __future__ import annotations

import json

import numpy as np
import xgrammar

from octavo.protos.structured_output import OutputKind, StructuredOutput
from octavo.protos.types import Int32Array
from octavo.worker.grammars import Compiled
from octavo.worker.vocabulary import Vocabulary

_ANY_OBJECT = '{"type":"object","additionalProperties":true}'


class XGrammarBackend:
    """Implements `grammars.GrammarBackend`."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        info = xgrammar.TokenizerInfo(
            list(vocabulary.tokens),
            xgrammar.VocabType.RAW,
            vocab_size=vocabulary.size,
            stop_token_ids=list(vocabulary.eos_token_ids),
        )
        # One thread: the others compute. Its own cache would keep what `Grammars` has let go.
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._json_words = _words([not any(byte < 0x20 for byte in token) for token in vocabulary.tokens])

    def compile(self, wanted: StructuredOutput) -> Compiled:
        """See `GrammarBackend.compile`."""
        compiled = self._compiled(wanted)
        # xgrammar lets a string of JSON hold bare control characters, which JSON forbids.
        is_json = wanted.kind in (OutputKind.JSON_SCHEMA, OutputKind.JSON_OBJECT)
        within = self._json_words if is_json else None
        return lambda: XGrammarMatcher(xgrammar.GrammarMatcher(compiled), within)

    def _compiled(self, wanted: StructuredOutput) -> xgrammar.CompiledGrammar:
        compiler, text = self._compiler, wanted.text
        if wanted.kind is OutputKind.REGEX:
            return compiler.compile_regex(text)
        if wanted.kind is OutputKind.GRAMMAR:
            return compiler.compile_grammar(text)
        if wanted.kind is OutputKind.CHOICE:
            return compiler.compile_grammar("root ::= " + " | ".join(map(_literal, json.loads(text))))
        # Any white space would do for a parser, and small models then write nothing else until their limit.
        return compiler.compile_json_schema(text or _ANY_OBJECT, any_whitespace=False)


class XGrammarMatcher:
    """Implements `grammars.Matcher`."""

    def __init__(self, matcher: xgrammar.GrammarMatcher, within: Int32Array | None) -> None:
        """`within`, [W] int32: what no state allows is left out of every one."""
        self._matcher = matcher
        self._within = within

    def accept(self, token: int) -> bool:
        return bool(self._matcher.accept_token(token))

    def fill(self, words: Int32Array, index: int) -> None:
        self._matcher.fill_next_token_bitmask(words, index)
        if self._within is not None:
            words[index] &= self._within

    def fork(self) -> XGrammarMatcher:
        return XGrammarMatcher(self._matcher.fork(), self._within)


def _words(flags: list[bool]) -> Int32Array:
    """One bit a token, lowest first."""
    bits = np.packbits(np.array(flags), bitorder="little")
    return np.pad(bits, (0, -len(bits) % 4)).view(np.int32)


def _literal(text: str) -> str:
    """`text` as a string of GBNF."""
    special = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
    return '"' + "".join([special.get(char) or _plain(char) for char in text]) + '"'


def _plain(char: str) -> str:
    return char if char.isprintable() else f"\\U{ord(char):08X}"
