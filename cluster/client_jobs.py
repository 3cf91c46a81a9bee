"""Files and batches of a server: `AsyncClient.files`, `AsyncClient.batches`, and the same for plain code.

Owns their calls and what comes back. Knows nothing of connections (`async_client.py` does), nor how a batch runs
(`octavo.cluster.jobs`, on the server).
"""

from __future__ import annotations

import asyncio
import builtins
import time
import uuid
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

import orjson

from octavo.cluster.batch_file import URLS, BatchInput
from octavo.protos import errors

if TYPE_CHECKING:
    from octavo.cluster.async_client import AsyncClient

ENDED = frozenset({"completed", "failed", "expired", "cancelled"})
ENDPOINTS = (*URLS, "/v1/responses")
POLL_SECONDS = 2.0

T = TypeVar("T")
Run = Callable[[Coroutine[Any, Any, T]], T]


@dataclass(frozen=True, slots=True)
class ServerFile:
    """One file that the server keeps."""

    id: str
    filename: str
    num_bytes: int
    purpose: str
    created_at: int
    """Seconds since 1970."""

    @classmethod
    def parse(cls, body: Any) -> ServerFile:
        return cls(body["id"], body["filename"], body["bytes"], body["purpose"], body["created_at"])


@dataclass(frozen=True, slots=True)
class Batch:
    """One batch as the server last described it."""

    id: str
    status: str
    """validating, in_progress, finalizing, cancelling, and at the end one of `ENDED`."""
    endpoint: str
    input_file_id: str
    total: int
    completed: int
    failed: int
    output_file_id: str | None
    error_file_id: str | None
    problems: tuple[str, ...] = ()
    """Why its input is not valid, with line numbers."""
    fields: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """The whole object of the API."""

    @property
    def ended(self) -> bool:
        return self.status in ENDED

    @classmethod
    def parse(cls, body: Any) -> Batch:
        counts, problems = body["request_counts"], (body.get("errors") or {}).get("data") or ()
        return cls(
            id=body["id"],
            status=body["status"],
            endpoint=body["endpoint"],
            input_file_id=body["input_file_id"],
            total=counts["total"],
            completed=counts["completed"],
            failed=counts["failed"],
            output_file_id=body.get("output_file_id"),
            error_file_id=body.get("error_file_id"),
            problems=tuple(f"line {one.get('line')}: {one.get('message')}" for one in problems),
            fields=body,
        )


class AsyncFiles:
    """`/v1/files`."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def upload(self, path: str | Path, purpose: str = "batch") -> ServerFile:
        """Raises `ConfigError` when the file cannot be read."""
        path = Path(path)
        try:
            with path.open("rb") as file:
                body = await self._client.call(
                    "POST",
                    "/v1/files",
                    data={"purpose": purpose},
                    files={"file": (path.name, file)},
                    retry=False,
                )
        except OSError as problem:
            raise errors.ConfigError(f"cannot read {path}: {problem}", param="input") from problem
        return _parsed(ServerFile.parse, body)

    async def retrieve(self, file_id: str) -> ServerFile:
        """Raises `NotFoundError`."""
        return _parsed(ServerFile.parse, await self._client.call("GET", f"/v1/files/{_part(file_id)}"))

    async def list(self) -> list[ServerFile]:
        """All of them, newest first."""
        return await _pages(self._client, "/v1/files", 10_000, ServerFile.parse)

    async def content(self, file_id: str) -> bytes:
        """Raises `NotFoundError`."""
        return b"".join(
            [chunk async for chunk in self._client.download(f"/v1/files/{_part(file_id)}/content")]
        )

    async def download(self, file_ids: Iterable[str], path: str | Path) -> None:
        """Write the contents of files, one after the other, to `path`; until all are there, it is left as it was.

        Raises `NotFoundError`, and `ConfigError` when `path` cannot be written.
        """
        path = Path(path)
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
        try:
            with temporary.open("wb") as out:
                for file_id in file_ids:
                    async for chunk in self._client.download(f"/v1/files/{_part(file_id)}/content"):
                        out.write(chunk)
            temporary.replace(path)
        except OSError as problem:
            raise errors.ConfigError(f"cannot write {path}: {problem}", param="output") from problem
        finally:
            temporary.unlink(missing_ok=True)

    async def delete(self, file_id: str) -> None:
        """Raises `NotFoundError`, and `InvalidRequestError` while a batch reads it."""
        await self._client.call("DELETE", f"/v1/files/{_part(file_id)}")


class AsyncBatches:
    """`/v1/batches`."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def create(
        self,
        input: str | Path,
        *,
        endpoint: str | None = None,
        completion_window: str = "24h",
        metadata: Mapping[str, str] | None = None,
    ) -> Batch:
        """Have a file of requests answered by the server, which needs nobody to wait.

        input: a path, whose lines are checked before they are uploaded, or the id of a file that the server has.
        endpoint: None for the url of the file's lines.

        Raises `InvalidRequestError` that names the lines that are wrong. Nothing is tried twice: it might run twice.
        """
        file_id = str(input)
        if isinstance(input, Path) or not file_id.startswith("file-"):
            endpoint = endpoint or await asyncio.to_thread(_endpoint_of, Path(input))
            file_id = (await self._client.files.upload(input)).id
        if endpoint is None:
            raise errors.InvalidRequestError(
                "a file of the server needs its endpoint named", param="endpoint"
            )
        body = {
            "input_file_id": file_id,
            "endpoint": endpoint,
            "completion_window": completion_window,
            "metadata": dict(metadata or {}),
        }
        return _parsed(Batch.parse, await self._client.call("POST", "/v1/batches", body=body, retry=False))

    async def retrieve(self, batch_id: str) -> Batch:
        """Raises `NotFoundError`."""
        return _parsed(Batch.parse, await self._client.call("GET", f"/v1/batches/{_part(batch_id)}"))

    async def list(self, limit: int | None = None) -> list[Batch]:
        """The newest first; None: all."""
        return await _pages(self._client, "/v1/batches", 100, Batch.parse, limit)

    async def cancel(self, batch_id: str) -> Batch:
        """What is answered stays answered. Raises `InvalidRequestError` for one that has ended."""
        body = await self._client.call("POST", f"/v1/batches/{_part(batch_id)}/cancel", body={}, retry=False)
        return _parsed(Batch.parse, body)

    async def wait(
        self,
        batch_id: str,
        *,
        timeout: float | None = None,
        poll_seconds: float = POLL_SECONDS,
        on_change: Callable[[Batch], None] = lambda batch: None,
    ) -> Batch:
        """Until the batch has ended, however. `on_change` is told each new state.

        Raises `UnavailableError` (code "timeout") after `timeout` seconds, and when the server stays away for longer
        than retries wait; the batch goes on regardless.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        told: Batch | None = None
        while True:
            batch = await self.retrieve(batch_id)
            if told != batch:
                on_change(batch)
                told = batch
            if batch.ended:
                return batch
            if deadline is not None and time.monotonic() >= deadline:
                raise errors.UnavailableError(
                    f"{batch_id} is {batch.status} after {timeout:g} s: {batch.completed + batch.failed} of "
                    f"{batch.total} lines are answered",
                    code="timeout",
                )
            await asyncio.sleep(poll_seconds)

    async def results(self, batch_id: str) -> builtins.list[dict[str, Any]]:
        """One record for each line: answers in the order of the input, then refusals.

        Raises `InvalidRequestError` while the batch runs, or when its input was not valid.
        """
        records = []
        for file_id in await self.result_files(batch_id):
            content = await self._client.files.content(file_id)
            records += [orjson.loads(line) for line in content.splitlines()]
        return records

    async def result_files(self, batch_id: str) -> builtins.list[str]:
        """Ids of its output and error files, as far as there are any. Raises as `results`."""
        batch = await self.retrieve(batch_id)
        if batch.problems:
            raise errors.InvalidRequestError("\n".join(batch.problems), param="input")
        if not batch.ended:
            raise errors.InvalidRequestError(f"{batch_id} is {batch.status}: its results come at the end")
        return [file_id for file_id in (batch.output_file_id, batch.error_file_id) if file_id]


class Files:
    """`AsyncFiles` for plain code."""

    def __init__(self, files: AsyncFiles, run: Run[Any]) -> None:
        self._files, self._run = files, run

    def upload(self, path: str | Path, purpose: str = "batch") -> ServerFile:
        """See `AsyncFiles.upload`."""
        return self._run(self._files.upload(path, purpose))

    def retrieve(self, file_id: str) -> ServerFile:
        """See `AsyncFiles.retrieve`."""
        return self._run(self._files.retrieve(file_id))

    def list(self) -> list[ServerFile]:
        """See `AsyncFiles.list`."""
        return self._run(self._files.list())

    def content(self, file_id: str) -> bytes:
        """See `AsyncFiles.content`."""
        return self._run(self._files.content(file_id))

    def download(self, file_ids: Iterable[str], path: str | Path) -> None:
        """See `AsyncFiles.download`."""
        self._run(self._files.download(file_ids, path))

    def delete(self, file_id: str) -> None:
        """See `AsyncFiles.delete`."""
        self._run(self._files.delete(file_id))


class Batches:
    """`AsyncBatches` for plain code."""

    def __init__(self, batches: AsyncBatches, run: Run[Any]) -> None:
        self._batches, self._run = batches, run

    def create(
        self,
        input: str | Path,
        *,
        endpoint: str | None = None,
        completion_window: str = "24h",
        metadata: Mapping[str, str] | None = None,
    ) -> Batch:
        """See `AsyncBatches.create`."""
        call = self._batches.create(
            input, endpoint=endpoint, completion_window=completion_window, metadata=metadata
        )
        return self._run(call)

    def retrieve(self, batch_id: str) -> Batch:
        """See `AsyncBatches.retrieve`."""
        return self._run(self._batches.retrieve(batch_id))

    def list(self, limit: int | None = None) -> list[Batch]:
        """See `AsyncBatches.list`."""
        return self._run(self._batches.list(limit))

    def cancel(self, batch_id: str) -> Batch:
        """See `AsyncBatches.cancel`."""
        return self._run(self._batches.cancel(batch_id))

    def wait(
        self,
        batch_id: str,
        *,
        timeout: float | None = None,
        poll_seconds: float = POLL_SECONDS,
        on_change: Callable[[Batch], None] = lambda batch: None,
    ) -> Batch:
        """See `AsyncBatches.wait`."""
        call = self._batches.wait(batch_id, timeout=timeout, poll_seconds=poll_seconds, on_change=on_change)
        return self._run(call)

    def results(self, batch_id: str) -> builtins.list[dict[str, Any]]:
        """See `AsyncBatches.results`."""
        return self._run(self._batches.results(batch_id))

    def result_files(self, batch_id: str) -> builtins.list[str]:
        """See `AsyncBatches.result_files`."""
        return self._run(self._batches.result_files(batch_id))


def _endpoint_of(path: Path) -> str:
    """The one url of a valid file. Raises `ConfigError` and `InvalidRequestError` as `BatchInput.open`."""
    batch = BatchInput.open(path, ENDPOINTS)
    batch.close()
    first = batch.lines[0]
    for line in batch.lines:
        if line.url != first.url:
            raise errors.InvalidRequestError(
                f"{path} line {line.number}: url is {line.url}, and {first.url} on line {first.number}; a batch has "
                "one endpoint",
                param="input",
            )
    return first.url


def _part(text: str) -> str:
    """An id as one part of a path, whatever is in it."""
    return quote(text, safe="") or "-"


def _parsed(parse: Callable[[Any], T], body: Any) -> T:
    try:
        return parse(body)
    except (KeyError, TypeError, AttributeError) as problem:
        raise errors.RequestFailedError("the server's answer is not of OpenAI's shape") from problem


async def _pages(
    client: AsyncClient, path: str, page: int, parse: Callable[[Any], T], limit: int | None = None
) -> list[T]:
    found: list[T] = []
    after = ""
    while limit is None or len(found) < limit:
        size = page if limit is None else min(page, limit - len(found))
        body = await client.call("GET", f"{path}?limit={size}{after}")
        found += [_parsed(parse, entry) for entry in body["data"]]
        if not body.get("has_more") or not body["data"]:
            break
        after = f"&after={_part(body['last_id'])}"
    return found
