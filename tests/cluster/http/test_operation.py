"""Health, metrics, and many connections at once (cases D22, D25 and D29, as far as HTTP goes)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from octavo.cluster.advice import Advice
from octavo.cluster.backend import HealthReport, HealthStatus
from octavo.cluster.openai.app import create_app
from octavo.cluster.openai.config import HttpConfig
from octavo.cluster.tokenizer import Tokenizer

from .conftest import Api, ScriptedBackend, Server


@pytest.mark.parametrize(
    ("status", "health", "ready"),
    [
        (HealthStatus.LOADING, 503, 503),
        (HealthStatus.READY, 200, 200),
        (HealthStatus.DEGRADED, 200, 200),
        (HealthStatus.DRAINING, 200, 503),
        (HealthStatus.DEAD, 503, 503),
    ],
)
def test_d22_health_and_ready(
    api: Api, backend: ScriptedBackend, status: HealthStatus, health: int, ready: int
) -> None:
    advice = Advice("block_size", "block_size is 8", "set it to 16")
    workers = ({"worker_id": "w0", "status": "ok"},)
    backend.report = HealthReport(status=status, workers=workers, detail="so", advice=(advice,))
    assert api.get("/health").status_code == health
    assert api.get("/ready").status_code == ready
    assert api.send("HEAD", "/health").status_code == health
    assert api.get("/health").json() == {
        "status": status.value,
        "workers": [{"worker_id": "w0", "status": "ok"}],
        "detail": "so",
        "advice": [{"code": "block_size", "reason": "block_size is 8", "remedy": "set it to 16"}],
    }
    assert api.get("/stats").json() == asyncio.run(backend.stats())


def test_d22_a_backend_that_does_not_answer_is_dead(
    make_api: Callable[..., Api], backend: ScriptedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = make_api(health_seconds_max=0.05)

    async def hang() -> Any:
        await asyncio.Event().wait()

    async def fail() -> Any:
        raise ConnectionError("gone")

    for broken in (hang, fail):
        monkeypatch.setattr(backend, "health", broken)
        monkeypatch.setattr(backend, "stats", broken)
        assert api.get("/health").status_code == 503
        assert api.get("/health").json()["status"] == "dead"
        metrics = api.get("/metrics")
        assert metrics.status_code == 200
        assert samples(metrics.text)["octavo_backend_up", ()] == 0


Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def samples(text: str) -> Samples:
    """A strict parse: (name, sorted labels) to value."""
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        assert ":" not in family.name
        assert family.name.startswith("octavo_")
        assert family.documentation
        for sample in family.samples:
            if family.type == "counter":
                assert sample.name.endswith("_total")
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found
            found[key] = sample.value
    return found


def test_d29_metrics(api: Api, backend: ScriptedBackend) -> None:
    worker = {
        "running": 1,
        "waiting": 9,
        "swapped": 2,
        "blocks_total": 50,
        "blocks_used": 20,
        "blocks_cached": 25,
        "host_blocks_total": 100,
        "host_blocks_used": 7,
        "host_blocks_cached": 0,
        "sampled_tokens": 40,
        "preemptions": {"recompute": 3, "swap": 5},
        "finished": {"stop": 2},
        "peak_waste": 0.03,
        "queue_time": {"counts": [0] * 16 + [2, 1], "sum": 600.0},
        "something new": "text",
    }
    backend.counts = {"unfinished": 3, "workers": {"w0": worker, "w1": {"running": 4}}, "more": ["text"]}
    before = samples(api.get("/metrics").text)
    w0 = ("worker", "w0")
    assert before["octavo_backend_up", ()] == 1
    assert before["octavo_requests_unfinished", ()] == 3
    assert before["octavo_requests_running", (w0,)] == 1
    assert before["octavo_requests_running", (("worker", "w1"),)] == 4
    assert before["octavo_requests_waiting", (w0,)] == 9
    assert before["octavo_requests_swapped", (w0,)] == 2
    assert before["octavo_generation_tokens_total", (w0,)] == 40
    assert before["octavo_preemptions_total", (("kind", "recompute"), w0)] == 3
    assert before["octavo_preemptions_total", (("kind", "swap"), w0)] == 5
    assert before["octavo_kv_blocks", (("state", "free"), ("tier", "device"), w0)] == 5
    assert before["octavo_kv_blocks", (("state", "used"), ("tier", "host"), w0)] == 7
    assert before["octavo_kv_usage_ratio", (("tier", "device"), w0)] == 0.4
    assert before["octavo_requests_finished_total", (("reason", "stop"), w0)] == 2
    assert before["octavo_kv_waste_at_peak_ratio", (w0,)] == 0.03
    assert before["octavo_queue_time_seconds_bucket", (("le", "120.0"), w0)] == 0
    assert before["octavo_queue_time_seconds_bucket", (("le", "300.0"), w0)] == 2
    assert before["octavo_queue_time_seconds_bucket", (("le", "+Inf"), w0)] == 3
    assert before["octavo_queue_time_seconds_count", (w0,)] == 3
    assert before["octavo_queue_time_seconds_sum", (w0,)] == 600
    tokens = 0
    for fields in ({}, {"n": 3}, {"stream": True}, {"max_tokens": 2}):
        reply = api.complete(**fields)
        tokens += 4 if "stream" in fields else reply.json()["usage"]["completion_tokens"]
    api.complete(temperature=9)
    api.get("/some/unknown/path")
    after = samples(api.get("/metrics").text)
    assert after["octavo_http_output_tokens_total", ()] == tokens
    assert after["octavo_http_choices_finished_total", (("reason", "stop"),)] == 5
    assert after["octavo_http_choices_finished_total", (("reason", "length"),)] == 1
    route = ("method", "POST"), ("route", "/v1/completions")
    assert after["octavo_http_requests_total", (*route, ("status", "200"))] == 4
    assert after["octavo_http_requests_total", (*route, ("status", "400"))] == 1
    assert any("unknown" in str(labels) for _, labels in after)
    assert not any("/some" in str(labels) for _, labels in after)
    assert after["octavo_http_time_to_first_token_seconds_count", ()] == 4
    assert all(after[key] >= value for key, value in before.items() if key[0].endswith("_total"))


def test_d29_replicas_label_their_samples(make_api: Callable[..., Api]) -> None:
    api = make_api(replica="r1")
    api.complete()
    found = samples(api.get("/metrics").text)
    assert found["octavo_http_output_tokens_total", (("replica", "r1"),)] == 4


def test_the_app_describes_itself(api: Api) -> None:
    paths = api.get("/openapi.json").json()["paths"]
    assert {"/v1/chat/completions", "/v1/completions", "/health", "/metrics"} <= set(paths)


@pytest.fixture
def server(backend: ScriptedBackend, tokenizer: Tokenizer) -> Iterator[Server]:
    with Server(create_app(backend, tokenizer, HttpConfig())) as running:
        yield running


def test_d25_twelve_hundred_chats_at_once(server: Server, backend: ScriptedBackend) -> None:
    """All are answered, the health check among them: none is refused, cut or left waiting for the others."""

    async def call(method: str, path: str, body: dict[str, Any] | None = None) -> str:
        # Bare sockets: an HTTP client would need longer for 1,200 connections than the server does.
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        content = json.dumps(body).encode() if body else b""
        head = f"{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(content)}\r\n\r\n"
        writer.write(head.encode() + content)
        answer = await reader.read()
        writer.close()
        return answer.decode()

    async def scenario() -> tuple[list[str], list[str], int]:
        release = asyncio.Event()

        async def wait(request: Any, step: int) -> None:
            while step == 0 and not release.is_set():
                await asyncio.sleep(0.2)

        backend.before_step = wait
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
        chats = [
            asyncio.ensure_future(call("POST", "/v1/chat/completions", {**body, "stream": i % 2 == 0}))
            for i in range(1200)
        ]
        health = []
        while len(backend.submitted) < 1200:
            health.append(await call("GET", "/health"))
            await asyncio.sleep(0.05)
        most = backend.num_running
        health.append(await call("GET", "/health"))
        release.set()
        return list(await asyncio.gather(*chats)), health, most

    replies, health, most = asyncio.run(scenario())
    assert all(reply.startswith("HTTP/1.1 200 ") and "Hello" in reply for reply in replies)
    assert all(report.startswith("HTTP/1.1 200 ") for report in health)
    assert most == 1200
    assert backend.aborted == []


def test_tenants_are_told_apart_by_their_keys_place(
    make_api: Callable[..., Api], backend: ScriptedBackend
) -> None:
    api = make_api(api_keys=("one", "two"))
    for key in ("two", "one", "two"):
        response = api.send_complete({"authorization": f"Bearer {key}"})
        assert response.status_code == 200, response.text
    assert [request.tenant for request in backend.submitted] == ["key-1", "key-0", "key-1"]


def test_a_calls_trace_header_goes_with_all_its_requests(api: Api, backend: ScriptedBackend) -> None:
    parent = "00-0123456789abcdef0123456789abcdef-00f067aa0ba902b7-01"
    body = {"prompt": ["a", "b"], "max_tokens": 1}
    for header, told in ((parent, parent), ("nonsense", "")):
        backend.submitted.clear()
        assert api.post("/v1/completions", body, headers={"traceparent": header}).status_code == 200
        assert [request.trace_parent for request in backend.submitted] == [told, told]


def test_the_tokenizer_is_described_for_harnesses(api: Api, tokenizer: Tokenizer) -> None:
    told = api.get("/tokenizer_info").json()
    assert (told["bos_token"], told["eos_token"]) == ("<|im_start|>", "<|im_end|>")
    assert "add_generation_prompt" in told["chat_template"]
    assert told["vocab_size"] == 49152
