"""/v1/files and /v1/batches as OpenAI's API has them.

Owns their fields, limits and JSON. What is kept and how batches run is `octavo.cluster.jobs`.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from fastapi import FastAPI, Request
from starlette.responses import FileResponse, Response

from octavo.cluster.client_protocol import CHAT_COMPLETIONS, COMPLETIONS
from octavo.cluster.jobs.runner import JobRunner
from octavo.cluster.jobs.store import JobStore, Row
from octavo.cluster.openai.body import read_json
from octavo.cluster.openai.calls import RESPONSES, Calls
from octavo.cluster.openai.config import HttpConfig
from octavo.cluster.openai.errors import JSON, UnsupportedParameterError, envelope
from octavo.cluster.openai.multipart import read_upload
from octavo.cluster.openai.openapi import Described
from octavo.protos.errors import InvalidRequestError, NotFoundError

ENDPOINTS = (CHAT_COMPLETIONS, COMPLETIONS, RESPONSES)
PURPOSE = "batch"
METADATA_MAX = 16
METADATA_KEY_CHARS_MAX = 64
METADATA_VALUE_CHARS_MAX = 512
PAGE_MAX = {"files": 10_000, "batches": 100}
PAGE_DEFAULT = {"files": 10_000, "batches": 20}
WINDOW_SECONDS_MAX = 30 * 86_400
_WINDOW = re.compile(r"([1-9][0-9]{0,5})([mhd])")
_UNIT_SECONDS = {"m": 60, "h": 3600, "d": 86_400}
_TIMES = (
    *("created_at", "in_progress_at", "finalizing_at", "completed_at", "failed_at", "expired_at"),
    *("expires_at", "cancelling_at", "cancelled_at"),
)


def make_runner(calls: Calls, config: HttpConfig, **options: Any) -> JobRunner:
    """The runner of an app whose configuration names a folder. `options` are `JobRunner`'s."""
    folder = config.jobs_dir
    assert folder is not None

    def check(record: Mapping[str, Any]) -> str | None:
        model = record["body"].get("model")
        if model is not None and model not in calls.names:
            return (
                f"the model {model!r:.200} does not exist; this server has {', '.join(calls.names)} "
                f"(custom_id {record['custom_id']!r})"
            )
        return None

    return JobRunner(
        lambda: JobStore(folder),
        calls.answer_line,
        check=check,
        describe_error=envelope,
        lines_in_flight_max=config.batch_lines_in_flight_max,
        **options,
    )


class JobRoutes:
    """The handlers. Without a runner all say that the server keeps no files."""

    def __init__(self, runner: JobRunner | None, config: HttpConfig) -> None:
        self._maybe_runner = runner
        self._config = config

    def add_to(self, app: FastAPI, described: Described) -> None:
        for path, handler, method in (
            ("/v1/files", self.upload, "POST"),
            ("/v1/files", self.files, "GET"),
            ("/v1/files/{file_id}", self.file, "GET"),
            ("/v1/files/{file_id}", self.delete_file, "DELETE"),
            ("/v1/files/{file_id}/content", self.content, "GET"),
            ("/v1/batches", self.create_batch, "POST"),
            ("/v1/batches", self.batches, "GET"),
            ("/v1/batches/{batch_id}", self.batch, "GET"),
            ("/v1/batches/{batch_id}/cancel", self.cancel_batch, "POST"),
        ):
            app.add_api_route(path, handler, methods=[method], **described(path, method))

    @property
    def _runner(self) -> JobRunner:
        if self._maybe_runner is None:
            raise NotFoundError("this server keeps no files and runs no batches", code="jobs_disabled")
        return self._maybe_runner

    # --- files ---------------------------------------------------------------------------------------------

    async def upload(self, request: Request) -> Response:
        """Keep a file."""
        runner = self._runner
        target = await runner.call(JobStore.upload_path)
        try:
            upload = await read_upload(request, target, self._config.file_bytes_max)
            purpose = upload.fields.get("purpose")
            if purpose != PURPOSE:
                raise InvalidRequestError(
                    f"purpose must be {PURPOSE!r}, got {purpose!r:.80}", param="purpose"
                )
            if any(name.startswith("expires_after") for name in upload.fields):
                raise UnsupportedParameterError("expires_after")
            if upload.filename is None:
                raise InvalidRequestError("file is missing", param="file")
            row = await runner.call(
                JobStore.add_file, target, upload.filename, purpose, self._config.files_bytes_max
            )
        finally:
            await asyncio.to_thread(target.unlink, missing_ok=True)
        return _json(_file(row))

    async def files(self, request: Request) -> Response:
        """All files, newest first unless asked otherwise."""
        after, limit = _page(request, "files")
        order = request.query_params.get("order", "desc")
        if order not in ("asc", "desc"):
            raise InvalidRequestError(f"order must be asc or desc, got {order!r:.80}", param="order")
        purpose = request.query_params.get("purpose")
        rows = await self._runner.call(JobStore.files, purpose, after, limit + 1, order == "desc")
        return _json(_list([_file(row) for row in rows], limit))

    async def file(self, file_id: str) -> Response:
        """What is known of a file."""
        return _json(_file(await self._runner.call(JobStore.file, file_id)))

    async def delete_file(self, file_id: str) -> Response:
        """Forget a file that no batch needs."""
        await self._runner.call(JobStore.delete_file, file_id)
        return _json({"id": file_id, "object": "file", "deleted": True})

    async def content(self, file_id: str) -> Response:
        """The bytes of a file."""
        row = await self._runner.call(JobStore.file, file_id)
        path = await self._runner.call(JobStore.content_path, row["id"])
        return FileResponse(path, media_type="application/octet-stream", filename=row["filename"])

    # --- batches -------------------------------------------------------------------------------------------

    async def create_batch(self, request: Request) -> Response:
        """Run the lines of a file, below everything that has a caller waiting."""
        runner = self._runner
        body = await read_json(request, self._config)
        file_id = body.text("input_file_id")
        if file_id is None:
            raise InvalidRequestError("input_file_id is missing", param="input_file_id")
        endpoint = body.text("endpoint")
        if endpoint not in ENDPOINTS:
            raise InvalidRequestError(
                f"endpoint must be one of {', '.join(ENDPOINTS)}, got {endpoint!r:.80}", param="endpoint"
            )
        window = body.text("completion_window", "24h") or ""
        seconds = _window_seconds(window)
        metadata = _metadata(body.any("metadata"))
        body.refuse({"output_expires_after": ()})
        ignored = body.unknown()
        row = await runner.call(JobStore.add_batch, file_id, endpoint, window, seconds, metadata)
        runner.start()
        runner.wake()
        return _json(_batch(row), ignored)

    async def batches(self, request: Request) -> Response:
        """All batches, newest first."""
        after, limit = _page(request, "batches")
        rows = await self._runner.call(JobStore.batches, after, limit + 1)
        return _json(_list([_batch(row) for row in rows], limit))

    async def batch(self, batch_id: str) -> Response:
        """Where a batch stands."""
        return _json(_batch(await self._runner.call(JobStore.batch, batch_id)))

    async def cancel_batch(self, batch_id: str) -> Response:
        """End a batch; what is answered stays answered."""
        row = await self._runner.call(JobStore.cancel, batch_id)
        self._runner.start()
        self._runner.wake()
        return _json(_batch(row))


def _json(value: Any, ignored: Sequence[str] = ()) -> Response:
    headers = {"x-octavo-warning": f"unknown fields ignored: {', '.join(ignored)}"} if ignored else None
    return Response(orjson.dumps(value), headers=headers, media_type=JSON)


def _page(request: Request, kind: str) -> tuple[str | None, int]:
    """(`after`, `limit`) of a list. Raises `InvalidRequestError`."""
    limit = request.query_params.get("limit", str(PAGE_DEFAULT[kind]))
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= PAGE_MAX[kind]):
        raise InvalidRequestError(f"limit must be in [1, {PAGE_MAX[kind]}], got {limit:.80}", param="limit")
    return request.query_params.get("after"), int(limit)


def _list(objects: list[Row], limit: int) -> Row:
    """`objects`: one more than `limit` where there are more."""
    data = objects[:limit]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": len(objects) > limit,
    }


def _window_seconds(window: str) -> int:
    match = _WINDOW.fullmatch(window)
    seconds = int(match[1]) * _UNIT_SECONDS[match[2]] if match else 0
    if not 1 <= seconds <= WINDOW_SECONDS_MAX:
        raise InvalidRequestError(
            f"completion_window must be a number of m, h or d up to 30d, such as 24h, got {window!r:.80}",
            param="completion_window",
        )
    return seconds


def _metadata(given: Any) -> Row:
    if given is None:
        return {}
    fits = (
        isinstance(given, dict)
        and len(given) <= METADATA_MAX
        and all(
            len(key) <= METADATA_KEY_CHARS_MAX
            and isinstance(value, str)
            and len(value) <= METADATA_VALUE_CHARS_MAX
            for key, value in given.items()
        )
    )
    if not fits:
        raise InvalidRequestError(
            f"metadata takes up to {METADATA_MAX} strings of {METADATA_VALUE_CHARS_MAX} characters, with keys of "
            f"{METADATA_KEY_CHARS_MAX}",
            param="metadata",
        )
    return dict(given)


def _file(row: Row) -> Row:
    return {
        "id": row["id"],
        "object": "file",
        "bytes": row["bytes"],
        "created_at": row["created_at"],
        "filename": row["filename"],
        "purpose": row["purpose"],
        "status": "processed",
        "expires_at": None,
        "status_details": None,
    }


def _batch(row: Row) -> Row:
    errors = orjson.loads(row["errors"]) if row["errors"] else None
    return {
        "id": row["id"],
        "object": "batch",
        "endpoint": row["endpoint"],
        "errors": {"object": "list", "data": errors} if errors else None,
        "input_file_id": row["input_file_id"],
        "completion_window": row["completion_window"],
        "status": row["status"],
        "output_file_id": row["output_file_id"],
        "error_file_id": row["error_file_id"],
        **{name: row[name] for name in _TIMES},
        "request_counts": {name: row[name] for name in ("total", "completed", "failed")},
        "metadata": orjson.loads(row["metadata"]),
    }
