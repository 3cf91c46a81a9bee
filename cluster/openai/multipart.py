"""An upload as browsers and OpenAI's clients send it: multipart/form-data (RFC 7578), read piece by piece.

Owns the format and its limits. The file goes to disk as it comes, so that its size is the disk's affair; everything
else must be short.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from starlette.requests import Request

from octavo.cluster.openai.errors import BodyTooLargeError
from octavo.protos.errors import InvalidRequestError

HEAD_BYTES_MAX = 16 * 1024
"""Of one part's headers."""
FIELD_BYTES_MAX = 64 * 1024
PARTS_MAX = 32
FILENAME_CHARS_MAX = 255
_WRITE_BYTES = 2**20
"""Gathered before a thread is asked to write them."""
_BOUNDARY = re.compile(r'multipart/form-data\s*;.*?boundary=(?:"([^"]{1,70})"|([^;\s]{1,70}))', re.IGNORECASE)
_PARAMETER = re.compile(r';\s*([\w*]+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^;\s]*))')


@dataclass(slots=True)
class Upload:
    """What was sent."""

    fields: dict[str, str] = field(default_factory=dict)
    filename: str | None = None
    """None: no file came."""


async def read_upload(request: Request, target: Path, bytes_max: int) -> Upload:
    """Read the form; the part "file" goes to `target`.

    Raises `InvalidRequestError` for what is no such form, `BodyTooLargeError`, Starlette's `ClientDisconnect`.
    """
    match = _BOUNDARY.match(request.headers.get("content-type", ""))
    if match is None:
        raise InvalidRequestError(
            "the content type must be multipart/form-data with a boundary", code="unsupported_media_type"
        )
    reader = _Reader((match[1] or match[2]).encode(), target)
    size = 0
    try:
        async for piece in request.stream():
            size += len(piece)
            if size > bytes_max:
                raise BodyTooLargeError(f"the upload is larger than the limit of {bytes_max} bytes")
            reader.feed(piece)
            if reader.num_unwritten >= _WRITE_BYTES:
                await asyncio.to_thread(reader.write)
        await asyncio.to_thread(reader.write)
    finally:
        reader.close()
    if not reader.ended:
        raise InvalidRequestError("the form ends in the middle of a part")
    return reader.upload


class _Reader:
    """Takes pieces of a form. Between two of them its buffer is shorter than a delimiter or a part's headers."""

    def __init__(self, boundary: bytes, target: Path) -> None:
        self.upload = Upload()
        self.ended = False
        self._delimiter = b"\r\n--" + boundary
        # The first delimiter has no line end before it.
        self._buffer = bytearray(b"\r\n")
        self._in_head = False
        self._name: str | None = None
        """Of the part whose content comes; None before the first."""
        self._content = bytearray()
        self._num_parts = 0
        self._target = target
        self._file: BinaryIO | None = None

    @property
    def num_unwritten(self) -> int:
        return len(self._content) if self._name == "file" else 0

    def feed(self, piece: bytes) -> None:
        self._buffer += piece
        while not self.ended and (self._take_head() if self._in_head else self._take_content()):
            pass
        if self.ended:
            self._buffer.clear()  # an epilogue says nothing

    def write(self) -> None:
        """Blocking."""
        if self._file is not None and self._name == "file":
            self._file.write(self._content)
            self._content.clear()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _take_content(self) -> bool:
        """Up to the next delimiter; False when more must come."""
        at = self._buffer.find(self._delimiter)
        if at < 0:
            # Its end may be the beginning of a delimiter.
            self._add(len(self._buffer) - len(self._delimiter) + 1)
            return False
        after = at + len(self._delimiter)
        if len(self._buffer) < after + 2:
            return False
        self._add(at)
        mark = bytes(self._buffer[len(self._delimiter) : len(self._delimiter) + 2])
        if mark not in (b"--", b"\r\n"):
            raise InvalidRequestError("a boundary of the form is not followed by a line end")
        self._end_part()
        self.ended = mark == b"--"
        self._in_head = not self.ended
        # The line end stays: it is the first of the headers.
        del self._buffer[: len(self._delimiter)]
        return True

    def _add(self, count: int) -> None:
        if count <= 0:
            return
        if self._name is not None:
            self._content += self._buffer[:count]
            if self._name != "file" and len(self._content) > FIELD_BYTES_MAX:
                raise InvalidRequestError(f"{self._name:.100} has more than {FIELD_BYTES_MAX} bytes")
        del self._buffer[:count]

    def _take_head(self) -> bool:
        at = self._buffer.find(b"\r\n\r\n")
        if at > HEAD_BYTES_MAX or (at < 0 and len(self._buffer) > HEAD_BYTES_MAX):
            raise InvalidRequestError("a part of the form has too many headers")
        if at < 0:
            return False
        head = self._buffer[:at].decode("utf-8", "replace")
        del self._buffer[: at + 4]
        self._begin_part(head)
        self._in_head = False
        return True

    def _begin_part(self, head: str) -> None:
        self._num_parts += 1
        if self._num_parts > PARTS_MAX:
            raise InvalidRequestError(f"the form has more than {PARTS_MAX} parts")
        disposition = next(
            (line for line in head.split("\r\n") if line.lower().startswith("content-disposition:")), ""
        )
        told = {name.lower(): quoted or plain for name, quoted, plain in _PARAMETER.findall(disposition)}
        if "name" not in told:
            raise InvalidRequestError("a part of the form has no name")
        self._name = told["name"]
        if self._name == "file":
            if self._file is not None:
                raise InvalidRequestError("the form has more than one file", param="file")
            self.upload.filename = told.get("filename", "")[-FILENAME_CHARS_MAX:] or "upload"
            self._file = self._target.open("wb")

    def _end_part(self) -> None:
        if self._name is None:
            self._content.clear()
        elif self._name == "file":
            self.write()
        else:
            self.upload.fields[self._name] = self._content.decode("utf-8", "replace")
            self._content.clear()
        self._name = None
