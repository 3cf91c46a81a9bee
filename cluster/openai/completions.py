"""Text completions: how a choice of a completion is written, whole and in chunks, with the prompt echoed if asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from octavo.cluster.openai.generation import Update
from octavo.cluster.openai.logprobs import LogprobWriter
from octavo.cluster.openai.prompts import Prompt
from octavo.cluster.openai.schemas import Call, CompletionCall
from octavo.cluster.tokenizer import Tokenizer


def echoes_of(call: CompletionCall, prompts: Sequence[Prompt], tokenizer: Tokenizer) -> list[str] | None:
    """The prompts' texts when `call` asks for them."""
    if not call.echo:
        return None
    return [
        prompt.text if prompt.text is not None else tokenizer.decode(prompt.token_ids.tolist(), False)
        for prompt in prompts
    ]


class CompletionShape:
    """`rendering.Shape` of /v1/completions and /v1/fork."""

    object = "text_completion"
    chunk_object = "text_completion"
    one_prompt = False

    def __init__(self, call: Call, echoes: Sequence[str] | None = None) -> None:
        """`echoes`: one text a prompt, to go before its choices; None: none is asked for."""
        self._n = call.params.n
        self._num_top = call.params.logprobs or 0
        self._echoes = echoes
        self.echoes = echoes is not None

    def chunk(self, update: Update, logprobs: dict[str, Any] | None, first: bool) -> list[dict[str, Any]]:
        text = self.echoed(update.index) + update.text if first else update.text
        return [_choice(update, text, logprobs)]

    def choice(self, update: Update, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        return _choice(update, self.echoed(update.index) + update.text, logprobs)

    def logprobs(self, writer: LogprobWriter, update: Update) -> dict[str, Any]:
        return writer.completion(update.token_ids, update.logprobs, self._num_top)

    def echoed(self, index: int) -> str:
        return "" if self._echoes is None else self._echoes[index // self._n]


def _choice(update: Update, text: str, logprobs: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "index": update.index,
        "text": text,
        "logprobs": logprobs,
        "finish_reason": update.finish_reason,
    }
