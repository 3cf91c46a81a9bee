"""Chat completions: how a choice of a chat is written, whole and in chunks."""

from __future__ import annotations

from typing import Any

from octavo.cluster.openai.generation import Update
from octavo.cluster.openai.logprobs import LogprobWriter
from octavo.cluster.openai.schemas import ChatCall


class ChatShape:
    """`rendering.Shape` of /v1/chat/completions."""

    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, call: ChatCall) -> None:
        self._num_top = call.params.logprobs or 0

    def chunk(self, update: Update, logprobs: dict[str, Any] | None, first: bool) -> list[dict[str, Any]]:
        choices = []
        if first:
            choices.append(_chunk(update.index, {"role": "assistant", "content": ""}, None, None))
        if not first or update.text or logprobs or update.finish_reason:
            delta = {"content": update.text} if update.text or logprobs else {}
            choices.append(_chunk(update.index, delta, logprobs, update.finish_reason))
        return choices

    def choice(self, update: Update, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        return {
            "index": update.index,
            "message": {"role": "assistant", "content": update.text, "refusal": None},
            "logprobs": logprobs,
            "finish_reason": update.finish_reason,
        }

    def logprobs(self, writer: LogprobWriter, update: Update) -> dict[str, Any]:
        return writer.chat(update.token_ids, update.logprobs, self._num_top)

    def echoed(self, index: int) -> str:
        return ""


def _chunk(
    index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None, finish_reason: str | None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
