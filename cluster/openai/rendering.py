"""What chat and text completions have in common as JSON: the frame around the choices, usage, echoes of ids.

Owns the fields of a reply that are the same in all chunks of a stream; they are written once a call. Knows nothing
of sockets.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol

import orjson

from octavo._version import __version__
from octavo.cluster.openai.generation import Generation, Update
from octavo.cluster.openai.logprobs import LogprobWriter
from octavo.cluster.openai.prompts import Prompt
from octavo.cluster.openai.schemas import Call
from octavo.cluster.openai.sse import DONE, event
from octavo.cluster.tokenizer import Tokenizer

FINGERPRINT = f"octavo-{__version__}"


class Shape(Protocol):
    """What differs: the objects' names and how a choice is written."""

    object: str
    """Of a whole reply."""
    chunk_object: str

    def chunk(self, update: Update, logprobs: dict[str, Any] | None, first: bool) -> list[dict[str, Any]]:
        """The choices, each for an event of its own, that tell `update`; `first`: nothing was told before."""
        ...

    def choice(self, update: Update, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        """A finished choice."""
        ...

    def logprobs(self, writer: LogprobWriter, update: Update) -> dict[str, Any]:
        """The log-probabilities of `update`'s tokens."""
        ...

    def echoed(self, index: int) -> str:
        """Text that goes before choice `index`'s own."""
        ...


class JsonRenderer:
    """Makes the JSON of one call. Implements `sse.Renderer`."""

    def __init__(
        self,
        shape: Shape,
        call: Call,
        prompts: Sequence[Prompt],
        tokenizer: Tokenizer,
        *,
        call_id: str,
        model_name: str,
        extensions: Mapping[str, Any] | None = None,
    ) -> None:
        """`extensions`: fields of ours that every object carries."""
        self._shape = shape
        self._call = call
        self._prompts = prompts
        self._tokenizer = tokenizer
        self._writers: dict[int, LogprobWriter] = {}
        self._started: set[int] = set()
        self._frame = {
            "id": call_id,
            "object": shape.chunk_object if call.stream else shape.object,
            "created": int(time.time()),
            "model": model_name,
            "system_fingerprint": FINGERPRINT,
            **(extensions or {}),
        }
        # A stream repeats the frame in every event, so it is written once; only choices differ.
        self._chunk_head = orjson.dumps(self._frame)[:-1] + b',"choices":['
        self._chunk_tail = b'],"usage":null}' if call.include_usage else b"]}"

    def first(self) -> bytes:
        """Nothing: every choice opens with its own first update."""
        return b""

    def updates(self, updates: Sequence[Update]) -> bytes:
        events = []
        for update in updates:
            first = update.index not in self._started
            self._started.add(update.index)
            logprobs = self._logprobs(update) if self._wants_logprobs and update.token_ids else None
            tells_ids = self._call.return_token_ids and (update.token_ids or first)
            if not (first or update.text or update.finish_reason or logprobs or tells_ids):
                continue  # a part of a character, or what may become a stop string: nothing to tell yet
            choices = self._shape.chunk(update, logprobs, first)
            if not choices:
                continue  # what may become the call of a tool, likewise
            _add_score(choices[-1], update)
            if self._call.return_token_ids:
                self._add_ids(choices[-1], update, with_prompt=first)
            events += [
                event(self._chunk_head + orjson.dumps(choice) + self._chunk_tail) for choice in choices
            ]
        return b"".join(events)

    def last(self, generation: Generation) -> bytes:
        if not self._call.include_usage:
            return DONE
        usage = {**self._frame, "choices": [], "usage": generation.usage().as_dict()}
        return event(orjson.dumps(usage)) + DONE

    def failed(self, error: Mapping[str, Any]) -> bytes:
        """The error as an event; without [DONE], so that nobody takes the answer for a whole one."""
        return event(orjson.dumps({"error": error}))

    def whole(self, updates: Sequence[Update], generation: Generation) -> bytes:
        choices = []
        for update in updates:
            choice = self._shape.choice(update, self._logprobs(update) if self._wants_logprobs else None)
            _add_score(choice, update)
            if self._call.return_token_ids:
                self._add_ids(choice, update, with_prompt=True)
            choices.append(choice)
        reply = {**self._frame, "choices": choices, "usage": generation.usage().as_dict()}
        if self._call.return_token_ids and len(self._prompts) == 1:
            reply["prompt_token_ids"] = self._prompts[0].token_ids.tolist()
            if (metrics := generation.request_metrics()[0]) is not None:
                reply["metrics"] = asdict(metrics)
        return orjson.dumps(reply)

    @property
    def _wants_logprobs(self) -> bool:
        return self._call.params.logprobs is not None

    def _logprobs(self, update: Update) -> dict[str, Any]:
        writer = self._writers.get(update.index)
        if writer is None:
            writer = self._writers[update.index] = LogprobWriter(
                self._tokenizer,
                skip_special_tokens=self._call.params.skip_special_tokens,
                with_ids=self._call.return_token_ids,
                offset=len(self._shape.echoed(update.index)),
            )
        return self._shape.logprobs(writer, update)

    def _add_ids(self, choice: dict[str, Any], update: Update, *, with_prompt: bool) -> None:
        choice["token_ids"] = update.token_ids
        if with_prompt:
            choice["prompt_token_ids"] = self._prompts[update.index // self._call.params.n].token_ids.tolist()


def _add_score(choice: dict[str, Any], update: Update) -> None:
    """An extension: what a beam search ranked the choice by."""
    if update.score is not None:
        choice["score"] = update.score
