"""A call's body to all that is needed to run it: checked fields, requests, and how the reply is written.

Owns what each generating path does, whoever asks: a client over HTTP, or a line of a batch. Knows nothing of sockets.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import xxhash

from octavo.cluster.backend import Backend
from octavo.cluster.client_protocol import CHAT_COMPLETIONS, COMPLETIONS
from octavo.cluster.forking import fork_context
from octavo.cluster.metrics.http import HttpMetrics
from octavo.cluster.openai.body import Body
from octavo.cluster.openai.chat import ChatShape
from octavo.cluster.openai.completions import CompletionShape, echoes_of
from octavo.cluster.openai.config import HttpConfig
from octavo.cluster.openai.generation import Generation
from octavo.cluster.openai.prompts import (
    Prompt,
    build_requests,
    chat_prompt,
    completion_prompts,
    fork_request,
)
from octavo.cluster.openai.rendering import JsonRenderer, Shape
from octavo.cluster.openai.responses import ResponseRenderer
from octavo.cluster.openai.schemas import (
    PRIORITY_MAX,
    Call,
    parse_chat,
    parse_completion,
    parse_fork,
    parse_response,
)
from octavo.cluster.openai.sse import Renderer
from octavo.cluster.openai.structured import named
from octavo.cluster.tokenizer import Tokenizer
from octavo.protos.errors import DeadlineExceededError, InvalidRequestError, NotFoundError
from octavo.protos.types import Request

RESPONSES = "/v1/responses"
FORK = "/v1/fork"


@dataclass(frozen=True, slots=True)
class Prepared:
    """A call that may run; nothing of it does yet."""

    call: Call
    requests: Sequence[Request]
    renderer: Renderer
    context: Sequence[int] = ()
    """See `BranchText`."""


class Calls:
    """Every generating path of one app."""

    def __init__(
        self, backend: Backend, tokenizer: Tokenizer, config: HttpConfig, metrics: HttpMetrics
    ) -> None:
        self.names = config.served_model_names or (backend.model.name,)
        """Of the model, the first is told where none was asked for."""
        self._backend = backend
        self._tokenizer = tokenizer
        self._config = config
        self._metrics = metrics
        self._by_path: dict[str, Callable[[Body], Awaitable[Prepared]]] = {
            CHAT_COMPLETIONS: self._chat,
            COMPLETIONS: self._completion,
            RESPONSES: self._response,
            FORK: self._fork,
        }

    def served(self, name: str | None) -> str:
        """The model that is meant; with one model there is no need to say. Raises `NotFoundError`."""
        if name is None:
            return self.names[0]
        if name not in self.names:
            raise NotFoundError(
                f"the model {name!r:.200} does not exist; this server has {', '.join(self.names)}",
                param="model",
                code="model_not_found",
            )
        return name

    async def prepare(self, path: str, body: Body, *, tenant: str = "", trace_parent: str = "") -> Prepared:
        """What `path` does with `body` for `tenant`, within its caller's span `trace_parent`.

        Raises `InvalidRequestError` naming the field, `NotFoundError`, and `DeadlineExceededError` when the call's
        timeout has passed before all was tokenised.
        """
        began = time.monotonic()
        prepared = await self._by_path[path](body)
        if (wanted := prepared.call.params.structured_output) is not None:
            try:
                await self._backend.compile_grammar(wanted)
            except InvalidRequestError as error:
                raise named(error, prepared.call.output_param) from None
        timeout = prepared.call.timeout
        if timeout is not None:
            # Of the whole call: what others' prompts took from it before its turn is gone.
            timeout -= time.monotonic() - began
            if timeout <= 0:
                raise DeadlineExceededError(
                    f"the request did not finish within its timeout of {prepared.call.timeout:.3g} s "
                    "(it was not tokenised yet)"
                )
        requests = [
            replace(request, tenant=tenant, trace_parent=trace_parent, timeout_seconds=timeout)
            for request in prepared.requests
        ]
        return replace(prepared, requests=requests)

    def generation(self, prepared: Prepared) -> Generation:
        """The run of a prepared call."""
        return Generation(
            self._backend,
            self._tokenizer,
            prepared.requests,
            self._metrics,
            prepared.context,
            without_output=prepared.call.without_output,
        )

    async def answer_line(self, url: str, body: Mapping[str, Any], seed_key: str) -> tuple[str, bytes]:
        """Run a batch's line below everything that has a caller waiting; (request id, JSON of the reply).

        Without a seed of its own it gets one made of `seed_key`, so that a line which is asked again says the same.
        Raises `OctavoError`.
        """
        prepared = await self.prepare(url, Body(body))
        own_seed = prepared.call.params.seed is not None
        requests = [
            replace(
                request,
                priority=PRIORITY_MAX,
                seed=request.seed if own_seed else xxhash.xxh64_intdigest(f"{seed_key}/{number}".encode()),
            )
            for number, request in enumerate(prepared.requests)
        ]
        async with self.generation(replace(prepared, requests=requests)) as generation:
            updates = await generation.all()
            return requests[0].request_id, prepared.renderer.whole(updates, generation)

    async def _chat(self, body: Body) -> Prepared:
        call = parse_chat(body, self._config)
        name = self.served(call.model)
        make_parser = None
        if call.tools is not None:
            make_parser = call.tools.parser(self._tokenizer, self._config.tool_call_parser)
            markers = {self._tokenizer.token_to_id(marker) for marker in make_parser().markers}
            if markers & self._tokenizer.special_ids:
                call = replace(call, params=replace(call.params, skip_special_tokens=False))
        prompts = [await chat_prompt(call, self._tokenizer, self._backend.model, self._config)]
        requests = build_requests(
            call, prompts, self._backend.model, self._config, prefix="chatcmpl", param="messages"
        )
        return Prepared(
            call, requests, self._renderer(ChatShape(call, make_parser), call, prompts, requests, name)
        )

    async def _completion(self, body: Body) -> Prepared:
        call = parse_completion(body, self._config)
        name = self.served(call.model)
        prompts = await completion_prompts(call, self._tokenizer, self._backend.model, self._config)
        requests = build_requests(
            call, prompts, self._backend.model, self._config, prefix="cmpl", param="prompt"
        )
        shape = CompletionShape(call, echoes_of(call, prompts, self._tokenizer))
        return Prepared(call, requests, self._renderer(shape, call, prompts, requests, name))

    async def _response(self, body: Body) -> Prepared:
        call = parse_response(body, self._config)
        name = self.served(call.model)
        prompts = [await chat_prompt(call, self._tokenizer, self._backend.model, self._config)]
        requests = build_requests(
            call, prompts, self._backend.model, self._config, prefix="resp", param="input"
        )
        return Prepared(call, requests, ResponseRenderer(call, requests[0], model_name=name))

    async def _fork(self, body: Body) -> Prepared:
        call = parse_fork(body, self._config)
        name = self.served(call.model)
        parent = await self._backend.tokens(call.request_id, call.branch)
        fork = fork_request(call, parent, self._backend.model, self._config)
        at = parent.num_output_tokens
        renderer = self._renderer(
            CompletionShape(call),
            call,
            [Prompt(parent.token_ids)],
            [fork],
            name,
            {"fork": {"of": call.request_id, "branch": call.branch, "at": at}},
        )
        return Prepared(call, [fork], renderer, fork_context(fork, at))

    def _renderer(
        self,
        shape: Shape,
        call: Call,
        prompts: Sequence[Prompt],
        requests: Sequence[Request],
        name: str,
        extensions: Mapping[str, Any] | None = None,
    ) -> JsonRenderer:
        return JsonRenderer(
            shape,
            call,
            prompts,
            self._tokenizer,
            call_id=requests[0].request_id.removesuffix("-0"),
            model_name=name,
            extensions=extensions,
        )
