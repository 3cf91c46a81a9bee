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
    echoes: bool
    """The prompt is a part of each choice's text."""
    one_prompt: bool
    """There is never more than one."""

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

    def updates(self, updates: Sequence[Update], generation: Generation) -> bytes:
        events = []
        usage = orjson.dumps(generation.usage().as_dict()) if self._call.continuous_usage else None
        for update in updates:
            first = update.index not in self._started
            self._started.add(update.index)
            logprobs = self._logprobs(update) if self._wants_logprobs and self._has_tokens(update) else None
            tells_ids = self._call.return_token_ids and (update.token_ids or first)
            if not (first or update.text or update.finish_reason or logprobs or tells_ids):
                continue  # a part of a character, or what may become a stop string: nothing to tell yet
            choices = self._shape.chunk(update, logprobs, first)
            if not choices:
                continue  # what may become the call of a tool, likewise
            _add_score(choices[-1], update)
            if self._call.return_token_ids:
                self._add_ids(choices[-1], update, with_prompt=first)
            tail = self._chunk_tail if usage is None else b'],"usage":' + usage + b"}"
            events += [event(self._chunk_head + orjson.dumps(choice) + tail) for choice in choices]
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
            if self._call.prompt_logprobs is not None and not self._shape.one_prompt:
                choice["prompt_logprobs"] = self._prompt_tokens(update)
            choices.append(choice)
        reply = {**self._frame, "choices": choices, "usage": generation.usage().as_dict()}
        if self._call.prompt_logprobs is not None and self._shape.one_prompt:
            reply["prompt_logprobs"] = self._prompt_tokens(updates[0])
        if self._call.return_token_ids and len(self._prompts) == 1:
            reply["prompt_token_ids"] = self._prompts[0].token_ids.tolist()
            if (metrics := generation.request_metrics()[0]) is not None:
                reply["metrics"] = asdict(metrics)
        return orjson.dumps(reply)

    @property
    def _wants_logprobs(self) -> bool:
        return self._call.params.logprobs is not None

    def _has_tokens(self, update: Update) -> bool:
        return bool(update.token_ids) or (self._shape.echoes and update.prompt_logprobs is not None)

    def _prompt_of(self, update: Update) -> list[int]:
        ids: list[int] = self._prompts[update.index // self._call.params.n].token_ids.tolist()
        return ids

    def _prompt_tokens(self, update: Update) -> list[dict[str, Any] | None]:
        return self._writer(offset=0).prompt_tokens(
            self._prompt_of(update), update.prompt_logprobs or (), self._call.prompt_logprobs or 0
        )

    def _writer(self, offset: int) -> LogprobWriter:
        return LogprobWriter(
            self._tokenizer,
            skip_special_tokens=self._call.params.skip_special_tokens,
            with_ids=self._call.return_token_ids,
            offset=offset,
        )

    def _logprobs(self, update: Update) -> dict[str, Any]:
        """Of the update's tokens, and before those of its prompt where that is a part of the text."""
        told = self._output_logprobs(update)
        if update.prompt_logprobs is None or not self._shape.echoes:
            return told
        num_top = self._call.params.logprobs or 0
        prompt = self._writer(offset=0).prompt(self._prompt_of(update), update.prompt_logprobs, num_top)
        return {name: values + told[name] for name, values in prompt.items()}

    def _output_logprobs(self, update: Update) -> dict[str, Any]:
        writer = self._writers.get(update.index)
        if writer is None:
            writer = self._writer(offset=len(self._shape.echoed(update.index)))
            self._writers[update.index] = writer
        return self._shape.logprobs(writer, update)

    def _add_ids(self, choice: dict[str, Any], update: Update, *, with_prompt: bool) -> None:
        choice["token_ids"] = update.token_ids
        if with_prompt:
            choice["prompt_token_ids"] = self._prompt_of(update)


def _add_score(choice: dict[str, Any], update: Update) -> None:
    """An extension: what a beam search ranked the choice by."""
    if update.score is not None:
        choice["score"] = update.score
