"""Python client of an Octavo server, for asyncio.

Owns connections, bounded concurrency, retries and order. Knows nothing of what is in a request or a reply
(`client_protocol.py` does), nor of plain code (`client.py` wraps this).
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import httpx
import orjson

from octavo._version import __version__
from octavo.cluster import client_protocol as protocol
from octavo.cluster.client_http import (
    FINAL_TRANSPORT_ERRORS,
    Reply,
    checked_base_url,
    events_of,
    mapped,
    reply_of,
    retry_after_of,
)
from octavo.cluster.client_jobs import AsyncBatches, AsyncFiles
from octavo.cluster.client_protocol import Prompt
from octavo.cluster.outputs import RequestOutput
from octavo.cluster.progress import progress_bar
from octavo.cluster.text_stream import AsyncTextStream, StreamFacts, TextStream
from octavo.protos import errors
from octavo.protos.types import SamplingParams

DEFAULT_BASE_URL = "http://127.0.0.1:8000"
DEFAULT_TIMEOUT_SECONDS = 600.0
CONNECT_TIMEOUT_SECONDS = 10.0
DEFAULT_MAX_CONCURRENCY = 32
DEFAULT_MAX_RETRIES = 6
SPARE_CONNECTIONS = 4
"""Beyond `max_concurrency`, so that a health check never queues behind work."""
API_KEY_VARIABLE = "OCTAVO_API_KEY"

AnyStream = AsyncTextStream | TextStream

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ModelCard:
    """One entry of `/v1/models`."""

    id: str
    max_model_len: int | None = None
    """Tokens of prompt and output together; None when the server does not say."""


class AsyncClient:
    """Client for asyncio. Use as `async with`, or call `aclose` when done.

    base_url: the server, with or without "/v1". api_key: sent as a bearer token; None reads OCTAVO_API_KEY.
    model: a name of `/v1/models`; None takes the first. timeout: seconds a call may wait for bytes, None for
    ever. max_concurrency: calls under way at once, over everything this client does. max_retries: further
    tries after a connection failure or a status of 429, 502, 503 or 504, with growing waits and never sooner
    than `Retry-After` asks. Repeating is safe, since generating changes nothing on the server; a stream is
    repeated only before its first byte. transport: an httpx transport to use instead of the network.

    Raises `ConfigError` for a bad argument. Calls raise the errors of `octavo.protos.errors` and no others.
    """

    def __init__(
        self,
        base_url: str = DEFAULT_BASE_URL,
        api_key: str | None = None,
        model: str | None = None,
        *,
        timeout: float | None = DEFAULT_TIMEOUT_SECONDS,
        max_concurrency: int = DEFAULT_MAX_CONCURRENCY,
        max_retries: int = DEFAULT_MAX_RETRIES,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        if timeout is not None and not timeout > 0:
            raise errors.ConfigError(f"timeout must be above 0 or None, got {timeout!r}", param="timeout")
        if max_concurrency < 1:
            raise errors.ConfigError(
                f"max_concurrency must be at least 1, got {max_concurrency}", param="max_concurrency"
            )
        if max_retries < 0:
            raise errors.ConfigError(
                f"max_retries must be at least 0, got {max_retries}", param="max_retries"
            )
        self.base_url = checked_base_url(base_url)
        self.model = model
        self.timeout = timeout
        self.max_concurrency = max_concurrency
        self.max_retries = max_retries
        self._api_key = os.environ.get(API_KEY_VARIABLE) if api_key is None else api_key
        self._transport = transport
        self._loop: asyncio.AbstractEventLoop | None = None
        self._http: httpx.AsyncClient | None = None
        self._slots = asyncio.Semaphore(max_concurrency)
        self._closed = False

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close every connection. The client cannot be used again."""
        self._closed = True
        http, self._http = self._http, None
        if http is not None and self._loop is asyncio.get_running_loop():
            await http.aclose()

    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
        cache_salt: str = "",
        use_prefix_cache: bool = True,
    ) -> list[RequestOutput]:
        """Complete every prompt; results in the order of `prompts`.

        prompts: texts, lists of token ids, or chats (lists of {"role", "content"}), mixed as you like; one
        bare prompt counts as a list of one. params: one for all, or one each. progress: draw a bar on
        standard error. cache_salt: cached prefixes are shared only with calls of the same one. use_prefix_cache
        False: cached prefixes are neither used nor left.

        Raises the first error of any prompt, naming its index, and gives up the others.
        """
        listed = protocol.as_prompts(prompts)
        each = protocol.as_params(params, len(listed))
        if not listed:
            return []
        build = _CallBuilder(await self.model_name(), cache_salt, use_prefix_cache)
        results: dict[int, RequestOutput] = {}
        todo = iter(range(len(listed)))

        with progress_bar("generate", len(listed), enabled=progress) as bar:

            async def work() -> None:
                # Every worker draws from the one iterator, so memory holds max_concurrency calls and not all
                # of them.
                for index in todo:
                    try:
                        results[index] = await self._generate_one(listed[index], each[index], build)
                    except errors.OctavoError as error:
                        raise _at_index(error, index, len(listed)) from error.__cause__
                    bar.advance(tokens=sum(len(branch.token_ids) for branch in results[index].outputs))

            await _all_or_first_error([work() for _ in range(min(self.max_concurrency, len(listed)))])
        return [results[index] for index in range(len(listed))]

    async def _generate_one(
        self, prompt: Prompt, params: SamplingParams, build: _CallBuilder
    ) -> RequestOutput:
        call = build(prompt, await self._with_limit(prompt, params))
        return await self._output(prompt, call)

    async def _output(self, prompt: Prompt | None, call: protocol.Call) -> RequestOutput:
        started = time.monotonic()
        reply = await self.post(call.path, call.body)
        reply.raise_for_status()
        return protocol.parse_output(prompt, reply.body, seconds=time.monotonic() - started)

    async def fork(
        self, request: str | AnyStream, params: SamplingParams | None = None, *, branch: int = 0
    ) -> RequestOutput:
        """Go on from where one branch of a running request stands now, beside it; what comes after that point.

        request: what `stream` or `fork_stream` gave, once its first piece has come, or its `request_id`. The
        result's prompt is all that stood before, of which the last `forked_at` tokens are the parent's output.
        The call counts beside the parent's, so `max_concurrency` must have room for both.

        Raises `NotFoundError` when the request has ended, and `InvalidRequestError` (param "branch") when only the
        branch has, or when `params` have no `max_tokens`.
        """
        return await self._output(None, await self._fork_call(request, params, branch, stream=False))

    def fork_stream(
        self, request: str | AnyStream, params: SamplingParams | None = None, *, branch: int = 0
    ) -> AsyncTextStream:
        """`fork`, piece by piece; see `stream`."""
        facts = StreamFacts()
        return AsyncTextStream(
            self._pieces(facts, lambda: self._fork_call(request, params, branch, stream=True)), facts
        )

    async def _fork_call(
        self, request: str | AnyStream, params: SamplingParams | None, branch: int, *, stream: bool
    ) -> protocol.Call:
        request_id = request if isinstance(request, str) else request.request_id
        model = await self.model_name()
        return protocol.build_fork(request_id, branch, params or SamplingParams(), model=model, stream=stream)

    async def _with_limit(self, prompt: Prompt, params: SamplingParams) -> SamplingParams:
        """`params` with `max_tokens` None worked out: OpenAI's completions take silence for 16 tokens."""
        if params.max_tokens is not None or protocol.is_chat(prompt):
            return params
        limits = {card.id: card.max_model_len for card in await self.models()}
        limit = limits.get(await self.model_name())
        if limit is None:
            raise errors.InvalidRequestError(
                "this server does not tell its model's limit; give max_tokens", param="max_tokens"
            )
        return replace(params, max_tokens=max(1, limit - await self._num_tokens(prompt)))

    async def _num_tokens(self, prompt: Prompt) -> int:
        if not isinstance(prompt, str):
            return len(prompt)
        reply = await self.post("/tokenize", {"prompt": prompt})
        reply.raise_for_status()
        try:
            return int(reply.body["count"])
        except (KeyError, TypeError, ValueError) as problem:
            raise errors.RequestFailedError("the server's /tokenize gives no count") from problem

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        cache_salt: str = "",
        use_prefix_cache: bool = True,
    ) -> AsyncTextStream:
        """Yield the text of one completion piece by piece as it is generated (branch 0 when `n` is above 1).

        The iterator's `request_id`, known from the first piece on, is what `fork` takes.

        Raises `UnavailableError` when the connection ends before the server said that the answer is complete.
        Leaving the loop early closes the connection, which stops the request on the server.
        """

        async def make_call() -> protocol.Call:
            (checked,) = protocol.as_prompts([prompt])
            build = _CallBuilder(await self.model_name(), cache_salt, use_prefix_cache)
            return build(checked, await self._with_limit(checked, params or SamplingParams()), stream=True)

        facts = StreamFacts()
        return AsyncTextStream(self._pieces(facts, make_call), facts)

    async def _pieces(
        self, facts: StreamFacts, make_call: Callable[[], Awaitable[protocol.Call]]
    ) -> AsyncGenerator[str, None]:
        call = await make_call()
        async with self._slots_here():
            response = await self._with_retries(lambda: self._send("POST", call.path, call.body, stream=True))
            try:
                if response.status_code >= 400:
                    await mapped(response.aread(), self.base_url)
                    reply_of(response).raise_for_status()
                facts.request_id = response.headers.get(protocol.REQUEST_ID_HEADER, "")
                async for event in events_of(response, self.base_url):
                    if event == b"[DONE]":
                        return
                    chunk = protocol.parse_body(event)
                    text = protocol.parse_delta(chunk)
                    facts.forked_at = protocol.parse_forked_at(chunk)
                    if text:
                        yield text
                raise errors.UnavailableError(
                    "the stream ended before the answer was complete", code="stream_cut"
                )
            finally:
                await response.aclose()

    async def models(self) -> list[ModelCard]:
        """The models this server serves."""
        body = await self.get("/v1/models")
        try:
            return [ModelCard(str(entry["id"]), entry.get("max_model_len")) for entry in body["data"]]
        except (KeyError, TypeError, AttributeError) as problem:
            raise errors.RequestFailedError(
                "the server's list of models is not of OpenAI's shape"
            ) from problem

    async def health(self, *, check: bool = True) -> dict[str, Any]:
        """What `/health` says, asked once. Raises `UnavailableError` when the server is not there, and with `check`
        when it is not well.
        """
        reply = reply_of(await self._send("GET", "/health"))
        told = isinstance(reply.body, dict) and "status" in reply.body
        if check or not told:
            reply.raise_for_status()
        return reply.body if told else {}

    @property
    def files(self) -> AsyncFiles:
        """Files that the server keeps."""
        return AsyncFiles(self)

    @property
    def batches(self) -> AsyncBatches:
        """Files of requests that the server answers by itself."""
        return AsyncBatches(self)

    async def get(self, path: str) -> Any:
        """Decoded body of a GET; retried like any call. Raises the error of a status of 400 or more."""
        return await self.call("GET", path)

    async def call(
        self,
        method: str,
        path: str,
        *,
        body: Mapping[str, Any] | None = None,
        retry: bool = True,
        **form: Any,
    ) -> Any:
        """Decoded body of a call of the API. `retry` False: for what would be done twice if it were tried twice.
        `form`: `data` and `files` of httpx, in place of a JSON body. Raises the error of a status of 400 or more."""
        send = lambda: self._send(method, path, body, **form)  # noqa: E731
        reply = reply_of(await (self._with_retries(send) if retry else send()))
        reply.raise_for_status()
        return reply.body

    async def download(self, path: str) -> AsyncIterator[bytes]:
        """Bytes of a GET as they come. Raises as `get`, and `UnavailableError` when they end too early."""
        response = await self._with_retries(lambda: self._send("GET", path, stream=True))
        try:
            if response.status_code >= 400:
                await mapped(response.aread(), self.base_url)
                reply_of(response).raise_for_status()
            chunks = response.aiter_bytes()
            while (chunk := await mapped(anext(chunks, None), self.base_url)) is not None:
                yield chunk
        finally:
            await response.aclose()

    async def post(self, path: str, body: Mapping[str, Any]) -> Reply:
        """Send one call as it is, within the concurrency bound and with retries; any final status is
        returned.

        Raises `UnavailableError` when no answer came at all.
        """
        async with self._slots_here():
            return reply_of(await self._with_retries(lambda: self._send("POST", path, body)))

    async def ready(self) -> None:
        """Ask `/ready` once. Raises `UnavailableError` when new requests are not taken now, or no server is
        there.

        A server without that path counts as ready.
        """
        reply = reply_of(await self._send("GET", "/ready"))
        if reply.status in (502, 503, 504):
            reply.raise_for_status()

    async def model_name(self) -> str:
        """The model that calls go to: the one given, else the server's first (asked once)."""
        if self.model is None:
            cards = await self.models()
            if not cards:
                raise errors.NotFoundError("the server serves no model", code="model_not_found")
            self.model = cards[0].id
        return self.model

    def _client(self) -> httpx.AsyncClient:
        """The connection pool of the running loop. A new loop (a second `asyncio.run`) gets a new pool."""
        if self._closed:
            raise errors.UnavailableError("this client is closed")
        loop = asyncio.get_running_loop()
        if self._http is None or self._loop is not loop:
            headers = {"user-agent": f"octavo/{__version__}"}
            if self._api_key:
                headers["authorization"] = f"Bearer {self._api_key}"
            connections = self.max_concurrency + SPARE_CONNECTIONS
            self._loop = loop
            self._slots = asyncio.Semaphore(self.max_concurrency)
            self._http = httpx.AsyncClient(
                base_url=self.base_url,
                headers=headers,
                timeout=httpx.Timeout(self.timeout, connect=CONNECT_TIMEOUT_SECONDS, pool=None),
                limits=httpx.Limits(max_connections=connections, max_keepalive_connections=connections),
                transport=self._transport,
            )
        return self._http

    def _slots_here(self) -> asyncio.Semaphore:
        self._client()
        return self._slots

    async def _send(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        stream: bool = False,
        **form: Any,
    ) -> httpx.Response:
        """One try. Raises `OctavoError`; the cause is httpx's own error."""
        http = self._client()
        content = None
        headers = {}
        if body is not None:
            headers["content-type"] = "application/json"
            try:
                content = orjson.dumps(body)
            except TypeError as problem:  # lone surrogates, integers beyond 64 bits
                raise errors.InvalidRequestError(f"the request is not valid JSON: {problem}") from problem
        request = http.build_request(method, path, content=content, headers=headers, **form)
        return await mapped(http.send(request, stream=stream), self.base_url)

    async def _with_retries(self, send: Callable[[], Awaitable[httpx.Response]]) -> httpx.Response:
        attempt = 1
        while True:
            response: httpx.Response | None = None
            failure: errors.OctavoError | None = None
            try:
                response = await send()
                again = response.status_code in protocol.RETRIED_STATUSES
                retry_after = retry_after_of(response)
            except errors.UnavailableError as error:
                failure = error
                again = not isinstance(error.__cause__, FINAL_TRANSPORT_ERRORS)
                retry_after = None
            wait = None
            if again and attempt <= self.max_retries:
                # Not a decision of the serving system: jitter only has to differ between clients.
                wait = protocol.backoff_seconds(attempt, retry_after, random.random())
            if wait is None:
                if failure is not None:
                    raise failure
                assert response is not None
                return response
            if response is not None:
                await response.aclose()
            await asyncio.sleep(wait)
            attempt += 1


@dataclass(frozen=True, slots=True)
class _CallBuilder:
    """What the calls of one `generate` or `stream` have in common."""

    model: str
    cache_salt: str
    use_prefix_cache: bool

    def __call__(self, prompt: Prompt, params: SamplingParams, *, stream: bool = False) -> protocol.Call:
        return protocol.build_call(
            prompt,
            params,
            model=self.model,
            stream=stream,
            cache_salt=self.cache_salt,
            use_prefix_cache=self.use_prefix_cache,
        )


def _at_index(error: errors.OctavoError, index: int, count: int) -> errors.OctavoError:
    if count > 1:
        error.message = f"prompts[{index}]: {error.message}"
        error.args = (error.message,)
    return error


async def _all_or_first_error(coroutines: list[Coroutine[Any, Any, None]]) -> None:
    """Run all; the first error cancels the others, and nothing is left running."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
