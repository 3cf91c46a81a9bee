"""OpenTelemetry traces: one span tree a request, made from its timeline when it ends.

Owns what a span is: the request is the root, or a child of its caller's span, each phase (queued, prefill, parked,
decode) a child of it, each entry of the timeline an event of it. Costs nothing while a request runs. Needs the extra
`otel`; nothing else imports this before traces are asked for. Sampling, headers and resource attributes follow
OpenTelemetry's own variables.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import xxhash

from octavo.protos.errors import ConfigError
from octavo.protos.types import Request

try:
    from opentelemetry import trace
    from opentelemetry.context import Context
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
except ImportError as error:
    raise ConfigError(
        "traces need OpenTelemetry: pip install 'octavo[otel]'", param="otlp_endpoint"
    ) from error

_FAILED = ("failed", "error")
_ATTRIBUTES = {
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "cached_tokens": "octavo.cached_tokens",
    "worker": "octavo.worker",
    "outcome": "octavo.outcome",
    "preemptions": "octavo.preemptions",
    "migrations": "octavo.migrations",
    "summary": "octavo.summary",
}
"""Of the timeline's object, to what the span calls it."""


class _RequestIds(RandomIdGenerator):
    """The trace of a request has its id, so that whoever has the one finds the other."""

    def __init__(self) -> None:
        self.next_trace_id = 0

    def generate_trace_id(self) -> int:
        return self.next_trace_id or super().generate_trace_id()


def trace_id_of(request_id: str) -> int:
    """The request's own 128 bits where its id is 32 hexadecimal digits, as a front door's single requests have after
    their prefix; a hash of it otherwise."""
    digits = request_id.rpartition("-")[2]
    try:
        number = int(digits, 16) if len(digits) == 32 else 0
    except ValueError:
        number = 0
    return number or xxhash.xxh128_intdigest(request_id.encode()) or 1


class RequestTracer:
    """`on_end` of `Timelines`. Not thread-safe: the owner of the timelines calls it."""

    def __init__(self, processor: Any) -> None:
        """`processor`: a span processor of OpenTelemetry's SDK."""
        self._ids = _RequestIds()
        self._provider = TracerProvider(
            id_generator=self._ids, resource=Resource.create({"service.name": "octavo"})
        )
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("octavo")
        self._parents: dict[str, str] = {}
        """`trace_parent` by request id, of those that run and have one."""

    def on_open(self, request: Request) -> None:
        """`request` runs from now on, or again; `on_end` will be told of it."""
        if request.trace_parent:
            self._parents[request.request_id] = request.trace_parent

    def on_end(self, timeline: Mapping[str, Any]) -> None:
        """`timeline`: what `Timelines.describe` says of a request that has ended."""
        request_id, began = timeline["id"], timeline["created"]
        self._ids.next_trace_id = trace_id_of(request_id)
        root = self._tracer.start_span(
            "request",
            context=_context(self._parents.pop(request_id, "")),
            kind=trace.SpanKind.SERVER,
            start_time=_nanoseconds(began),
            attributes={"gen_ai.request.id": request_id, **_attributes(timeline)},
        )
        if not root.is_recording():
            return
        inside = trace.set_span_in_context(root)
        for phase in timeline["phases"]:
            since = began + phase["at"]
            child = self._tracer.start_span(phase["phase"], context=inside, start_time=_nanoseconds(since))
            child.end(_nanoseconds(since + phase["seconds"]))
        for entry in timeline["events"]:
            root.add_event(
                entry["event"],
                {
                    key: _value(value)
                    for key, value in entry.items()
                    if key not in ("event", "at") and value is not None
                },
                _nanoseconds(began + entry["at"]),
            )
        if timeline["outcome"] in _FAILED:
            root.set_status(trace.Status(trace.StatusCode.ERROR, timeline["summary"]))
        root.end(_nanoseconds(began + timeline["seconds"]["total"]))

    def close(self) -> None:
        """Send what has not been sent."""
        self._provider.shutdown()


def otlp_tracer(endpoint: str) -> RequestTracer:
    """Sends to a collector's OTLP endpoint over HTTP, "http://host:4318/v1/traces", from a thread of its own, in
    batches; a collector that is away costs spans and nothing else. Raises `ConfigError` without the extra."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise ConfigError(
            "traces need OpenTelemetry's exporter: pip install 'octavo[otel]'", param="otlp_endpoint"
        ) from error
    return RequestTracer(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))


def _context(trace_parent: str) -> Context:
    """Of the caller's span; without one of no span, whatever context this thread is in."""
    if not trace_parent:
        return trace.set_span_in_context(trace.INVALID_SPAN)
    _, trace_id, span_id, flags = (int(part, 16) for part in trace_parent.split("-"))
    parent = trace.SpanContext(trace_id, span_id, is_remote=True, trace_flags=trace.TraceFlags(flags))
    return trace.set_span_in_context(trace.NonRecordingSpan(parent))


def _attributes(timeline: Mapping[str, Any]) -> dict[str, Any]:
    told = {name: timeline[key] for key, name in _ATTRIBUTES.items() if timeline[key] is not None}
    outputs = sum(entry["num_output_tokens"] for entry in timeline["events"] if entry["event"] == "finished")
    return {**told, "gen_ai.usage.output_tokens": outputs}


def _value(value: Any) -> Any:
    """Attributes are plain; what is not, the router's scores, goes as JSON."""
    return value if isinstance(value, (str, bool, int, float)) else json.dumps(value)


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
