"""Chat completions: how a choice of a chat is written, whole and in chunks, calls of tools included."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable
from typing import Any

from octavo.cluster.openai.generation import Update
from octavo.cluster.openai.logprobs import LogprobWriter
from octavo.cluster.openai.schemas import ChatCall
from octavo.cluster.openai.tool_parsers import Piece, ToolParser
from octavo.protos.types import FinishReason

TOOL_CALLS = "tool_calls"
"""Finish reason of a choice that ended with calls."""
_ID_CHARS = string.ascii_letters + string.digits
_ID_LENGTH = 9
"""Templates of Mistral take ids of no other length; no other template minds."""


class ChatShape:
    """`rendering.Shape` of /v1/chat/completions."""

    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    echoes = False
    one_prompt = True

    def __init__(self, call: ChatCall, make_parser: Callable[[], ToolParser] | None = None) -> None:
        """`make_parser`: of the calls that one choice makes; None where no tools may be called."""
        self._num_top = call.params.logprobs or 0
        self._tells_ids = call.return_token_ids
        self._make_parser = make_parser
        self._parallel = call.tools is None or call.tools.parallel
        self._parsers: dict[int, ToolParser] = {}
        self._called: set[int] = set()
        """Choices that have called a tool."""

    def chunk(self, update: Update, logprobs: dict[str, Any] | None, first: bool) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = []
        if first:
            deltas.append({"role": "assistant", "content": ""})
        deltas += [self._delta(piece) for piece in self._pieces(update)]
        if len(deltas) == first and (logprobs or update.finish_reason or (self._tells_ids and not first)):
            deltas.append({"content": ""} if logprobs else {})
        choices = [_chunk(update.index, delta, None, None) for delta in deltas]
        if choices:
            choices[-1]["logprobs"] = logprobs
            choices[-1]["finish_reason"] = self._finish_reason(update)
        return choices

    def choice(self, update: Update, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        content, calls = "", []
        for piece in self._pieces(update):
            if piece.call is None:
                content += piece.text
            elif piece.name is not None:
                calls.append(_call(piece))
            else:
                calls[piece.call]["function"]["arguments"] += piece.text
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message = {**message, "content": content or None, "tool_calls": calls}
        return {
            "index": update.index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": self._finish_reason(update),
        }

    def logprobs(self, writer: LogprobWriter, update: Update) -> dict[str, Any]:
        return writer.chat(update.token_ids, update.logprobs, self._num_top)

    def echoed(self, index: int) -> str:
        return ""

    def _pieces(self, update: Update) -> list[Piece]:
        """What `update` says: content and calls."""
        if self._make_parser is None:
            return [Piece(update.text)] if update.text else []
        parser = self._parsers.get(update.index)
        if parser is None:
            parser = self._parsers[update.index] = self._make_parser()
        pieces = parser.push(update.text)
        if update.finish_reason is not None:
            pieces += parser.finish()
        if any(piece.call is not None for piece in pieces):
            self._called.add(update.index)
        # A model that was told to make one call may make more.
        return [piece for piece in pieces if self._parallel or not piece.call]

    def _delta(self, piece: Piece) -> dict[str, Any]:
        if piece.call is None:
            return {"content": piece.text}
        if piece.name is not None:
            return {"tool_calls": [{"index": piece.call, **_call(piece)}]}
        return {"tool_calls": [{"index": piece.call, "function": {"arguments": piece.text}}]}

    def _finish_reason(self, update: Update) -> str | None:
        called = update.index in self._called and update.finish_reason == FinishReason.STOP.value
        return TOOL_CALLS if called else update.finish_reason


def _call(piece: Piece) -> dict[str, Any]:
    made = "".join(secrets.choice(_ID_CHARS) for _ in range(_ID_LENGTH))
    return {"id": made, "type": "function", "function": {"name": piece.name, "arguments": piece.text}}


def _chunk(
    index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None, finish_reason: str | None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
