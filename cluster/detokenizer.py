"""Token ids to text while they come: whole characters only, and nothing that a stop string will take back.

Owns the text of one branch, for the HTTP streams and the in-process engine alike, so that a streamed text and a
whole one cannot differ. Knows nothing of requests, scheduling or JSON. However the ids are cut into pushes, the
texts joined are the same.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from octavo.cluster.tokenizer import Tokenizer
from octavo.protos.types import SamplingParams

REPLACEMENT = "\ufffd"
UNFINISHED_CHARS_MAX = 4
"""A character has at most 4 bytes, so no more tokens than this can wait for its end."""


class IncrementalDetokenizer:
    """Deltas of the text that ids add after a prompt; joined they are `Tokenizer.continuation` of all ids.

    A character whose bytes have not all come is held back. One that never completes becomes U+FFFD, once, when
    the next token shows it or at `finish`, as in the decoding of the whole. Each token costs O(its bytes).
    """

    __slots__ = ("_generic", "_skip_special_tokens", "_tokenizer", "_utf8")

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._generic = _Window(tokenizer, skip_special_tokens) if tokenizer.pieces is None else None

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these ids complete; "" while a character is incomplete."""
        if self._generic is not None:
            return "".join([self._generic.push(token) for token in token_ids])
        return self._utf8.decode(self._tokenizer.join(token_ids, self._skip_special_tokens))

    def finish(self) -> str:
        """The rest: U+FFFD when the last character was cut, else ""."""
        if self._generic is not None:
            return self._generic.finish()
        return self._utf8.decode(b"", final=True)


class _Window:
    """The look-back method, for decoders that are no map from token to bytes (WordPiece).

    A token's text is what it adds to the decoding of the few tokens before it. The window is cut whenever the
    text ends in a whole character, and at the latest after `UNFINISHED_CHARS_MAX` tokens.
    """

    __slots__ = ("_emitted", "_ids", "_num_read", "_skip_special_tokens", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._ids: list[int] = []
        self._num_read = 0
        """The first so many of `_ids` are emitted whole; they are kept as context."""
        self._emitted = ""
        """Their decoding."""

    def push(self, token: int) -> str:
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids, self._skip_special_tokens)
        waiting = len(self._ids) - self._num_read
        if text.endswith(REPLACEMENT) and waiting < UNFINISHED_CHARS_MAX:
            return ""
        return self._emit(text)

    def finish(self) -> str:
        return self._emit(self._tokenizer.decode(self._ids, self._skip_special_tokens))

    def _emit(self, text: str) -> str:
        new = text[len(self._emitted) :]
        self._ids = self._ids[self._num_read :]
        self._num_read = len(self._ids)
        self._emitted = self._tokenizer.decode(self._ids, self._skip_special_tokens)
        return new


class StopStringChecker:
    """Finds the first stop string in a text that comes in pieces, and holds back what may become one.

    First is the match that ends first, and of those the longest: this depends on the text alone, not on how it
    was cut. One Knuth-Morris-Pratt automaton a string, so a character costs O(1) amortised, however long the
    strings are, and the text held back is the longest one any automaton has matched so far.
    """

    __slots__ = ("_failures", "_first_chars", "_held", "_include", "_states", "_stops")

    def __init__(self, stop: Sequence[str], include_stop_str_in_output: bool = False) -> None:
        """`stop` are strings of at least one character."""
        self._stops = tuple(stop)
        self._include = include_stop_str_in_output
        self._failures = [_failure_table(text) for text in self._stops]
        self._states = [0] * len(self._stops)
        self._first_chars = frozenset(text[0] for text in self._stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """(text that is safe to show, whether a stop string was found). After a match, push no more."""
        if not self._held and self._first_chars.isdisjoint(text):
            return text, False
        for position, char in enumerate(text):
            length = self._step(char)
            if length:
                whole = self._held + text[: position + 1]
                self._held = ""
                return (whole if self._include else whole[: len(whole) - length]), True
        whole = self._held + text
        kept = len(whole) - max(self._states)
        self._held = whole[kept:]
        return whole[:kept], False

    def finish(self) -> str:
        """What was held back, now that no more text comes."""
        held, self._held = self._held, ""
        return held

    def _step(self, char: str) -> int:
        """Move every automaton by one character; the length of the longest string that ends here, or 0."""
        longest = 0
        for index, stop in enumerate(self._stops):
            state, failure = self._states[index], self._failures[index]
            while state and stop[state] != char:
                state = failure[state - 1]
            if stop[state] == char:
                state += 1
            if state == len(stop):
                longest = max(longest, state)
                state = failure[state - 1]
            self._states[index] = state
        return longest


def _failure_table(text: str) -> list[int]:
    """table[i]: length of the longest proper prefix of text[: i + 1] that is also its suffix."""
    table, length = [0] * len(text), 0
    for index in range(1, len(text)):
        while length and text[index] != text[length]:
            length = table[length - 1]
        if text[index] == text[length]:
            length += 1
        table[index] = length
    return table


class BranchText:
    """The text of one branch of a request: detokenizer and stop strings together.

        text = BranchText(tokenizer, params)
        new_text, stopped = text.push(delta.token_ids, finished=delta.finish_reason is not None)

    `stopped` is true once a stop string was found: the branch's finish reason is "stop", `num_tokens` counts the
    tokens up to the one that completed the match, and later pushes give nothing.
    """

    __slots__ = ("_checker", "_detokenizer", "_include_stop", "_min_tokens", "num_tokens", "stopped")

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, context: Sequence[int] = ()) -> None:
        """`context`: ids before the first whose text was told elsewhere, up to a character that they leave
        unfinished."""
        self._detokenizer = IncrementalDetokenizer(tokenizer, params.skip_special_tokens)
        self._detokenizer.push(context)
        self._checker = (
            StopStringChecker(params.stop, params.include_stop_str_in_output) if params.stop else None
        )
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self.num_tokens = 0
        """Output tokens that count: all pushed, but none after a stop string's last."""
        self.stopped = False

    def push(
        self, token_ids: Sequence[int], finished: bool = False, *, stop_token: bool = False
    ) -> tuple[str, bool]:
        """The new text, and whether a stop string has been found.

        `finished`: no more ids come; what was held back is let go. `stop_token`: the branch ended because the
        last id is an end-of-sequence or stop token; it counts, but its text is left out unless
        `include_stop_str_in_output`.
        """
        if self.stopped:
            return "", True
        shown = token_ids[:-1] if stop_token and not self._include_stop else token_ids
        if self._checker is None:
            self.num_tokens += len(token_ids)
            text = self._detokenizer.push(shown)
            return (text + self._detokenizer.finish() if finished else text), False
        parts = []
        for token in shown:
            self.num_tokens += 1
            parts.append(self._check(self._detokenizer.push((token,))))
            if self.stopped:
                return "".join(parts), True
        self.num_tokens += len(token_ids) - len(shown)
        if finished:
            parts.append(self._check(self._detokenizer.finish()))
            if not self.stopped:
                parts.append(self._checker.finish())
        return "".join(parts), self.stopped

    def _check(self, text: str) -> str:
        """`text` without what a stop string takes or may take; like stop tokens, not before `min_tokens`."""
        assert self._checker is not None
        if self.num_tokens < self._min_tokens:
            return text
        text, self.stopped = self._checker.push(text)
        return text
