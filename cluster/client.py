"""Python client of an Octavo server: `AsyncClient`, and `Client` for plain code.

Owns the bridge from plain code to asyncio. `Client` runs an `AsyncClient`, which holds all the logic, on an
event loop in a thread of its own, so that it also works inside a notebook whose loop is already running.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import httpx

from octavo.cluster.async_client import (
    DEFAULT_BASE_URL,
    DEFAULT_MAX_CONCURRENCY,
    DEFAULT_MAX_RETRIES,
    DEFAULT_TIMEOUT_SECONDS,
    AnyStream,
    AsyncClient,
    ModelCard,
)
from octavo.cluster.client_http import Reply
from octavo.cluster.client_jobs import Batches, Files
from octavo.cluster.client_protocol import Prompt
from octavo.cluster.outputs import RequestOutput
from octavo.cluster.text_stream import TextStream
from octavo.protos import errors
from octavo.protos.types import SamplingParams

__all__ = ["DEFAULT_BASE_URL", "AsyncClient", "Client", "ModelCard", "Reply"]

T = TypeVar("T")


class Client:
    """`AsyncClient` for plain code: the same arguments, calls and errors, without `await`.

    Safe to use from several threads. Use as `with`, or call `close` when done. Ctrl-C during a call stops the
    requests that are under way.
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
        self._client = AsyncClient(
            base_url,
            api_key,
            model,
            timeout=timeout,
            max_concurrency=max_concurrency,
            max_retries=max_retries,
            transport=transport,
        )
        self._thread = _LoopThread()
        # A client that is dropped without close() must not leave its thread behind.
        self._finalizer = weakref.finalize(self, self._thread.stop)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def base_url(self) -> str:
        return self._client.base_url

    def close(self) -> None:
        """Close every connection and end the thread. The client cannot be used again."""
        if self._finalizer.alive:
            self._thread.run(self._client.aclose())
            self._finalizer()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
        cache_salt: str = "",
        use_prefix_cache: bool = True,
    ) -> list[RequestOutput]:
        """See `AsyncClient.generate`."""
        return self._run(
            self._client.generate(
                prompts,
                params,
                progress=progress,
                cache_salt=cache_salt,
                use_prefix_cache=use_prefix_cache,
            )
        )

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        cache_salt: str = "",
        use_prefix_cache: bool = True,
    ) -> TextStream:
        """See `AsyncClient.stream`."""
        stream = self._client.stream(prompt, params, cache_salt=cache_salt, use_prefix_cache=use_prefix_cache)
        return TextStream(stream, self._run)

    def fork(
        self, request: str | AnyStream, params: SamplingParams | None = None, *, branch: int = 0
    ) -> RequestOutput:
        """See `AsyncClient.fork`."""
        return self._run(self._client.fork(request, params, branch=branch))

    def fork_stream(
        self, request: str | AnyStream, params: SamplingParams | None = None, *, branch: int = 0
    ) -> TextStream:
        """See `AsyncClient.fork_stream`."""
        return TextStream(self._client.fork_stream(request, params, branch=branch), self._run)

    def models(self) -> list[ModelCard]:
        """See `AsyncClient.models`."""
        return self._run(self._client.models())

    def health(self, *, check: bool = True) -> dict[str, Any]:
        """See `AsyncClient.health`."""
        return self._run(self._client.health(check=check))

    @property
    def files(self) -> Files:
        """See `AsyncClient.files`."""
        return Files(self._client.files, self._run)

    @property
    def batches(self) -> Batches:
        """See `AsyncClient.batches`."""
        return Batches(self._client.batches, self._run)

    def get(self, path: str) -> Any:
        """See `AsyncClient.get`."""
        return self._run(self._client.get(path))

    def post(self, path: str, body: Mapping[str, Any]) -> Reply:
        """See `AsyncClient.post`."""
        return self._run(self._client.post(path, body))

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        if not self._finalizer.alive:
            coroutine.close()
            raise errors.UnavailableError("this client is closed")
        return self._thread.run(coroutine)


class _LoopThread:
    """An event loop in a daemon thread, started on first use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The coroutine's result. Whatever interrupts the wait (Ctrl-C) also cancels the coroutine."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._started())
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _started(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=self._loop.run_forever, name="octavo-client", daemon=True
                )
                self._thread.start()
            return self._loop

    def stop(self) -> None:
        with self._lock:
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        if loop is None or thread is None:
            return
        loop.call_soon_threadsafe(loop.stop)
        # A finalizer may run on the loop's own thread, which cannot wait for itself.
        if thread is not threading.current_thread():
            thread.join()
            loop.close()
