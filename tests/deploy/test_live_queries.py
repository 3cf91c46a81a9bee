"""A real Prometheus scrapes a system that runs and answers every query of the dashboards and of the alerts.

The system is the whole of it but for Ray and a model: the HTTP app on a socket, the coordinator, and two workers on
their own streams, with so few blocks that requests are parked.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
import yaml

from octavo.cluster.metrics.dashboards import DASHBOARDS
from octavo.cluster.metrics.table import METRICS
from octavo.cluster.openai.app import create_app
from octavo.cluster.openai.config import HttpConfig
from octavo.cluster.tokenizer import Tokenizer
from octavo.protos.types import StepPlan, StepResult

from ..cluster.fake_cluster import Cluster
from ..cluster.support import FakeExecutor, run, until
from . import prometheus

RULES = Path(__file__).parents[2] / "deploy/prometheus/alerts.yaml"
SCRAPES = 6
"""As often the system is scraped while it works; a rate needs two."""
INTERVAL = "250ms"
WINDOW = "10s"
"""Of rates."""


class MeasuredExecutor(FakeExecutor):
    """Says how long the parts of its steps took, as a real one does."""

    def execute(self, plan: StepPlan) -> StepResult:
        result = super().execute(plan)
        return replace(result, parts_seconds={"forward": 0.8 * result.step_seconds})


class LiveCluster(Cluster):
    def make_executor(self, worker_id: str) -> FakeExecutor:
        info = super().make_executor(worker_id).info
        return MeasuredExecutor(info, budget=self.budget, step_seconds=self.step_seconds)


@asynccontextmanager
async def serving(app: Any) -> AsyncIterator[int]:
    """The port at which `app` answers, on this loop."""
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", lifespan="off"))
    task = asyncio.create_task(server.serve())
    await until(lambda: server.started)
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    await task


async def keep_asking(client: httpx.AsyncClient) -> None:
    """Prompts with common beginnings, some of them as streams, some answers in two, until cancelled."""

    async def ask(number: int) -> None:
        body = {
            "prompt": [7 + number % 3] * 40 + [number] * 20,
            "max_tokens": 30,
            "n": 1 + number % 2,
            "stream": number % 3 == 0,
        }
        reply = await client.post("/v1/completions", json=body)
        assert reply.status_code == 200, reply.text

    first = 0
    while True:
        await asyncio.gather(*(ask(number % 900) for number in range(first, first + 12)))
        await client.post("/v1/completions", json={"prompt": "", "temperature": 9})
        first += 12


async def run_batch(client: httpx.AsyncClient) -> None:
    lines = [
        {
            "custom_id": str(number),
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": [5, number], "max_tokens": 4},
        }
        for number in range(200)
    ]
    content = "\n".join(map(json.dumps, lines))
    file = await client.post("/v1/files", files={"file": ("in.jsonl", content)}, data={"purpose": "batch"})
    body = {
        "input_file_id": file.json()["id"],
        "endpoint": "/v1/completions",
        "completion_window": "24h",
    }
    reply = await client.post("/v1/batches", json=body)
    assert reply.status_code == 200, reply.text


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def tokenizer(default_model_dir: Path) -> Any:
    made = Tokenizer(default_model_dir)
    yield made
    made.close()


def has_data(series: list[Any]) -> bool:
    return any(math.isfinite(float(one["value"][1])) for one in series)


def check_panels(server: prometheus.Prometheus) -> None:
    """Every query is answered, with a number but where nothing has happened that it could tell of."""
    without = []
    for dashboard in DASHBOARDS.values():
        for panel in dashboard.panels():
            for query in panel.queries:
                expr = query.expr.replace("$__rate_interval", WINDOW).replace("$worker", ".*")
                if not has_data(server.query(expr)):
                    without.append((dashboard.title, panel.title, query.expr))
    assert [entry[1] for entry in without] == ["Requests that failed"], without


def check_alerts(server: prometheus.Prometheus) -> None:
    """Every rule was evaluated without an error, and what its condition compares is there."""
    groups = server.get("rules")["groups"]
    rules = {rule["name"]: rule for group in groups for rule in group["rules"]}
    written = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    assert set(rules) == {rule.get("alert") or rule["record"] for rule in written}
    for rule in rules.values():
        assert rule["health"] == "ok", rule
    for rule in written:
        server.query(rule["expr"])
        for name in set(re.findall(r"\boctavo_\w+", re.sub(r"job:octavo_\w+:\w+", "", rule["expr"]))):
            assert has_data(server.query(name)), name


def check_table(page: str) -> None:
    """What is in the table is on the page of a system that has done everything but fail."""
    families = set(re.findall(r"^# HELP (\w+) ", page, re.MULTILINE))
    assert {metric.name for metric in METRICS} - families == {"octavo_request_errors_total"}
    assert families <= {metric.name for metric in METRICS}


@pytest.mark.timeout(120)
def test_every_query_is_answered(tmp_path: Path, tokenizer: Tokenizer) -> None:
    prometheus.tool("prometheus")

    async def scenario() -> None:
        info = {"num_blocks": 24, "num_host_blocks": 60, "host_link_bytes_per_second": 1e9}
        options = {"preemption": "swap"}
        async with LiveCluster(
            2, info=info, step_seconds=0.002, budget=64, lease_seconds=20.0, scheduler_options=options
        ) as cluster:
            app = create_app(await cluster.backend(), tokenizer, HttpConfig(jobs_dir=str(tmp_path / "jobs")))
            async with (
                serving(app) as port,
                httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client,
            ):
                await run_batch(client)
                asking = asyncio.create_task(keep_asking(client))
                config = {
                    "global": {"scrape_interval": INTERVAL, "evaluation_interval": INTERVAL},
                    "rule_files": [str(RULES)],
                    "scrape_configs": [
                        {"job_name": "octavo", "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]}
                    ],
                }
                await asyncio.to_thread(watch, config, asking)
                page = (await client.get("/metrics")).text
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
                check_table(page)
            await app.state.jobs.close()

    def watch(config: dict[str, Any], asking: asyncio.Task[None]) -> None:
        with prometheus.running(config, tmp_path, free_port()) as server:
            server.wait_scraped(SCRAPES)
            assert not asking.done(), asking
            check_panels(server)
            check_alerts(server)

    run(scenario(), seconds=110)
