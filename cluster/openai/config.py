"""What the HTTP front door may be told, and every limit it keeps.

Owns names, defaults and validation of these options. Read once; never changed afterwards.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from octavo.cluster.openai.tool_parsers import TOOL_PARSERS
from octavo.protos.errors import ConfigError

MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpConfig:
    """Options of one HTTP app. Raises `ConfigError` naming the option."""

    served_model_names: tuple[str, ...] = ()
    """Names that clients may ask for; the first is listed first. Empty: the model's own name."""
    api_keys: tuple[str, ...] = ()
    """Bearer keys for everything but /health, /ready and /metrics. Empty: open to all who reach the port."""
    live_page: bool = False
    """Serve the page at /ui. What it shows needs a key, as everything does."""
    cors_origins: tuple[str, ...] = ()
    """Origins ("https://example.org", or "*") whose pages may call from a browser. Empty: none but our own."""
    jobs_dir: str | None = None
    """Folder of files and batches. None: neither is served."""
    file_bytes_max: int = 512 * MIB
    files_bytes_max: int = 32 * 1024 * MIB
    """All files together, answers of batches not counted while these run."""
    batch_lines_in_flight_max: int = 64
    """All batches of this process together."""
    body_bytes_max: int = 8 * MIB
    body_seconds_max: float = 60.0
    """A client that has not sent its whole body by then gets 408."""
    header_bytes_max: int = 32 * 1024
    """All header names and values together; more is refused with 431."""
    request_id_bytes_max: int = 256
    """Of the client's X-Request-Id, which is echoed and never a key."""
    requests_in_flight_max: int = 4096
    """Calls that generate, at once, in this process; more are refused with 429."""
    prompts_per_request_max: int = 1024
    choices_per_request_max: int = 2048
    """Prompts times n, or times `best_of` or `beam_width` where more branches run than are returned."""
    messages_per_request_max: int = 4096
    stop_strings_max: int = 4
    tool_call_parser: str = "auto"
    """How the model writes calls of tools: "auto" (what its chat template shows) or one of `TOOL_PARSERS`."""
    retry_after_seconds: float = 1.0
    """Sent with 429 and 503 when the error itself names no time."""
    health_seconds_max: float = 2.0
    """How long /health waits for the backend's word before it calls it dead."""
    stream_items_per_second: float = 1500.0
    """What the layers below carry for all streams together; beyond it, tokens share events. 0: no limit. The default is
    what Ray Serve's proxy carries."""
    stream_flush_seconds_max: float = 0.05
    """However many streams run, no token waits longer than this for company."""
    replica: str = ""
    """Label of this process in /metrics, where several stand behind one address."""

    def __post_init__(self) -> None:
        for name in ("served_model_names", "api_keys", "cors_origins"):
            values = getattr(self, name)
            if isinstance(values, str) or not all(isinstance(value, str) and value for value in values):
                told = "" if name == "api_keys" else f", got {values!r}"  # keys are not printed
                raise ConfigError(f"{name} must be a list of non-empty strings{told}", param=name)
            object.__setattr__(self, name, tuple(values))
        if self.tool_call_parser not in ("auto", *TOOL_PARSERS):
            raise ConfigError(
                f"tool_call_parser must be one of auto, {', '.join(TOOL_PARSERS)}, got {self.tool_call_parser!r}",
                param="tool_call_parser",
            )
        if self.jobs_dir is not None and not (isinstance(self.jobs_dir, str) and self.jobs_dir):
            raise ConfigError(f"jobs_dir must be a folder, got {self.jobs_dir!r}", param="jobs_dir")
        for name in (
            "body_bytes_max",
            "file_bytes_max",
            "files_bytes_max",
            "batch_lines_in_flight_max",
            "header_bytes_max",
            "request_id_bytes_max",
            "requests_in_flight_max",
            "prompts_per_request_max",
            "choices_per_request_max",
            "messages_per_request_max",
            "stop_strings_max",
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} must be an integer of at least 1, got {value!r}", param=name)
        for name, low in (
            ("body_seconds_max", 0.001),
            ("retry_after_seconds", 0.0),
            ("health_seconds_max", 0.001),
            ("stream_items_per_second", 0.0),
            ("stream_flush_seconds_max", 0.0),
        ):
            value = getattr(self, name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not number or not low <= value < math.inf:
                raise ConfigError(f"{name} must be a number of at least {low:g}, got {value!r}", param=name)
