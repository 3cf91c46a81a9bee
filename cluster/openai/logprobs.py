"""Log-probabilities in the two shapes of OpenAI's API: chat's list of tokens, and completions' parallel lists.

Owns how a token, its bytes and an impossible token are written. Knows nothing of where they come from.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from octavo.cluster.tokenizer import Tokenizer
from octavo.protos.types import TokenLogprobs

VERY_UNLIKELY = -9999.0
"""OpenAI's number for a probability too small to say; JSON has no minus infinity."""


def _finite(logprob: float) -> float:
    return logprob if logprob > VERY_UNLIKELY else VERY_UNLIKELY


class LogprobWriter:
    """Writes the log-probabilities of one choice, in order."""

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special_tokens: bool, with_ids: bool, offset: int = 0
    ) -> None:
        """`with_ids`: add `top_token_ids`, for callers that asked for ids. `offset`: characters of the text before
        this choice's first token (an echoed prompt)."""
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._with_ids = with_ids
        self._offset = offset
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def chat(
        self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs], num_top: int
    ) -> dict[str, Any]:
        """`choices[].logprobs` of a chat: one entry a token, its bytes exact, so that joined they are the text.

        A special token that the text leaves out has no bytes.
        """
        content = []
        for token, entry in zip(token_ids, entries, strict=True):
            tops = zip(entry.top_ids[:num_top], entry.top_logprobs[:num_top], strict=True)
            content.append(
                {
                    **self._chat_token(token, entry.logprob),
                    "top_logprobs": [self._chat_token(top, logprob) for top, logprob in tops],
                }
            )
        return self._with_top_ids({"content": content, "refusal": None}, entries, num_top)

    def _chat_token(self, token: int, logprob: float) -> dict[str, Any]:
        hidden = self._skip_special_tokens and token in self._tokenizer.special_ids
        raw = self._tokenizer.token_bytes(token)
        return {
            "token": raw.decode("utf-8", errors="replace"),
            "logprob": _finite(logprob),
            "bytes": [] if hidden else list(raw),
        }

    def completion(
        self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs], num_top: int
    ) -> dict[str, Any]:
        """`choices[].logprobs` of a completion: parallel lists; a part of a character is "bytes:\\xe2\\x82".

        `top_logprobs` has the likeliest `num_top` and always the chosen token, so up to one more.
        """
        text_of = self._tokenizer.token_text
        offsets, tops = [], []
        for token, entry in zip(token_ids, entries, strict=True):
            offsets.append(self._offset)
            self._offset += len(
                self._utf8.decode(
                    self._tokenizer.join((token,), skip_special_tokens=self._skip_special_tokens)
                )
            )
            top = {
                text_of(index): _finite(logprob)
                for index, logprob in zip(entry.top_ids[:num_top], entry.top_logprobs[:num_top], strict=True)
            }
            top.setdefault(text_of(token), _finite(entry.logprob))
            tops.append(top)
        block = {
            "tokens": [text_of(token) for token in token_ids],
            "token_logprobs": [_finite(entry.logprob) for entry in entries],
            "top_logprobs": tops,
            "text_offset": offsets,
        }
        return self._with_top_ids(block, entries, num_top)

    def prompt(
        self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs], num_top: int
    ) -> dict[str, Any]:
        """As `completion`, of an echoed prompt: nothing foretells its first token, which has null for numbers."""
        block = self.completion(token_ids, [TokenLogprobs(0.0), *entries], num_top)
        for name in ("token_logprobs", "top_logprobs"):
            block[name][0] = None
        return block

    def prompt_tokens(
        self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs], num_top: int
    ) -> list[dict[str, Any] | None]:
        """`prompt_logprobs` in vLLM's shape: one object a token, from ids as strings to numbers; null for the first.

        `rank` is null for a token that is not among the likeliest which were asked for."""
        told: list[dict[str, Any] | None] = [None]
        for token, entry in zip(token_ids[1:], entries, strict=True):
            ranked = zip(entry.top_ids[:num_top], entry.top_logprobs[:num_top], strict=True)
            found = {
                str(index): self._ranked(index, logprob, rank)
                for rank, (index, logprob) in enumerate(ranked, 1)
            }
            found.setdefault(str(token), self._ranked(token, entry.logprob, None))
            told.append(found)
        return told

    def _ranked(self, index: int, logprob: float, rank: int | None) -> dict[str, Any]:
        return {"logprob": _finite(logprob), "rank": rank, "decoded_token": self._tokenizer.token_text(index)}

    def _with_top_ids(
        self, block: dict[str, Any], entries: Sequence[TokenLogprobs], num_top: int
    ) -> dict[str, Any]:
        if self._with_ids:
            block["top_token_ids"] = [list(entry.top_ids[:num_top]) for entry in entries]
        return block
