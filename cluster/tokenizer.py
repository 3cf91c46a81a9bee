"""Text to token ids and back, from a model's tokenizer.json, with neither torch nor transformers imported.

Owns the tokenizer, its chat template and the exact bytes of every token. Knows nothing of HTTP or requests.
Ids and rendered prompts equal those of `transformers.AutoTokenizer` on the same folder; so does `decode`, except
that an invalid run of byte-fallback pieces decodes like invalid UTF-8 anywhere else (the library turns the whole
run into U+FFFD, which no stream could know in advance).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from octavo.cluster.chat_template import ChatTemplate
from octavo.protos.errors import InvalidRequestError
from octavo.worker.token_bytes import BytePieces, byte_pieces
from octavo.worker.tokenizer_files import read_json_object, read_tokenizer

Result = TypeVar("Result")

NUM_THREADS_MAX = 4
"""Encoding runs outside the GIL, but more threads than this take cores from the model on one machine."""


class Tokenizer:
    """One model's tokenizer. All methods are thread-safe; `run` takes work off the event loop."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        """Reads `tokenizer.json` and what stands beside it in `folder`. Raises `ModelLoadError` naming the path."""
        self.folder = Path(folder)
        files = read_tokenizer(self.folder)
        self._tokenizer = files.tokenizer
        self.special_tokens = files.special_tokens
        """Named special tokens, "bos_token" and so on, as the chat template sees them."""
        self.special_ids = files.special_ids
        self.vocab_size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        """Ids the tokenizer knows; the model's own vocabulary may be padded beyond."""
        self.eos_token_ids: tuple[int, ...] = self._read_eos_ids()
        self.pieces: BytePieces | None = byte_pieces(self._tokenizer)
        """Exact bytes of every token; None for the rare decoder that does not work token by token."""
        source = self._read_chat_template(files.config)
        self.chat_template = ChatTemplate(source, self.special_tokens) if source is not None else None
        self._pool = ThreadPoolExecutor(
            max_workers=min(NUM_THREADS_MAX, os.cpu_count() or 1), thread_name_prefix="tokenizer"
        )
        self._max_piece_bytes: int | None = None

    def _read_eos_ids(self) -> tuple[int, ...]:
        """The configured end-of-sequence token, then those that generation_config.json adds."""
        ids: list[int] = []
        if (text := self.special_tokens.get("eos_token")) is not None:
            index = self._tokenizer.token_to_id(text)
            ids += [index] if index is not None else []
        more = read_json_object(self.folder / "generation_config.json").get("eos_token_id") or []
        ids += [index for index in (more if isinstance(more, list) else [more]) if isinstance(index, int)]
        return tuple(dict.fromkeys(ids))

    def _read_chat_template(self, config: Mapping[str, Any]) -> str | None:
        """A file of its own goes before the configuration; of several named templates, "default"."""
        path = self.folder / "chat_template.jinja"
        if path.is_file():
            return path.read_text(encoding="utf-8")
        template = config.get("chat_template")
        if isinstance(template, list):
            template = {entry["name"]: entry["template"] for entry in template}
        if isinstance(template, dict):
            template = template.get("default")
        return template if isinstance(template, str) else None

    def close(self) -> None:
        """Stop the threads. Encoding in progress is finished first."""
        self._pool.shutdown(wait=True)

    # ---- text to ids

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`; with `add_special_tokens` what the model puts around every text (BOS, EOS)."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The prompt text of `messages`, whose contents are strings; `kwargs` are extra template variables, `tools`
        those that the model may call.

        Raises `InvalidRequestError` when the model has no chat template or its template refuses them.
        """
        if self.chat_template is None:
            raise InvalidRequestError(
                "this model has no chat template; use /v1/completions with a prompt", param="messages"
            )
        return self.chat_template.render(
            messages, add_generation_prompt=add_generation_prompt, kwargs=kwargs, tools=tools
        )

    async def run(self, work: Callable[[], Result]) -> Result:
        """`work()` in the thread pool: what keeps tokenising and rendering off the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def fewest_tokens(self, text: str) -> int:
        """A lower bound of `len(encode(text))` that costs next to nothing.

        No token stands for more bytes than the longest piece has; the factor 4 allows for normalisers that
        shorten text and for added tokens that swallow white space beside them.
        """
        if self._max_piece_bytes is None:
            self._max_piece_bytes = max(len(piece.encode()) for piece in self._tokenizer.get_vocab())
        return len(text) // (4 * self._max_piece_bytes)

    # ---- ids to text

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids` on their own. Ids that the tokenizer does not know are left out.

        What an incremental detokenizer emits for `ids`, joined, is `continuation(ids)`.
        """
        if self.pieces is None:
            text: str = self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
            return text
        return self.pieces.trim_start(self.continuation(ids, skip_special_tokens))

    def continuation(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text that `ids` add after a prompt.

        Equals `decode(ids)` unless the decoder trims a text's first space (SentencePiece): that space belongs
        between a prompt and what follows it.
        """
        if self.pieces is None:
            return self.decode(ids, skip_special_tokens)
        return self.join(ids, skip_special_tokens).decode("utf-8", errors="replace")

    def join(self, ids: Sequence[int], skip_special_tokens: bool = True) -> bytes:
        """The bytes of `ids`, special tokens skipped if asked."""
        token_bytes = self.token_bytes
        if skip_special_tokens:
            special = self.special_ids
            return b"".join([token_bytes(index) for index in ids if index not in special])
        return b"".join(map(token_bytes, ids))

    def token_bytes(self, index: int) -> bytes:
        """Exact bytes of one token, also where it holds a part of a character; b"" for an unknown id."""
        if self.pieces is not None:
            return self.pieces.of(index)
        return self._tokenizer.decode([index], skip_special_tokens=False).encode()

    def token_text(self, index: int) -> str:
        """One token for people: its text, or "bytes:\\xe2\\x82" when it holds a part of a character."""
        raw = self.token_bytes(index)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def token_to_id(self, token: str) -> int | None:
        """The id of the piece written exactly `token` in the vocabulary, or None."""
        index: int | None = self._tokenizer.token_to_id(token)
        return index
