"""Reads the JSON object of a tool call while it comes: its name once that is whole, its arguments as they stand.

Owns one rule: what the model wrote as arguments goes on character by character and is never read and written again,
so that numbers, order, repeated keys and escapes stay what they were. Knows nothing of the markers around calls.
"""

from __future__ import annotations

import json

_ARGUMENTS = ("arguments", "parameters")
_SPACE = " \t\r\n"


class CallReader:
    """One object. `push` until `done` or `broken`; `name` and `take_arguments` say what is known so far."""

    __slots__ = (
        "_arguments",
        "_bare",
        "_depth",
        "_escaped",
        "_in_string",
        "_key",
        "_taken",
        "_token",
        "_wants",
        "broken",
        "done",
        "name",
        "raw",
    )

    def __init__(self, name: str | None = None) -> None:
        """`name`: it stood before, and the object is the arguments alone."""
        self.raw: list[str] = []
        """All that was pushed and used, in pieces."""
        self.name = name
        self.done = False
        """The object is closed. It is a call if it has a name."""
        self.broken = False
        """No JSON object, or one whose name is no string."""
        self._arguments: list[str] = []
        self._taken = False
        self._bare = name is not None
        self._depth = int(self._bare)
        self._in_string = False
        self._escaped = False
        self._key = "arguments" if self._bare else ""
        self._token: list[str] = []
        """The key or value at depth 1 that is being read."""
        self._wants = "value" if self._bare else "open"
        """open, key, colon, value, rest (of a scalar or composite), comma."""

    def push(self, text: str) -> int:
        """Read on; returns how many characters were used: all of them, unless the object ends before."""
        for index, char in enumerate(text):
            self._read(char)
            if self.done or self.broken:
                self.raw.append(text[: index + 1])
                return index + 1
        self.raw.append(text)
        return len(text)

    def take_arguments(self) -> str:
        """What has come of the arguments since the last call; "{}" at the end where there are none."""
        text = "".join(self._arguments)
        self._arguments.clear()
        if self.done and not text and not self._taken:
            text = "{}"
        self._taken = self._taken or bool(text)
        return text

    def _read(self, char: str) -> None:
        if self._in_string:
            self._read_string(char)
        elif self._wants == "rest":
            self._read_rest(char)
        elif char in _SPACE:
            pass
        elif self._wants == "value":
            self._begin_value(char)
        elif self._wants in ("key", "comma") and char == "}":
            self._depth, self.done = 0, True
        elif (self._wants, char) == ("open", "{"):
            self._depth, self._wants = 1, "key"
        elif (self._wants, char) == ("key", '"'):
            self._in_string, self._token = True, [char]
        elif (self._wants, char) == ("colon", ":"):
            self._wants = "value"
        elif (self._wants, char) == ("comma", ","):
            self._wants = "key"
        else:
            self.broken = True

    def _begin_value(self, char: str) -> None:
        self._token, self._wants = [], "rest"
        if char in "{[":
            self._depth += 1
        elif char == '"':
            self._in_string = True
        elif char in "}],:":
            self.broken = True
        self._value_char(char)

    def _read_string(self, char: str) -> None:
        key = self._wants == "key"
        if key:
            self._token.append(char)
        else:
            self._value_char(char)
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._in_string = False
            if key:
                self._key, self._wants = str(_decoded(self._token)), "colon"
            elif self._depth == 1:
                self._end_value()

    def _read_rest(self, char: str) -> None:
        """Within a value at depth 1, outside of strings."""
        if self._depth == 1:
            # A number or a word: whatever cannot be part of it ends it.
            if char in _SPACE or char in ",}":
                self._end_value()
                self._read(char)
                return
            if char in '{["':
                self.broken = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
        elif char == '"':
            self._in_string = True
        self._value_char(char)
        if self._depth == 1 and char in "}]":
            self._end_value()

    def _value_char(self, char: str) -> None:
        self._token.append(char)
        if self._key in _ARGUMENTS and self._token[0] in "{[":
            self._arguments.append(char)

    def _end_value(self) -> None:
        self._wants, self.done = "comma", self._bare
        if self._key == "name":
            name = _decoded(self._token)
            if isinstance(name, str) and name:
                self.name = name
            else:
                self.broken = True
        elif self._key in _ARGUMENTS and self._token[0] not in "{[":
            # Some models write the arguments as a string of JSON, or null.
            value = _decoded(self._token)
            if isinstance(value, str):
                self._arguments.append(value)
            elif value is not None:
                self._arguments.append("".join(self._token))


def _decoded(token: list[str]) -> object:
    try:
        return json.loads("".join(token))
    except ValueError:
        return None
