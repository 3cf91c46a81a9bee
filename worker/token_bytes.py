"""The exact bytes of every token, for decoders that work token by token.

Owns the reading of a `tokenizers` decoder as a map from token to bytes: byte-level BPE, and SentencePiece-like
chains with or without byte fallback. Knows nothing of requests. A stream that joins bytes needs no look-back and
cannot split a character; a decoder that is no such map (WordPiece) is left to the caller.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_level_alphabet() -> dict[str, int]:
    """Which character stands for which byte in byte-level BPE vocabularies (GPT-2, Radford et al. 2019).

    Bytes that print as one visible Latin-1 character stand for themselves; the others, in order, are the
    characters from U+0100 on.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    alphabet = {chr(byte): byte for byte in visible}
    hidden = [byte for byte in range(256) if byte not in visible]
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(hidden)})
    return alphabet


class BytePieces:
    """Bytes of each token, looked up once per id. Safe for several threads: entries are only ever added."""

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        *,
        byte_level: bool = False,
        byte_fallback: bool = False,
        replacements: Sequence[tuple[str, str]] = (),
        trimmed: str = "",
    ) -> None:
        """`replacements` are (text, by what) within a token; `trimmed` is taken once from a text's start."""
        self._tokenizer = tokenizer
        self._alphabet = byte_level_alphabet() if byte_level else None
        self._byte_fallback = byte_fallback
        self._replacements = tuple(replacements)
        self._trimmed = trimmed
        self._known: dict[int, bytes] = {}

    def of(self, index: int) -> bytes:
        """Bytes of token `index`; b"" for an id outside the vocabulary."""
        found = self._known.get(index)
        return found if found is not None else self._look_up(index)

    def trim_start(self, text: str) -> str:
        """`text` as it stands alone: without the one space that the decoder takes from the start of a text."""
        return text.removeprefix(self._trimmed) if self._trimmed else text

    def _look_up(self, index: int) -> bytes:
        token = self._tokenizer.id_to_token(index) if 0 <= index < 2**32 else None
        if token is None:
            return b""  # not kept: ids that nobody has are without limit
        raw = self._known[index] = self._bytes(token)
        return raw

    def _bytes(self, token: str) -> bytes:
        if self._alphabet is not None:
            try:
                return bytes([self._alphabet[char] for char in token])
            except KeyError:  # an added token, written as plain text
                return token.encode()
        for text, by in self._replacements:
            token = token.replace(text, by)
        if self._byte_fallback and (match := _BYTE_PIECE.fullmatch(token)):
            return bytes([int(match[1], 16)])
        return token.encode()


def byte_pieces(tokenizer: tokenizers.Tokenizer) -> BytePieces | None:
    """The byte map that `tokenizer`'s decoder amounts to, or None when it is no such map."""
    if tokenizer.decoder is None:
        return None
    steps = _steps(json.loads(tokenizer.decoder.__getstate__()))
    names = [step["type"] for step in steps]
    if names == ["ByteLevel"]:
        return BytePieces(tokenizer, byte_level=True)
    return _sentencepiece(tokenizer, steps)


def _steps(decoder: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for child in decoder["decoders"] for step in _steps(child)]


def _sentencepiece(tokenizer: tokenizers.Tokenizer, steps: list[Mapping[str, Any]]) -> BytePieces | None:
    """Chains of [Replace or Metaspace]*, ByteFallback?, Fuse?, Strip?, in this order."""
    replacements: list[tuple[str, str]] = []
    trimmed, byte_fallback, fused, stage = "", False, False, 0
    for step in steps:
        kind = step["type"]
        if kind == "Replace" and "String" in step["pattern"] and stage == 0:
            replacements.append((step["pattern"]["String"], step["content"]))
        elif kind == "Metaspace" and stage <= 1:
            replacements.append((step["replacement"], " "))
            trimmed = " " if step.get("prepend_scheme", "always") != "never" else ""
        elif kind == "ByteFallback" and stage == 0:
            byte_fallback, stage = True, 1
        elif kind == "Fuse" and stage <= 1:
            fused, stage = True, 2
        elif kind == "Strip" and fused and stage == 2 and step["stop"] == 0 and step["start"] <= 1:
            trimmed, stage = step["content"] * step["start"], 3
        else:
            return None
    return BytePieces(tokenizer, byte_fallback=byte_fallback, replacements=replacements, trimmed=trimmed)
