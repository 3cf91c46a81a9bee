"""Uploaded files and batches on disk: what must survive the end of every process.

Owns the SQLite database (files, batches, lines with their answers), the folder of contents beside it, and who works
on which batch. An answer and the counts that include it are one transaction, and a line takes one answer only, so that
whoever resumes a batch can neither lose nor repeat one. Several processes of one machine may share a folder: a batch
belongs to whoever has its lease. Knows nothing of HTTP, requests or event loops; blocking, one thread at a time.
"""

from __future__ import annotations

import os
import sqlite3
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson

from octavo.cluster.batch_file import BatchLine, Problem
from octavo.protos.errors import ConfigError, InvalidRequestError, NotFoundError, OverloadedError

SCHEMA_VERSION = 1
BUSY_SECONDS_MAX = 30.0
"""How long a statement waits for another process."""
UPLOAD_SECONDS_MAX = 86_400.0
UNFINISHED_BATCHES_MAX = 1000
UNFINISHED = ("validating", "in_progress", "finalizing", "cancelling")
_MARKS = ", ".join("?" * len(UNFINISHED))

OPEN, SUCCEEDED, FAILED = 0, 1, 2
"""States of a line."""

_SCHEMA = """
CREATE TABLE files (
    id TEXT PRIMARY KEY, filename TEXT NOT NULL, purpose TEXT NOT NULL, bytes INTEGER NOT NULL,
    created_at INTEGER NOT NULL, number INTEGER NOT NULL
);
CREATE TABLE batches (
    id TEXT PRIMARY KEY, number INTEGER NOT NULL, created_at INTEGER NOT NULL, expires_at INTEGER NOT NULL,
    endpoint TEXT NOT NULL, input_file_id TEXT NOT NULL, completion_window TEXT NOT NULL, metadata TEXT,
    status TEXT NOT NULL, errors TEXT, output_file_id TEXT, error_file_id TEXT,
    total INTEGER NOT NULL DEFAULT 0, completed INTEGER NOT NULL DEFAULT 0, failed INTEGER NOT NULL DEFAULT 0,
    in_progress_at INTEGER, finalizing_at INTEGER, completed_at INTEGER, failed_at INTEGER, expired_at INTEGER,
    cancelling_at INTEGER, cancelled_at INTEGER, owner TEXT, lease_until REAL NOT NULL DEFAULT 0
);
CREATE TABLE lines (
    batch_id TEXT NOT NULL, number INTEGER NOT NULL, custom_id TEXT NOT NULL, position INTEGER NOT NULL,
    length INTEGER NOT NULL, state INTEGER NOT NULL DEFAULT 0, result BLOB,
    PRIMARY KEY (batch_id, number)
) WITHOUT ROWID;
"""

Row = dict[str, Any]


class JobStore:
    """See the module. `clock` gives seconds since 1970."""

    def __init__(self, folder: str | Path, *, clock: Callable[[], float] = time.time) -> None:
        """Raises `ConfigError` when the folder cannot be used, or was written by a newer version."""
        self.folder = Path(folder)
        self._clock = clock
        try:
            (self.folder / "files").mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(
                self.folder / "jobs.sqlite",
                timeout=BUSY_SECONDS_MAX,
                isolation_level=None,
                check_same_thread=False,
            )
            self._db.row_factory = sqlite3.Row
            # A killed process loses nothing. After a power loss the last answers may be asked for again.
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._create_tables()
            self._drop_stale_uploads()
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(
                f"{self.folder} cannot hold files and batches: {error}", param="jobs_dir"
            ) from error

    def _create_tables(self) -> None:
        with self._transaction():
            (version,) = self._db.execute("PRAGMA user_version").fetchone()
            if version > SCHEMA_VERSION:
                raise ConfigError(f"{self.folder} was written by a newer version", param="jobs_dir")
            if version == 0:
                for statement in _SCHEMA.split(";"):
                    self._db.execute(statement)
                self._db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    def _drop_stale_uploads(self) -> None:
        """What killed processes left. A younger one may still be under way in another."""
        for path in (self.folder / "files").glob("upload-*"):
            if path.stat().st_mtime < time.time() - UPLOAD_SECONDS_MAX:
                path.unlink(missing_ok=True)

    def close(self) -> None:
        self._db.close()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    def _now(self) -> int:
        return int(self._clock())

    # --- files ---------------------------------------------------------------------------------------------

    def content_path(self, file_id: str) -> Path:
        """Where the content of a known file is."""
        return self.folder / "files" / file_id

    def upload_path(self) -> Path:
        """A new place for a content that is still coming."""
        return self.folder / "files" / f"upload-{uuid.uuid4().hex}"

    def add_file(self, uploaded: Path, filename: str, purpose: str, total_bytes_max: int) -> Row:
        """Take over a content that lies at an `upload_path`.

        Raises `InvalidRequestError` when all files together would be too large.
        """
        size = uploaded.stat().st_size
        with self._transaction():
            (total,) = self._db.execute("SELECT coalesce(sum(bytes), 0) FROM files").fetchone()
            if total + size > total_bytes_max:
                raise InvalidRequestError(
                    f"all files together may have {total_bytes_max} bytes; {total} are taken: delete some",
                    param="file",
                )
            file_id = f"file-{uuid.uuid4().hex}"
            _move(uploaded, self.content_path(file_id))
            self._insert_file(file_id, filename, purpose, size)
        return self.file(file_id)

    def _insert_file(self, file_id: str, filename: str, purpose: str, size: int) -> None:
        self._db.execute(
            "INSERT INTO files SELECT ?, ?, ?, ?, ?, coalesce(max(number), 0) + 1 FROM files",
            (file_id, filename, purpose, size, self._now()),
        )

    def file(self, file_id: str) -> Row:
        """Raises `NotFoundError`."""
        return self._one("files", file_id, "file")

    def files(self, purpose: str | None, after: str | None, limit: int, newest_first: bool) -> list[Row]:
        """Raises `NotFoundError` for an `after` that is none."""
        where, values = ("WHERE purpose = ?", [purpose]) if purpose else ("", [])
        return self._page("files", where, values, after, limit, newest_first)

    def delete_file(self, file_id: str) -> None:
        """Raises `NotFoundError`, and `InvalidRequestError` while a batch needs the file."""
        with self._transaction():
            self.file(file_id)
            user = self._db.execute(
                f"SELECT id FROM batches WHERE input_file_id = ? AND status IN ({_MARKS})",
                (file_id, *UNFINISHED),
            ).fetchone()
            if user is not None:
                raise InvalidRequestError(f"batch {user['id']} still reads {file_id}", param="file_id")
            self._db.execute("DELETE FROM files WHERE id = ?", (file_id,))
        self.content_path(file_id).unlink(missing_ok=True)

    # --- batches -------------------------------------------------------------------------------------------

    def add_batch(self, input_file_id: str, endpoint: str, window: str, seconds: int, metadata: Row) -> Row:
        """Raises `NotFoundError` for an unknown file, `OverloadedError` for too many unfinished batches."""
        batch_id, now = f"batch_{uuid.uuid4().hex}", self._now()
        with self._transaction():
            self.file(input_file_id)
            (count,) = self._db.execute(
                f"SELECT count(*) FROM batches WHERE status IN ({_MARKS})", UNFINISHED
            ).fetchone()
            if count >= UNFINISHED_BATCHES_MAX:
                raise OverloadedError(f"{count} batches are unfinished, which is the limit")
            self._db.execute(
                "INSERT INTO batches (id, number, created_at, expires_at, endpoint, input_file_id,"
                " completion_window, metadata, status)"
                " SELECT ?, coalesce(max(number), 0) + 1, ?, ?, ?, ?, ?, ?, 'validating' FROM batches",
                (batch_id, now, now + seconds, endpoint, input_file_id, window, orjson.dumps(metadata)),
            )
        return self.batch(batch_id)

    def batch(self, batch_id: str) -> Row:
        """Raises `NotFoundError`."""
        return self._one("batches", batch_id, "batch")

    def batches(self, after: str | None, limit: int) -> list[Row]:
        """Newest first. Raises `NotFoundError` for an `after` that is none."""
        return self._page("batches", "", [], after, limit, newest_first=True)

    def cancel(self, batch_id: str) -> Row:
        """Ask for the end of a batch. Raises `NotFoundError`, and `InvalidRequestError` for one that has ended."""
        with self._transaction():
            status = self.batch(batch_id)["status"]
            if status in ("validating", "in_progress"):
                self._db.execute(
                    "UPDATE batches SET status = 'cancelling', cancelling_at = ? WHERE id = ?",
                    (self._now(), batch_id),
                )
            elif status != "cancelling":
                raise InvalidRequestError(
                    f"batch {batch_id} is {status} and cannot be cancelled", param="batch_id"
                )
        return self.batch(batch_id)

    # --- work ----------------------------------------------------------------------------------------------

    def claim(self, owner: str, lease_seconds: float) -> Row | None:
        """The oldest unfinished batch that nobody works on; it is `owner`'s for `lease_seconds`."""
        now = self._clock()
        with self._transaction():
            row = self._db.execute(
                f"SELECT id FROM batches WHERE status IN ({_MARKS}) AND (owner IS NULL OR lease_until < ?)"
                " ORDER BY number LIMIT 1",
                (*UNFINISHED, now),
            ).fetchone()
            if row is None:
                return None
            self._db.execute(
                "UPDATE batches SET owner = ?, lease_until = ? WHERE id = ?",
                (owner, now + lease_seconds, row["id"]),
            )
        return self.batch(row["id"])

    def renew(self, batch_id: str, owner: str, lease_seconds: float) -> Row | None:
        """The batch as it is now; None when somebody else has it."""
        changed = self._db.execute(
            "UPDATE batches SET lease_until = ? WHERE id = ? AND owner = ?",
            (self._clock() + lease_seconds, batch_id, owner),
        )
        return self.batch(batch_id) if changed.rowcount else None

    def release(self, batch_id: str, owner: str) -> None:
        """Somebody else may go on with it at once."""
        self._db.execute("UPDATE batches SET owner = NULL WHERE id = ? AND owner = ?", (batch_id, owner))

    def begin(self, batch_id: str, owner: str, lines: Iterable[BatchLine]) -> None:
        """The input is valid: its lines may run. Nothing happens for a batch that is not, or no longer, validating."""
        with self._transaction():
            changed = self._db.execute(
                "UPDATE batches SET status = 'in_progress', in_progress_at = ?"
                " WHERE id = ? AND owner = ? AND status = 'validating'",
                (self._now(), batch_id, owner),
            )
            if not changed.rowcount:
                return
            self._db.executemany(
                "INSERT INTO lines (batch_id, number, custom_id, position, length) VALUES (?, ?, ?, ?, ?)",
                ((batch_id, line.number, line.custom_id, line.offset, line.length) for line in lines),
            )
            self._db.execute(
                "UPDATE batches SET total = (SELECT count(*) FROM lines WHERE batch_id = ?) WHERE id = ?",
                (batch_id, batch_id),
            )

    def fail(self, batch_id: str, owner: str, problems: Iterable[Problem]) -> None:
        """The input is not valid: nothing of it runs."""
        told = [
            {"code": "invalid_line", "line": problem.number, "message": problem.text, "param": None}
            for problem in problems
        ]
        self._db.execute(
            "UPDATE batches SET status = 'failed', failed_at = ?, errors = ?, owner = NULL"
            " WHERE id = ? AND owner = ? AND status IN ('validating', 'cancelling')",
            (self._now(), orjson.dumps(told), batch_id, owner),
        )

    def open_lines(self, batch_id: str, after: int, limit: int) -> list[Row]:
        """Lines without an answer whose number is above `after`, in order."""
        rows = self._db.execute(
            "SELECT number, custom_id, position, length FROM lines"
            " WHERE batch_id = ? AND state = ? AND number > ? ORDER BY number LIMIT ?",
            (batch_id, OPEN, after, limit),
        )
        return [dict(row) for row in rows]

    def answer(self, batch_id: str, owner: str, number: int, result: bytes, *, succeeded: bool) -> bool:
        """Keep the one answer of a line. False, and nothing kept, when it has one or the batch is another's now."""
        with self._transaction():
            changed = self._db.execute(
                "UPDATE lines SET state = ?, result = ? WHERE batch_id = ? AND number = ? AND state = ?"
                " AND EXISTS (SELECT 1 FROM batches WHERE id = ? AND owner = ?)",
                (SUCCEEDED if succeeded else FAILED, result, batch_id, number, OPEN, batch_id, owner),
            )
            if changed.rowcount:
                column = "completed" if succeeded else "failed"
                self._db.execute(f"UPDATE batches SET {column} = {column} + 1 WHERE id = ?", (batch_id,))
        return bool(changed.rowcount)

    def finish(self, batch_id: str, owner: str, status: str, unanswered: Callable[[str], bytes]) -> None:
        """Write output and error file and end the batch as "completed", "expired" or "cancelled".

        `unanswered` makes the result of a line that never ran, by its custom id. May be repeated from the start.
        """
        assert status in ("completed", "expired", "cancelled")
        self._db.execute(
            "UPDATE batches SET status = 'finalizing', finalizing_at = ?"
            " WHERE id = ? AND owner = ? AND status = 'in_progress' AND ? = 'completed'",
            (self._now(), batch_id, owner, status),
        )
        suffix = batch_id.removeprefix("batch_")
        outputs = []
        for name, states in (("output", (SUCCEEDED, SUCCEEDED)), ("error", (OPEN, FAILED))):
            rows = self._db.execute(
                "SELECT custom_id, state, result FROM lines WHERE batch_id = ? AND state IN (?, ?) ORDER BY number",
                (batch_id, *states),
            )
            # The same name at every try: what a killed one left is overwritten.
            file_id = f"file-{name}{suffix}"
            size = self._write_results(self.content_path(file_id), rows, unanswered)
            outputs.append((name, file_id if size else None, size))
        with self._transaction():
            changed = self._db.execute(
                f"UPDATE batches SET status = ?, {status}_at = ?, output_file_id = ?, error_file_id = ?,"
                f" failed = total - completed, owner = NULL WHERE id = ? AND owner = ? AND status IN ({_MARKS})",
                (status, self._now(), outputs[0][1], outputs[1][1], batch_id, owner, *UNFINISHED),
            )
            if not changed.rowcount:
                return
            for name, made, size in outputs:
                if made is not None:
                    self._insert_file(made, f"{batch_id}_{name}.jsonl", "batch_output", size)
            self._db.execute("DELETE FROM lines WHERE batch_id = ?", (batch_id,))

    @staticmethod
    def _write_results(path: Path, rows: Iterable[sqlite3.Row], unanswered: Callable[[str], bytes]) -> int:
        """Bytes written; without rows no file."""
        size = 0
        temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
        with temporary.open("wb") as file:
            for row in rows:
                result = unanswered(row["custom_id"]) if row["state"] == OPEN else row["result"]
                size += file.write(result + b"\n")
        if size:
            _move(temporary, path)
        else:
            temporary.unlink()
        return size

    # --- reading -------------------------------------------------------------------------------------------

    def _one(self, table: str, row_id: str, noun: str) -> Row:
        row = self._db.execute(f"SELECT * FROM {table} WHERE id = ?", (row_id,)).fetchone()
        if row is None:
            raise NotFoundError(f"no {noun} {row_id!r:.100}", param=f"{noun}_id", code=f"{noun}_not_found")
        return dict(row)

    def _page(
        self, table: str, where: str, values: list[Any], after: str | None, limit: int, newest_first: bool
    ) -> list[Row]:
        if after is not None:
            number = self._one(table, after, "file" if table == "files" else "batch")["number"]
            where += f"{' AND' if where else 'WHERE'} number {'<' if newest_first else '>'} ?"
            values = [*values, number]
        order = "DESC" if newest_first else "ASC"
        rows = self._db.execute(
            f"SELECT * FROM {table} {where} ORDER BY number {order} LIMIT ?", (*values, limit)
        )
        return [dict(row) for row in rows]


def _move(source: Path, target: Path) -> None:
    """So that what is at `target` outlives a power loss."""
    with source.open("rb") as file:
        os.fsync(file.fileno())
    source.replace(target)
