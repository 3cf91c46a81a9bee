"""The two files of a batch job: requests in, results out, in OpenAI's batch line format.

Owns the validation of a whole input file before anything runs, and the output file as a journal that survives
`kill -9` and power loss: which lines are finished is read back from the results themselves. Knows nothing of
servers or event loops.

Beside `out.jsonl` stands `out.jsonl.state.json`, which says by hash whose results these are.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from octavo.cluster.client_protocol import CHAT_COMPLETIONS, COMPLETIONS
from octavo.protos import errors

URLS = (CHAT_COMPLETIONS, COMPLETIONS)
MAX_LINE_BYTES = 32 * 2**20
MAX_LINES = 1_000_000
MAX_CUSTOM_ID_CHARS = 512
MAX_PROBLEMS_SHOWN = 10
STATE_VERSION = 1


@dataclass(frozen=True, slots=True)
class BatchLine:
    """Where one valid request is; its body stays on disk until it is sent."""

    number: int
    """1-based line of the file."""
    custom_id: str
    url: str
    offset: int
    length: int
    """Bytes."""


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong with one line."""

    number: int
    """1-based line of the file."""
    text: str


class BatchInput:
    """A valid input file, open. `lines` in file order, every `custom_id` once."""

    def __init__(self, path: Path, file: BinaryIO, sha256: str, lines: list[BatchLine]) -> None:
        self.path = path
        self.sha256 = sha256
        self.lines = lines
        self._file = file

    @classmethod
    def open(cls, path: str | Path, urls: Sequence[str] = URLS) -> BatchInput:
        """Read and check the whole file.

        Raises `ConfigError` when it cannot be read, and `InvalidRequestError` that names line and id of the
        first `MAX_PROBLEMS_SHOWN` problems: bad JSON, a missing, empty, overlong or repeated `custom_id`, a
        method that is not POST, a url that is not one of `urls`, a body that is no object or asks to stream.
        """
        path = Path(path)
        try:
            file = path.open("rb")
        except OSError as problem:
            raise _file_error("read", path, problem) from problem
        try:
            digest = hashlib.sha256()
            lines, problems = scan_lines(file, digest.update, urls=urls)
            if not lines and not problems:
                raise errors.InvalidRequestError(f"{path} holds no requests", param="input")
            if problems:
                raise errors.InvalidRequestError(_problem_text(path, problems), param="input")
            return cls(path, file, digest.hexdigest(), lines)
        except BaseException:
            file.close()
            raise

    def body(self, line: BatchLine) -> dict[str, Any]:
        """The request body of one line. Raises `InvalidRequestError` when the file was changed meanwhile."""
        try:
            record = orjson.loads(os.pread(self._file.fileno(), line.length, line.offset))
            if record["custom_id"] == line.custom_id:
                return dict(record["body"])
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError):
            pass
        raise errors.InvalidRequestError(
            f"{self.path} was changed while the batch ran (line {line.number})", param="input"
        )

    def close(self) -> None:
        self._file.close()


def scan_lines(
    file: BinaryIO,
    feed: Callable[[bytes], object] = lambda raw: None,
    *,
    check: Callable[[Mapping[str, Any]], str | None] = lambda record: None,
    urls: Sequence[str] = URLS,
) -> tuple[list[BatchLine], list[Problem]]:
    """The valid requests of a whole file and what is wrong with the others. `feed` gets every byte; `check` says what
    else is wrong with a record that is well formed, if anything."""
    lines: list[BatchLine] = []
    problems: list[Problem] = []
    first_use: dict[str, int] = {}
    offset = 0
    # Cut at LF only: text mode would also cut at a bare CR, and str.splitlines at U+2028 inside a prompt.
    for number, (raw, too_long) in enumerate(_raw_lines(file, feed), start=1):
        start, offset = offset, offset + len(raw)
        if too_long:
            problems.append(Problem(number, f"longer than {MAX_LINE_BYTES} bytes"))
            break
        text = raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw
        if not text.strip():
            continue
        if len(lines) == MAX_LINES:
            problems.append(Problem(number, f"more than {MAX_LINES} requests in one file"))
            break
        record, wrong = _checked_record(text, urls)
        wrong = wrong or check(record)
        if wrong is None:
            custom_id = record["custom_id"]
            if custom_id in first_use:
                wrong = f"custom_id {custom_id!r} was already used on line {first_use[custom_id]}"
            else:
                first_use[custom_id] = number
                begin = start + len(raw) - len(text)
                lines.append(BatchLine(number, custom_id, record["url"], begin, len(text)))
        if wrong is not None:
            problems.append(Problem(number, wrong))
    return lines, problems


def _raw_lines(file: BinaryIO, feed: Callable[[bytes], object]) -> Iterator[tuple[bytes, bool]]:
    while raw := file.readline(MAX_LINE_BYTES + 1):
        feed(raw)
        yield raw, len(raw) > MAX_LINE_BYTES


def _checked_record(text: bytes, urls: Sequence[str]) -> tuple[dict[str, Any], str | None]:
    """One parsed line and what is wrong with it, if anything."""
    try:
        record = orjson.loads(text)
    except orjson.JSONDecodeError as problem:
        return {}, f"not valid JSON ({problem})"
    if not isinstance(record, dict):
        return {}, f"must be a JSON object, got {type(record).__name__}"
    return record, _wrong_with(record, urls)


def _wrong_with(record: Mapping[str, Any], urls: Sequence[str]) -> str | None:
    custom_id = record.get("custom_id")
    if "custom_id" not in record:
        return "custom_id is missing"
    if not isinstance(custom_id, str):
        return f"custom_id must be a string, got {custom_id!r:.80}"
    if not custom_id.strip():
        return "custom_id is empty"
    if len(custom_id) > MAX_CUSTOM_ID_CHARS:
        return f"custom_id is longer than {MAX_CUSTOM_ID_CHARS} characters"
    if record.get("method") != "POST":
        return f"method must be 'POST', got {record.get('method')!r:.80} (custom_id {custom_id!r})"
    if record.get("url") not in urls:
        return f"url must be {' or '.join(urls)}, got {record.get('url')!r:.80} (custom_id {custom_id!r})"
    body = record.get("body")
    if not isinstance(body, dict):
        return f"body must be a JSON object (custom_id {custom_id!r})"
    if body.get("stream"):
        return f"body.stream must be false or absent in a batch (custom_id {custom_id!r})"
    return None


def _problem_text(path: Path, problems: list[Problem]) -> str:
    shown = [f"{path} line {problem.number}: {problem.text}" for problem in problems[:MAX_PROBLEMS_SHOWN]]
    if len(problems) > MAX_PROBLEMS_SHOWN:
        shown.append(f"... and {len(problems) - MAX_PROBLEMS_SHOWN} more problems")
    return "\n".join(shown)


@dataclass(frozen=True, slots=True)
class Finished:
    """What a results file already holds."""

    custom_ids: frozenset[str]
    num_failed: int


class Journal:
    """The results file. A line is written whole with one append, so only the last one can be torn.

    What `append` returned for outlives the process; what `sync` returned for outlives the machine.
    """

    def __init__(self, path: Path, descriptor: int, finished: Finished) -> None:
        self.path = path
        self.finished = finished
        self._descriptor = descriptor
        self._dirty = False

    @classmethod
    def open(cls, path: str | Path, batch: BatchInput, *, overwrite: bool = False) -> Journal:
        """Open or create the results of `batch`, repair a torn last line, and read what is finished.

        Raises `ConfigError` when the file cannot be written, belongs to another input (by its state file),
        holds something that is no result of `batch`, or is being written by another process. `overwrite`
        drops what is there.
        """
        path = Path(path)
        if path.exists() and path.samefile(batch.path):
            raise errors.ConfigError(f"{path} is the input; give another output file", param="output")
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as problem:
            raise _file_error("write", path, problem) from problem
        try:
            _lock(descriptor, path)
            if overwrite:
                os.ftruncate(descriptor, 0)
            finished = _recover(descriptor, path, batch)
            return cls(path, descriptor, finished)
        except OSError as problem:
            os.close(descriptor)
            raise _file_error("write", path, problem) from problem
        except BaseException:
            os.close(descriptor)
            raise

    def append(self, record: Mapping[str, Any]) -> None:
        """Add one result. Raises `UnavailableError` when the disk refuses; the torn line is repaired
        later.
        """
        view = memoryview(orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE))
        try:
            while view:
                view = view[os.write(self._descriptor, view) :]
        except OSError as problem:
            raise errors.UnavailableError(
                f"cannot write {self.path}: {problem.strerror}", code="disk"
            ) from problem
        self._dirty = True

    def sync(self) -> None:
        """Make everything appended so far outlive a power loss. Cheap when nothing is new."""
        if self._dirty:
            self._dirty = False
            os.fsync(self._descriptor)

    def close(self) -> None:
        self.sync()
        os.close(self._descriptor)


def num_unfinished(input_path: str | Path, output_path: str | Path, *, overwrite: bool = False) -> int:
    """How many lines are left to answer. Raises what `BatchInput.open` and `Journal.open` raise."""
    batch = BatchInput.open(input_path)
    try:
        journal = Journal.open(output_path, batch, overwrite=overwrite)
        journal.close()
        return len(batch.lines) - len(journal.finished.custom_ids)
    finally:
        batch.close()


def state_path(path: Path) -> Path:
    """The file that says whose results `path` holds."""
    return path.with_name(path.name + ".state.json")


def _lock(descriptor: int, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise errors.ConfigError(f"{path} is being written by another octavo batch", param="output") from None


def _recover(descriptor: int, path: Path, batch: BatchInput) -> Finished:
    state = state_path(path)
    if os.fstat(descriptor).st_size == 0:
        _write_state(state, batch)
        return Finished(frozenset(), 0)
    advice = "give another output file, or --overwrite to drop what is there"
    try:
        belongs = orjson.loads(state.read_bytes()).get("input_sha256")
    except FileNotFoundError:
        raise errors.ConfigError(
            f"{path} was not written by octavo batch ({state.name} is missing); {advice}", param="output"
        ) from None
    except (orjson.JSONDecodeError, AttributeError):
        raise errors.ConfigError(f"{state} is damaged; {advice}", param="output") from None
    if belongs != batch.sha256:
        raise errors.ConfigError(
            f"{path} holds the results of another input than {batch.path}; {advice}", param="output"
        )
    return _read_finished(descriptor, path, {line.custom_id for line in batch.lines})


def _read_finished(descriptor: int, path: Path, known: set[str]) -> Finished:
    custom_ids: set[str] = set()
    num_failed = 0
    end = 0
    with open(descriptor, "rb", closefd=False) as file:
        for number, raw in enumerate(file, start=1):
            if not raw.endswith(b"\n"):
                break  # torn by a crash in mid-write: this line was never finished
            custom_id, failed = _result_of(raw)
            if custom_id is None or custom_id not in known or custom_id in custom_ids:
                raise errors.ConfigError(
                    f"{path} line {number} is not a result of this batch; give another output file, or "
                    "--overwrite to drop what is there",
                    param="output",
                )
            custom_ids.add(custom_id)
            num_failed += failed
            end += len(raw)
    os.ftruncate(descriptor, end)
    return Finished(frozenset(custom_ids), num_failed)


def _result_of(raw: bytes) -> tuple[str | None, bool]:
    """(custom_id, failed) of one result line; (None, False) when it is none."""
    try:
        record = orjson.loads(raw)
        return record["custom_id"], is_failure(record)
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
        return None, False


def is_failure(record: Mapping[str, Any]) -> bool:
    """Whether a result line says that its request did not succeed."""
    return record["error"] is not None or record["response"]["status_code"] != 200


def _write_state(state: Path, batch: BatchInput) -> None:
    """Before the first result, whole or not at all."""
    content = orjson.dumps(
        {
            "version": STATE_VERSION,
            "input": batch.path.name,
            "input_sha256": batch.sha256,
            "num_requests": len(batch.lines),
        },
        option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE,
    )
    temporary = state.with_name(state.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(state)
    directory = os.open(state.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _file_error(verb: str, path: Path, problem: OSError) -> errors.ConfigError:
    return errors.ConfigError(f"cannot {verb} {path}: {problem.strerror or problem}", param="input")
