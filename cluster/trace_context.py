"""W3C Trace Context: which span of its caller a call belongs to, as the header `traceparent` says.

Owns what a valid header is. Knows nothing of OpenTelemetry, which whoever only passes it on does not need.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

HEADER = b"traceparent"
_VALID = re.compile(
    rb"(?P<version>[0-9a-f]{2})-(?P<span>(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2})(?P<more>-.*)?"
)


def trace_parent_of(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The caller's span by an exchange's headers, whose names are in lower case: "00-TRACE-SPAN-FLAGS", whatever later
    version it came in, or "". A header that is not valid counts for none, and so do several, as the standard asks."""
    values = [value for name, value in headers if name == HEADER]
    found = _VALID.fullmatch(values[0].strip(b" \t")) if len(values) == 1 else None
    if found is None or found["version"] == b"ff" or (found["version"] == b"00" and found["more"]):
        return ""
    return f"00-{found['span'].decode()}"
