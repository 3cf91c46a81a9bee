"""What models write when they call tools, made into calls while it comes.

Owns the markers of each family of chat templates. A parser gets the text of one choice in pieces, cut anywhere, and
gives content and calls; however it is cut, the joined pieces are the same. Text that looks like a call and is none
goes on as content. Knows nothing of OpenAI's JSON.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from octavo.cluster.openai.call_json import CallReader

_SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of what a choice says."""

    text: str
    """Content, or more of a call's arguments."""
    call: int | None = None
    """Number of the call; None: content."""
    name: str | None = None
    """With the first piece of a call."""


class ToolParser(Protocol):
    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that may be single special tokens, which then must not be left out of the text."""
        ...

    def push(self, text: str) -> list[Piece]:
        """What `text` completes."""
        ...

    def finish(self) -> list[Piece]:
        """What was held back."""
        ...


class _Parser:
    """Common to all: the text that waits, the call that is being read, the numbers of calls."""

    markers: tuple[str, ...] = ()

    def __init__(self) -> None:
        self._text = ""
        self._space = ""
        """White space after content: its end if more comes, the layout of a call if one does."""
        self._reader: CallReader | None = None
        self._prefix = ""
        """What stood before the object that is being read, for the case that it is no call."""
        self._count = 0
        self._began = False
        """Whether the call that is being read has been told."""
        self._pieces: list[Piece] = []

    def push(self, text: str) -> list[Piece]:
        self._text += text
        while self._text and (self._read_call() if self._reader is not None else self._read()):
            pass
        return self._taken()

    def finish(self) -> list[Piece]:
        if self._reader is not None and not self._began:
            self._give_up()
        self._content(self._rest())
        self._text = ""
        if self._count == 0 and self._reader is None and self._space:
            self._pieces.append(Piece(self._space))
        return self._taken()

    def _taken(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return pieces

    def _read(self) -> bool:
        """Go on outside of calls; False when more text is needed."""
        raise NotImplementedError

    def _rest(self) -> str:
        """What of the waiting text is content, when no more comes."""
        return self._text

    def _content(self, text: str) -> None:
        shown = (self._space + text).rstrip(_SPACE)
        self._space = (self._space + text)[len(shown) :]
        if shown:
            self._pieces.append(Piece(shown))

    def _begin_call(self, prefix: str, name: str | None = None) -> None:
        self._reader, self._began, self._prefix = CallReader(name), False, prefix

    def _read_call(self) -> bool:
        reader = self._reader
        assert reader is not None
        self._text = self._text[reader.push(self._text) :]
        if reader.name is not None and not reader.broken:
            if not self._began:
                self._began, self._space = True, ""
                self._pieces.append(Piece("", self._count, reader.name))
            if arguments := reader.take_arguments():
                self._pieces.append(Piece(arguments, self._count))
        if (reader.done or reader.broken) and self._began:
            # One that breaks later has been told as a call, as far as it went.
            self._count += 1
            self._reader = None
        elif reader.done or reader.broken:
            self._give_up()
        return True

    def _give_up(self) -> None:
        """What was read is no call."""
        assert self._reader is not None
        self._content(self._prefix + "".join(self._reader.raw))
        self._reader = None

    def _until(self, marker: str) -> bool:
        """Give the text before `marker` as content and take the marker; False, keeping what may become it, when it is
        not there."""
        before, found, after = self._text.partition(marker)
        if not found:
            kept = _overlap(self._text, marker)
            before, after = self._text[: len(self._text) - kept], self._text[len(self._text) - kept :]
        self._text = after
        self._content(before)
        return bool(found)


class HermesParser(_Parser):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number: Hermes, Qwen 2.5 and 3."""

    markers = ("<tool_call>", "</tool_call>")

    def __init__(self) -> None:
        super().__init__()
        self._closing = False

    def _read(self) -> bool:
        opening, closing = self.markers
        if self._closing:
            rest = self._text.lstrip(_SPACE)
            if closing.startswith(rest) and rest != closing:
                return False
            # A model may forget it.
            self._closing, self._text = False, rest.removeprefix(closing)
        elif self._until(opening):
            self._begin_call(opening)
            self._closing = True
        else:
            return False
        return True

    def _give_up(self) -> None:
        super()._give_up()
        self._closing = False

    def _rest(self) -> str:
        return "" if self._closing else self._text


class Llama3Parser(_Parser):
    """`{"name": ..., "parameters": {...}}` from the first character on, several separated by `;`."""

    markers = ("<|python_tag|>",)

    def __init__(self) -> None:
        super().__init__()
        self._all_content = False

    def _read(self) -> bool:
        if self._all_content:
            self._content(self._text)
            self._text = ""
            return False
        tag = self.markers[0]
        rest = self._text.lstrip(_SPACE + ";" if self._count else _SPACE)
        if tag.startswith(rest) and rest != tag:
            return False
        rest = rest.removeprefix(tag).lstrip(_SPACE)
        if not rest:
            return False
        if rest[0] == "{":
            held, self._text = self._text[: len(self._text) - len(rest)], rest
            self._begin_call(held)
        else:
            self._all_content = True
        return True

    def _give_up(self) -> None:
        super()._give_up()
        self._all_content = True

    def _rest(self) -> str:
        return "" if self._count and not self._text.strip(_SPACE + ";") else self._text


class ArrayParser(_Parser):
    """`[{"name": ..., "arguments": {...}}, ...]` and nothing else: what calls that must come are held to."""

    def _read(self) -> bool:
        self._text = self._text.lstrip(_SPACE + "[,]")
        if not self._text:
            return False
        self._begin_call("")
        return True


class MistralParser(_Parser):
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, or `[TOOL_CALLS]name[ARGS]{...}`, any number."""

    markers = ("[TOOL_CALLS]", "[ARGS]")

    def __init__(self) -> None:
        super().__init__()
        self._inside = False
        self._in_list = False

    def _read(self) -> bool:
        marker, args = self.markers
        if not self._inside:
            self._inside, self._in_list = self._until(marker), False
            return self._inside
        rest = self._text = self._text.lstrip(_SPACE)
        if not rest or (not self._in_list and marker.startswith(rest) and rest != marker):
            return False
        if rest[0] == "{":
            self._begin_call(marker)
        elif self._in_list or (rest[0] == "[" and not rest.startswith(marker)):
            # Whatever else stands between the calls of a list is broken, and no content either.
            self._in_list, self._inside, self._text = True, rest[0] != "]", rest[1:]
        elif rest.startswith(marker):
            self._text = rest.removeprefix(marker)
        elif "{" in rest:
            head = rest[: rest.index("{")]
            self._text = rest[len(head) :]
            self._begin_call(marker + head, head.removesuffix(args).strip(_SPACE) or None)
        else:
            return False
        return True


class NamedParser:
    """The whole text is the arguments of one call that was named beforehand."""

    markers: tuple[str, ...] = ()

    def __init__(self, name: str) -> None:
        self._name: str | None = name

    def push(self, text: str) -> list[Piece]:
        if not text:
            return []
        begin = [Piece("", 0, self._name)] if self._name is not None else []
        self._name = None
        return [*begin, Piece(text, 0)]

    def finish(self) -> list[Piece]:
        return []


def _overlap(text: str, marker: str) -> int:
    """Length of the longest end of `text` that `marker` begins with."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0


TOOL_PARSERS: dict[str, Callable[[], ToolParser]] = {
    "hermes": HermesParser,
    "qwen": HermesParser,
    "llama3_json": Llama3Parser,
    "mistral": MistralParser,
}


def parser_of_template(source: str) -> str | None:
    """Name of the parser for what a chat template teaches; None when it is none of these."""
    if "[TOOL_CALLS]" in source:
        return "mistral"
    if "<function=" in source:
        return None  # Qwen3-Coder's own form, which is no JSON
    if "<tool_call>" in source:
        return "hermes"
    if "<|python_tag|>" in source:
        return "llama3_json"
    return None
