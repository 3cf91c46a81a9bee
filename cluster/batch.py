"""Batch jobs: every line of a file answered exactly once, however often the run is interrupted.

Owns the order of work and what becomes of a line: its answer, its refusal, or, when the server itself is
gone, nothing at all, so that the next run of the same command sends it. Knows nothing of file formats
(`batch_file.py`) or of HTTP retries (`async_client.py`).
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from octavo.cluster.async_client import AsyncClient
from octavo.cluster.batch_file import BatchInput, BatchLine, Journal, is_failure
from octavo.cluster.client_http import Reply
from octavo.cluster.client_protocol import RETRIED_STATUSES, error_from_body
from octavo.cluster.progress import Progress, progress_bar
from octavo.protos import errors

SYNC_INTERVAL_SECONDS = 1.0
"""A power loss costs at most the answers of this long; they are then asked for again."""
BATCH_MAX_RETRIES = 9
"""Together about a minute and a half of waiting: a server that restarts is waited for."""

INTERRUPTED = "interrupted"


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSummary:
    """How a run ended. `succeeded` and `failed` count the whole file, earlier runs included."""

    input: str
    output: str
    total: int
    succeeded: int
    failed: int
    """Lines whose result is an error; the results file says which."""
    resumed: int
    """Lines that an earlier run had finished."""
    prompt_tokens: int
    """Of this run, as the server counted them."""
    completion_tokens: int
    seconds: float
    stopped: str | None = None
    """Why the run ended before its last line; None when every line has its result."""

    @property
    def remaining(self) -> int:
        return self.total - self.succeeded - self.failed

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {**asdict(self), "remaining": self.remaining}


class _ServerGone(Exception):
    """Not a line's fault: stop the run and leave the line for the next one."""


async def run_batch(
    input_path: str | Path,
    output_path: str | Path,
    client: AsyncClient,
    *,
    overwrite: bool = False,
    progress: bool = False,
    stop: asyncio.Event | None = None,
) -> BatchSummary:
    """Answer every line of `input_path` that `output_path` has no result for, in order of completion.

    A line that the server refuses, or that still fails when the client's retries are spent, gets an error as
    its result. Setting `stop` ends the run at once, and only what is under way is lost; it is asked again
    by the next run.

    Raises `ConfigError` and `InvalidRequestError` before anything is sent (see `BatchInput.open` and
    `Journal.open`), and `UnavailableError` when results can no longer be written.
    """
    batch = BatchInput.open(input_path)
    try:
        journal = Journal.open(output_path, batch, overwrite=overwrite)
        try:
            return await _Run(batch, journal, client).run(progress=progress, stop=stop or asyncio.Event())
        finally:
            journal.close()
    finally:
        batch.close()


class _Run:
    def __init__(self, batch: BatchInput, journal: Journal, client: AsyncClient) -> None:
        self._batch = batch
        self._journal = journal
        self._client = client
        done = journal.finished.custom_ids
        self._todo = [line for line in batch.lines if line.custom_id not in done]
        self._succeeded = len(done) - journal.finished.num_failed
        self._failed = journal.finished.num_failed
        self._prompt_tokens = 0
        self._completion_tokens = 0
        self._stopped: str | None = None

    async def run(self, *, progress: bool, stop: asyncio.Event) -> BatchSummary:
        started = time.monotonic()
        resumed = len(self._journal.finished.custom_ids)
        total = len(self._batch.lines)
        if self._todo:
            with progress_bar("batch", total, enabled=progress, done=resumed) as bar:
                if resumed:
                    bar.note(f"resuming: {resumed} of {total} requests are already answered")
                await self._answer_all(bar, stop)
        return BatchSummary(
            input=str(self._batch.path),
            output=str(self._journal.path),
            total=total,
            succeeded=self._succeeded,
            failed=self._failed,
            resumed=resumed,
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._completion_tokens,
            seconds=time.monotonic() - started,
            stopped=self._stopped,
        )

    async def _answer_all(self, bar: Progress, stop: asyncio.Event) -> None:
        todo = iter(self._todo)
        count = min(self._client.max_concurrency, len(self._todo))
        workers = [asyncio.ensure_future(self._work(todo, bar)) for _ in range(count)]
        all_done = asyncio.gather(*workers)
        stopped = asyncio.ensure_future(stop.wait())
        syncer = asyncio.ensure_future(self._sync_often())
        ends: set[asyncio.Future[Any]] = {all_done, stopped}
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if all_done.done():
                all_done.result()
            else:
                self._stopped = INTERRUPTED
        except _ServerGone as gone:
            self._stopped = str(gone)
        finally:
            for task in (*workers, stopped, syncer):
                task.cancel()
            await asyncio.gather(*workers, all_done, stopped, syncer, return_exceptions=True)

    async def _work(self, todo: Iterator[BatchLine], bar: Progress) -> None:
        for line in todo:
            record = await self._answer(line)
            self._journal.append(record)
            if is_failure(record):
                self._failed += 1
            else:
                self._succeeded += 1
            bar.advance(tokens=self._count_tokens(record))

    async def _answer(self, line: BatchLine) -> dict[str, Any]:
        """The result line of one request. Raises `_ServerGone`."""
        body = self._batch.body(line)
        try:
            if body.get("model") is None:
                body["model"] = await self._client.model_name()
            reply = await self._client.post(line.url, body)
        except errors.UnavailableError as error:
            await self._check_server(error)
            return _record(line, error=error)
        except errors.AuthenticationError as error:
            raise _ServerGone(error.message) from error
        except errors.OctavoError as error:
            return _record(line, error=error)
        if reply.status in (401, 403):
            raise _ServerGone(error_from_body(reply.status, reply.body).message)
        if reply.status in RETRIED_STATUSES:
            await self._check_server(error_from_body(reply.status, reply.body))
        return _record(line, reply=reply)

    async def _check_server(self, failure: errors.OctavoError) -> None:
        """After a line's retries were spent: if the server takes no work at all, that is not the line's
        doing.
        """
        if failure.code == "timeout":
            return
        try:
            await self._client.ready()
        except errors.UnavailableError:
            raise _ServerGone(failure.message) from failure

    def _count_tokens(self, record: Mapping[str, Any]) -> int:
        body = (record["response"] or {}).get("body")
        usage = body.get("usage") if isinstance(body, dict) else None
        if not isinstance(usage, dict):
            return 0
        completion = int(usage.get("completion_tokens") or 0)
        self._prompt_tokens += int(usage.get("prompt_tokens") or 0)
        self._completion_tokens += completion
        return completion

    async def _sync_often(self) -> None:
        while True:
            await asyncio.sleep(SYNC_INTERVAL_SECONDS)
            # In a thread: a disk that takes its time must not hold up the answers.
            await asyncio.to_thread(self._journal.sync)


def _record(
    line: BatchLine, *, reply: Reply | None = None, error: errors.OctavoError | None = None
) -> dict[str, Any]:
    """One line of OpenAI's output file: `response` for an HTTP answer of any status, else `error`."""
    response = None
    if reply is not None:
        own_id = reply.body.get("id") if isinstance(reply.body, dict) else None
        request_id = reply.request_id or own_id or ""
        response = {"status_code": reply.status, "request_id": request_id, "body": reply.body}
    return {
        "id": f"batch_req_{uuid.uuid4().hex}",
        "custom_id": line.custom_id,
        "response": response,
        "error": None if error is None else {"code": error.code, "message": error.message},
    }
