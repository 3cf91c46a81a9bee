"""One span tree a request: what is in it, and that a collector gets it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk", reason="the extra `otel` is not installed")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from octavo.cluster.timeline import Timelines
from octavo.cluster.trace_context import trace_parent_of
from octavo.cluster.tracing import RequestTracer, trace_id_of
from octavo.protos.types import FinishReason
from octavo.scheduler.events import (
    Admitted,
    ChunkPlanned,
    Finished,
    Preempted,
    PreemptionKind,
    Queued,
    Resumed,
    TokensOut,
)

from .fake_cluster import Cluster
from .support import collect, make_request, run

HEX = "0123456789abcdef0123456789abcdef"


class Traced:
    """Timelines whose requests end in memory."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.tracer = RequestTracer(SimpleSpanProcessor(self.exporter))
        self.timelines = Timelines(lambda: 0.0, wall_clock=lambda: 1000.0, on_end=self.tracer.on_end)

    def spans(self) -> tuple[ReadableSpan, list[ReadableSpan]]:
        """(root, children in order of their start)"""
        spans = self.exporter.get_finished_spans()
        (root,) = [span for span in spans if span.parent is None]
        children = [span for span in spans if span is not root]
        assert all(span.parent.span_id == root.context.span_id for span in children if span.parent)
        assert {span.context.trace_id for span in spans} == {root.context.trace_id}
        return root, sorted(children, key=lambda span: span.start_time or 0)


def seconds(span: ReadableSpan) -> tuple[float, float]:
    """(start after the wall clock's 1000 s, length)"""
    assert span.start_time is not None
    assert span.end_time is not None
    return (
        round(span.start_time / 1e9 - 1000, 6),
        round((span.end_time - span.start_time) / 1e9, 6),
    )


def test_a_parked_request_is_one_tree() -> None:
    traced, name = Traced(), f"cmpl-{HEX}"
    traced.timelines.observe(
        [
            Queued(name, 1.0, queue_length=3),
            Admitted(name, 2.0, num_prompt_tokens=90, cached_tokens=16),
            ChunkPlanned(name, 2.0, branch=0, start=16, num_tokens=74, step_id=7),
            TokensOut(name, 2.5, 0, 0, (5,)),
            Preempted(name, 3.0, PreemptionKind.SWAP, 6, 91, 0.4, 0.1),
            Resumed(name, 4.0, cached_tokens=91),
            TokensOut(name, 4.5, 0, 1, (5,)),
            Finished(name, 6.0, 0, FinishReason.STOP, request_finished=True, num_output_tokens=2),
        ]
    )
    root, children = traced.spans()
    assert root.name == "request"
    assert root.context.trace_id == int(HEX, 16)
    assert seconds(root) == (1.0, 5.0)
    assert [(span.name, *seconds(span)) for span in children] == [
        ("queued", 1.0, 1.0),
        ("prefill", 2.0, 0.5),
        ("decode", 2.5, 0.5),
        ("parked", 3.0, 1.0),
        ("prefill", 4.0, 0.5),
        ("decode", 4.5, 1.5),
    ]
    assert root.attributes is not None
    assert root.attributes["gen_ai.usage.input_tokens"] == 90
    assert root.attributes["gen_ai.usage.output_tokens"] == 2
    assert root.attributes["octavo.cached_tokens"] == 16
    assert root.attributes["octavo.preemptions"] == 1
    assert root.attributes["octavo.outcome"] == "stop"
    assert root.status.status_code is StatusCode.UNSET
    events = {event.name: event.attributes for event in root.events}
    assert list(events) == ["queued", "admitted", "prefill_chunks", "preempted", "resumed", "finished"]
    assert events["preempted"] == {
        "kind": "swap",
        "freed_blocks": 6,
        "lost_tokens": 91,
        "recompute_seconds": 0.4,
        "swap_seconds": 0.1,
    }


def test_a_request_that_fails_says_so() -> None:
    traced = Traced()
    traced.timelines.observe([Queued("r", 0.0, queue_length=0)])
    traced.timelines.end("r", "failed")
    root, _ = traced.spans()
    assert root.status.status_code is StatusCode.ERROR


PARENT = f"00-{HEX}-00f067aa0ba902b7-01"


def end_one(traced: Traced, trace_parent: str) -> tuple[ReadableSpan, ...]:
    """All spans of a request that its caller made within the span `trace_parent`."""
    traced.tracer.on_open(replace(make_request("r"), trace_parent=trace_parent))
    traced.timelines.observe([Queued("r", 0.0, queue_length=0)])
    traced.timelines.end("r", "aborted")
    return tuple(traced.exporter.get_finished_spans())


def test_a_request_is_a_child_of_its_callers_span() -> None:
    traced = Traced()
    (child,) = end_one(traced, PARENT)
    assert child.context.trace_id == int(HEX, 16)
    assert child.parent is not None
    assert (child.parent.trace_id, child.parent.span_id) == (int(HEX, 16), 0x00F067AA0BA902B7)
    assert child.parent.is_remote
    assert child.attributes is not None
    assert child.attributes["gen_ai.request.id"] == "r"
    # The next one that uses the id has a caller of its own, or none.
    assert end_one(traced, "")[-1].parent is None


def test_a_caller_that_does_not_sample_is_followed() -> None:
    assert end_one(Traced(), PARENT.removesuffix("01") + "00") == ()


@pytest.mark.parametrize(
    ("values", "parent"),
    [
        ([PARENT], PARENT),
        ([f" {PARENT} "], PARENT),
        ([f"01-{HEX}-00f067aa0ba902b7-03"], f"00-{HEX}-00f067aa0ba902b7-03"),
        ([f"fe-{HEX}-00f067aa0ba902b7-01-whatever comes"], PARENT),
        ([], ""),
        ([PARENT, PARENT], ""),
        ([f"{PARENT}-more"], ""),
        ([f"fe-{HEX}-00f067aa0ba902b7-01more"], ""),
        ([f"ff-{HEX}-00f067aa0ba902b7-01"], ""),
        ([PARENT.upper()], ""),
        ([f"00-{'0' * 32}-00f067aa0ba902b7-01"], ""),
        ([f"00-{HEX}-{'0' * 16}-01"], ""),
        ([PARENT[:-1]], ""),
        ([f"{PARENT}\n"], ""),
        (["nonsense"], ""),
    ],
)
def test_what_is_a_callers_span(values: list[str], parent: str) -> None:
    headers = [(b"host", b"here"), *((b"traceparent", value.encode()) for value in values)]
    assert trace_parent_of(headers) == parent


def test_sampling_is_opentelemetrys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    traced = Traced()
    traced.timelines.observe([Queued("r", 0.0, queue_length=0)])
    traced.timelines.end("r", "aborted")
    assert traced.exporter.get_finished_spans() == ()


@pytest.mark.parametrize(
    ("request_id", "trace_id"),
    [(HEX, int(HEX, 16)), (f"chatcmpl-{HEX}", int(HEX, 16))],
)
def test_a_trace_has_its_requests_id(request_id: str, trace_id: int) -> None:
    assert trace_id_of(request_id) == trace_id


def test_other_ids_have_a_trace_of_their_own() -> None:
    ids = [f"cmpl-{HEX}-1", f"cmpl-{HEX}-2", "mine", "0" * 32, "g" * 32, "cmpl-" + "-" * 32]
    traces = {trace_id_of(one) for one in ids}
    assert len(traces) == len(ids)
    assert all(0 < one < 2**128 for one in traces)


@pytest.fixture
def collector() -> Iterator[tuple[str, list[Any]]]:
    """(endpoint, spans that arrived)"""
    arrived: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                for scope in resource.scope_spans:
                    arrived.extend(scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1/traces", arrived
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_collector_gets_a_tree_of_each_request(collector: tuple[str, list[Any]]) -> None:
    endpoint, arrived = collector

    async def scenario() -> None:
        async with Cluster(otlp_endpoint=endpoint) as cluster:
            backend = await cluster.backend()
            requests = [make_request(f"r{i}", n=1 + i % 2) for i in range(4)]
            requests.append(replace(make_request("child"), trace_parent=PARENT))
            await asyncio.gather(*(collect(backend, request) for request in requests))
            await cluster.idle()

    run(scenario())
    (child,) = [span for span in arrived if span.parent_span_id.hex() == PARENT.split("-")[2]]
    assert child.trace_id.hex() == HEX
    roots = [span for span in arrived if not span.parent_span_id]
    assert len(roots) == 4
    told = {attribute.key: attribute.value for attribute in roots[0].attributes}
    assert told["octavo.worker"].string_value == "worker-0"
    for root in roots:
        names = {span.name for span in arrived if span.parent_span_id == root.span_id}
        assert names <= {"queued", "prefill", "decode"}
        assert "prefill" in names
        assert [event.name for event in root.events][:2] == ["routed", "queued"]
