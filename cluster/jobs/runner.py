"""Works off batches: validates their input, asks for each line, keeps the answers, ends them.

Owns what happens when: claims and leases, how many lines are under way, retries, cancelling and expiry. What a line
means and how it is answered is `Answer`'s, what survives a crash `store.py`'s. All on one asyncio loop; the store works
in a thread of its own.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import orjson

from octavo.cluster.batch_file import BatchLine, Problem, scan_lines
from octavo.cluster.jobs.store import JobStore, Row
from octavo.protos.errors import OctavoError, OverloadedError, RequestFailedError, UnavailableError

logger = logging.getLogger(__name__)

LEASE_SECONDS = 10.0
"""A batch whose process was killed goes on elsewhere after so long."""
POLL_SECONDS = 2.0
"""Between two looks for batches that nobody works on; leases are renewed as often."""
BATCHES_RUNNING_MAX = 4
"""At once in one process. They share what lines may be under way."""
PAGE_LINES = 256
PROBLEMS_MAX = 100
"""Of an input that is not valid, so many are told."""
FAILURES_MAX = 3
"""Tries of a line that fails through no fault of its own. A server that is full or away is waited for."""
RETRY_SECONDS_MIN = 0.1
RETRY_SECONDS_MAX = 5.0

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class Answer(Protocol):
    """Whoever answers a line."""

    async def __call__(self, url: str, body: Mapping[str, Any], seed_key: str) -> tuple[str, bytes]:
        """(request id, JSON of the reply). `seed_key` is the same whenever this line is asked.

        Raises `OctavoError`.
        """
        ...


@dataclass(slots=True)
class _Turn:
    """A batch that this process works on."""

    task: asyncio.Task[None]
    stoppable: bool
    """Not yet told to stop, and not at its end."""

    def stop(self) -> None:
        if self.stoppable:
            self.stoppable = False
            self.task.cancel()


class JobRunner:
    """`start` it on the loop where requests run, `close` it there."""

    def __init__(
        self,
        open_store: Callable[[], JobStore],
        answer: Answer,
        *,
        check: Callable[[Mapping[str, Any]], str | None],
        describe_error: Callable[[OctavoError], Mapping[str, Any]],
        lines_in_flight_max: int = 64,
        lease_seconds: float = LEASE_SECONDS,
        poll_seconds: float = POLL_SECONDS,
        clock: Callable[[], float] = time.time,
        on_line: Callable[[bool], None] = lambda succeeded: None,
    ) -> None:
        """`open_store` is called once, in the store's thread. `check` says what is wrong with a well-formed line, if
        anything; `describe_error` makes the body of a refusal; `on_line` is told of each answer that is kept."""
        self._open_store = open_store
        self._answer = answer
        self._check = check
        self._describe_error = describe_error
        self._lines_in_flight_max = lines_in_flight_max
        self._lease_seconds = lease_seconds
        self._poll_seconds = poll_seconds
        self._clock = clock
        self._on_line = on_line
        self._owner = f"{os.getpid()}-{uuid.uuid4().hex}"
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="octavo-jobs")
        self._store: JobStore | None = None
        self._room: asyncio.Semaphore | None = None
        self._news: asyncio.Event | None = None
        self._task: asyncio.Task[None] | None = None
        self._running: dict[str, _Turn] = {}

    async def call(
        self,
        method: Callable[Concatenate[JobStore, Arguments], Result],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> Result:
        """A method of the store, in the store's thread. Raises what it raises, and what opening the store does."""

        def go() -> Result:
            if self._store is None:
                self._store = self._open_store()
            return method(self._store, *args, **kwargs)

        return await asyncio.get_running_loop().run_in_executor(self._pool, go)

    # --- life ----------------------------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        """Batches that this process works on."""
        return len(self._running)

    def start(self) -> None:
        """Look for work from now on. May be called again."""
        if self._task is None:
            self._room = asyncio.Semaphore(self._lines_in_flight_max)
            self._news = asyncio.Event()
            self._task = asyncio.create_task(self._run())

    def wake(self) -> None:
        """There is something new to do."""
        if self._news is not None:
            self._news.set()

    async def close(self) -> None:
        """Stop at once. Lines under way are aborted and asked again by whoever goes on."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        running = dict(self._running)
        for turn in running.values():
            turn.task.cancel()
        await asyncio.gather(*(turn.task for turn in running.values()), return_exceptions=True)
        for batch_id in running:
            await self.call(JobStore.release, batch_id, self._owner)
        if self._store is not None:
            await self.call(JobStore.close)
        self._pool.shutdown()

    async def _run(self) -> None:
        assert self._news is not None
        told = ""
        while True:
            try:
                await self._claim_and_renew()
                told = ""
            except Exception as error:
                # A full disk, say. What runs goes on while its leases last; what matters is to look again.
                trouble = f"{type(error).__name__}: {error}"
                if trouble != told:
                    logger.error("batches cannot be looked after: %s", trouble)
                told = trouble
            try:
                async with asyncio.timeout(self._poll_seconds):
                    await self._news.wait()
            except TimeoutError:
                continue
            self._news.clear()

    async def _claim_and_renew(self) -> None:
        for batch_id, turn in list(self._running.items()):
            batch = await self.call(JobStore.renew, batch_id, self._owner, self._lease_seconds)
            if batch is None or self._ending(batch) is not None:
                # It is another's now, or it must end, which is a turn of its own.
                turn.stop()
        while len(self._running) < BATCHES_RUNNING_MAX:
            batch = await self.call(JobStore.claim, self._owner, self._lease_seconds)
            if batch is None or batch["id"] in self._running:
                return  # nothing, or a lease of our own that ended while this process slept
            self._work_on(batch)

    def _work_on(self, batch: Row) -> None:
        batch_id, ending = batch["id"], self._ending(batch)
        task = asyncio.create_task(self._attend(batch, ending))
        self._running[batch_id] = _Turn(task, stoppable=ending is None)

        def done(_: object) -> None:
            del self._running[batch_id]
            self.wake()

        task.add_done_callback(done)

    # --- one batch -----------------------------------------------------------------------------------------

    async def _attend(self, batch: Row, ending: str | None) -> None:
        """One turn of a batch. Where it fails, the batch waits for its lease to end."""
        batch_id = batch["id"]
        try:
            if ending is None:
                await self._go_on(batch)
            if (await self.call(JobStore.batch, batch_id))["status"] != "failed":
                await self._finish(batch_id, ending or "completed")
        except asyncio.CancelledError:
            if self._task is not None:
                await self.call(JobStore.release, batch_id, self._owner)
            raise
        except Exception as error:
            logger.error(
                "batch %s has to wait: %s: %s", batch_id, type(error).__name__, error, exc_info=error
            )

    def _ending(self, batch: Row) -> str | None:
        """How a batch must end whatever its lines do, if it must."""
        if batch["status"] == "cancelling":
            return "cancelled"
        if batch["status"] == "finalizing":
            return None
        return "expired" if self._clock() >= batch["expires_at"] else None

    async def _finish(self, batch_id: str, status: str) -> None:
        told = {
            "code": f"batch_{status}",
            "message": "the completion window ended before this request was answered"
            if status == "expired"
            else "the batch was cancelled before this request was answered",
        }

        def unanswered(custom_id: str) -> bytes:
            return _record(custom_id, error=told)

        await self.call(JobStore.finish, batch_id, self._owner, status, unanswered)
        logger.info("batch %s: %s", batch_id, status)

    async def _go_on(self, batch: Row) -> None:
        """Answer all that has no answer."""
        if batch["status"] == "validating":
            await self._validate(batch)
        path = await self.call(JobStore.content_path, batch["input_file_id"])
        with path.open("rb") as file:
            lines = _OpenLines(self, batch["id"])
            workers = [
                asyncio.create_task(self._work(batch, lines, file.fileno()))
                for _ in range(self._lines_in_flight_max)
            ]
            try:
                await asyncio.gather(*workers)
            finally:
                for worker in workers:
                    worker.cancel()
                await asyncio.gather(*workers, return_exceptions=True)

    async def _validate(self, batch: Row) -> None:
        """The whole file before any of it runs."""

        path = await self.call(JobStore.content_path, batch["input_file_id"])

        def scan() -> tuple[list[BatchLine], list[Problem]]:
            with path.open("rb") as file:
                return scan_lines(file, check=self._check, urls=(batch["endpoint"],))

        # Not in the store's thread: a large file must not hold up the answers of other batches.
        lines, problems = await asyncio.to_thread(scan)
        if not lines and not problems:
            problems = [Problem(1, "the file holds no requests")]
        if problems:
            await self.call(JobStore.fail, batch["id"], self._owner, problems[:PROBLEMS_MAX])
        else:
            await self.call(JobStore.begin, batch["id"], self._owner, lines)

    async def _work(self, batch: Row, lines: _OpenLines, descriptor: int) -> None:
        assert self._room is not None
        while True:
            async with self._room:
                line = await lines.take()
                if line is None:
                    return
                body = orjson.loads(os.pread(descriptor, line["length"], line["position"]))["body"]
                result, succeeded = await self._result(batch, line["custom_id"], body)
                kept = await self.call(
                    JobStore.answer, batch["id"], self._owner, line["number"], result, succeeded=succeeded
                )
            if not kept:
                raise UnavailableError("another process works on it")
            self._on_line(succeeded)

    async def _result(self, batch: Row, custom_id: str, body: Mapping[str, Any]) -> tuple[bytes, bool]:
        """A line's result and whether it succeeded. Waits as long as the server is full or away."""
        seed_key = f"{batch['id']}/{custom_id}"
        failures, pause = 0, RETRY_SECONDS_MIN
        while True:
            try:
                request_id, reply = await self._answer(batch["endpoint"], body, seed_key)
                return _record(custom_id, status=200, request_id=request_id, body=reply), True
            except (OverloadedError, UnavailableError):
                pass
            except OctavoError as error:
                failures += 1
                if error.http_status < 500 or failures == FAILURES_MAX:
                    told = orjson.dumps(self._describe_error(error))
                    return _record(custom_id, status=error.http_status, body=told), False
            except Exception as cause:
                failures += 1
                logger.error("a line of batch %s failed", batch["id"], exc_info=cause)
                if failures == FAILURES_MAX:
                    told = orjson.dumps(self._describe_error(RequestFailedError("internal error")))
                    return _record(custom_id, status=500, body=told), False
            await asyncio.sleep(pause)
            pause = min(2 * pause, RETRY_SECONDS_MAX)


class _OpenLines:
    """The lines of a batch that have no answer, in order, each once, for several takers."""

    def __init__(self, runner: JobRunner, batch_id: str) -> None:
        self._runner = runner
        self._batch_id = batch_id
        self._page: deque[Row] = deque()
        self._after = 0
        self._lock = asyncio.Lock()

    async def take(self) -> Row | None:
        """None when all are taken."""
        async with self._lock:
            if not self._page:
                rows = await self._runner.call(JobStore.open_lines, self._batch_id, self._after, PAGE_LINES)
                self._page.extend(rows)
            if not self._page:
                return None
            self._after = self._page[0]["number"]
            return self._page.popleft()


def _record(
    custom_id: str,
    *,
    status: int = 0,
    request_id: str = "",
    body: bytes = b"",
    error: Mapping[str, Any] | None = None,
) -> bytes:
    """One line of an output or error file: `body` is JSON already."""
    response = {"status_code": status, "request_id": request_id, "body": orjson.Fragment(body)}
    return orjson.dumps(
        {
            "id": f"batch_req_{uuid.uuid4().hex}",
            "custom_id": custom_id,
            "response": None if error is not None else response,
            "error": error,
        }
    )
