"""OpenAI's responses as JSON: one message of text, whole or as typed events.

Owns the fields of a response and the order of its events. Knows nothing of how a call is read (`schemas.py`) or sent
(`sse.py`). Nothing is kept: a response can be neither fetched nor gone on from by its id.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from octavo.cluster.openai.generation import Generation, Update
from octavo.cluster.openai.schemas import ChatCall
from octavo.protos.types import FinishReason, Request


class ResponseRenderer:
    """Makes the JSON of one response. Implements `sse.Renderer`."""

    def __init__(self, call: ChatCall, request: Request, *, model_name: str) -> None:
        self._item_id = request.request_id.replace("resp-", "msg-", 1)
        self._text = ""
        self._finish_reason: str | None = None
        self._num_events = 0
        params = request.params
        self._frame: dict[str, Any] = {
            "id": request.request_id,
            "object": "response",
            "created_at": int(time.time()),
            "model": model_name,
            "instructions": call.instructions,
            "max_output_tokens": call.params.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "background": False,
            "metadata": {},
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "text": {"format": call.text_format},
            "tool_choice": "none",
            "tools": [],
            "top_logprobs": 0,
            "truncation": "disabled",
        }

    def first(self) -> bytes:
        begun = self._response("in_progress")
        return (
            self._event("response.created", response=begun)
            + self._event("response.in_progress", response=begun)
            + self._event("response.output_item.added", output_index=0, item=self._item("in_progress"))
            + self._part_event("response.content_part.added", part=_part(""))
        )

    def updates(self, updates: Sequence[Update], generation: Generation) -> bytes:
        delta = "".join(update.text for update in updates)
        self._take(updates)
        return self._part_event("response.output_text.delta", delta=delta, logprobs=[]) if delta else b""

    def last(self, generation: Generation) -> bytes:
        status = self._status()
        return (
            self._part_event("response.output_text.done", text=self._text, logprobs=[])
            + self._part_event("response.content_part.done", part=_part(self._text))
            + self._event("response.output_item.done", output_index=0, item=self._item(status))
            + self._event(f"response.{status}", response=self._response(status, generation))
        )

    def failed(self, error: Mapping[str, Any]) -> bytes:
        told = {"code": "server_error", "message": error["message"]}
        return self._event("response.failed", response={**self._response("failed"), "error": told})

    def whole(self, updates: Sequence[Update], generation: Generation) -> bytes:
        self._take(updates)
        return orjson.dumps(self._response(self._status(), generation))

    def _take(self, updates: Sequence[Update]) -> None:
        for update in updates:
            self._text += update.text
            self._finish_reason = update.finish_reason or self._finish_reason

    def _status(self) -> str:
        return "incomplete" if self._finish_reason == FinishReason.LENGTH.value else "completed"

    def _response(self, status: str, generation: Generation | None = None) -> dict[str, Any]:
        """`generation`: of one that has ended."""
        ended = generation is not None
        return {
            **self._frame,
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": [self._item(status)] if ended else [],
            "usage": _usage(generation) if generation is not None else None,
        }

    def _item(self, status: str) -> dict[str, Any]:
        return {
            "id": self._item_id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": [] if status == "in_progress" else [_part(self._text)],
        }

    def _part_event(self, kind: str, **fields: Any) -> bytes:
        return self._event(kind, item_id=self._item_id, output_index=0, content_index=0, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        payload = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps(payload) + b"\n\n"


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(generation: Generation) -> dict[str, Any]:
    usage = generation.usage()
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
