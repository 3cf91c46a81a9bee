"""What an operator runs: `octavo status`, `octavo doctor`, `octavo bench`."""

from __future__ import annotations

import socket
import subprocess
import sys

import orjson
import pytest
from typer.testing import CliRunner

from octavo.cluster import doctor
from octavo.cluster.advice import Advice
from octavo.cluster.backend import HealthReport, HealthStatus
from octavo.cluster.cli.app import app
from octavo.cluster.load import Load, Sample, make_prompts, read_prompts, summarise
from octavo.cluster.openai.app import create_app
from octavo.cluster.openai.config import HttpConfig
from octavo.cluster.service_config import ServiceConfig
from octavo.cluster.tokenizer import Tokenizer
from octavo.protos import errors

from ..http.conftest import MODEL, ScriptedBackend, Server


@pytest.fixture(scope="module")
def system(default_model_dir):
    """The HTTP app over a scripted backend, on a port."""
    tokenizer = Tokenizer(default_model_dir)
    backend = ScriptedBackend(tokenizer)
    with Server(create_app(backend, tokenizer, HttpConfig())) as server:
        server.backend = backend
        yield server
    tokenizer.close()


@pytest.fixture
def octavo(system):
    def run(*arguments: str):
        return CliRunner().invoke(app, [*arguments], env={"OCTAVO_URL": system.url, "COLUMNS": "200"})

    return run


def test_status_at_a_glance(octavo, system, monkeypatch):
    workers = (
        {"worker_id": "worker-0", "status": "ready", "steps": 12},
        {"worker_id": "worker-1", "status": "dead"},
    )
    advice = Advice("preemptions", "requests were preempted 7 times in the last minute", "add workers")
    report = HealthReport(status=HealthStatus.DEGRADED, workers=workers, detail="1 of 2", advice=(advice,))
    counts = {
        **dict.fromkeys(("running", "waiting", "swapped", "without_worker"), 2),
        "finished": {"stop": 3, "length": 4},
        "preemptions": {"swap": 5, "recompute": 2},
        "preemptions_last_minute": 7,
        "cache_query_tokens": 200,
        "cache_hit_tokens": 50,
        "workers": {
            "worker-0": {
                "device": "cpu",
                "running": 2,
                "blocks_total": 100,
                "blocks_used": 25,
                "blocks_cached": 10,
            }
        },
    }
    monkeypatch.setattr(system.backend, "report", report)
    monkeypatch.setattr(system.backend, "counts", counts)
    done = octavo("status")
    assert done.exit_code == 0, done.output
    for text in (
        f"{MODEL} at {system.url} is degraded: 1 of 2",
        "2 running, 4 waiting, 2 swapped; 7 finished; 7 preemptions, 7 in the last minute; 25% of prompt tokens",
        "25% of 100",
        "advice requests were preempted 7 times in the last minute: add workers",
    ):
        assert text in done.stdout
    told = orjson.loads(octavo("status", "--json").stdout)
    assert (told["models"], told["stats"], told["health"]["advice"][0]["code"]) == (
        [MODEL],
        counts,
        "preemptions",
    )


def test_status_of_a_server_that_is_not_well_or_not_there(octavo, system, monkeypatch, dead_url):
    report = HealthReport(status=HealthStatus.DEAD, detail="no worker")
    monkeypatch.setattr(system.backend, "report", report)

    async def fail():
        raise errors.UnavailableError("gone")

    monkeypatch.setattr(system.backend, "stats", fail)
    done = octavo("status")
    assert done.exit_code == 3
    assert "dead: no worker" in done.stdout
    assert octavo("status", "--url", dead_url).exit_code == 3


def test_bench_measures_an_endpoint(octavo, tmp_path):
    done = octavo("bench", "-n", "6", "--concurrency", "3", "--max-tokens", "5", "--warmup", "1", "--json")
    assert done.exit_code == 0, done.output
    told = orjson.loads(done.stdout)
    assert (told["requests"], told["failed"], told["output_tokens"]) == (6, 0, 30)
    assert told["cached_tokens"] == 18
    for name in ("ttft", "itl", "latency"):
        assert 0 < told[name]["p50"] <= told[name]["p99"] <= told[name]["max"]
    file = tmp_path / "prompts.jsonl"
    file.write_text('plain text\n{"question": "What?"}\n')
    done = octavo("bench", "-n", "3", "--rate", "200", "--prompts", str(file), "--max-tokens", "2")
    assert "3 requests, 0 failed" in done.stdout
    assert "time to first token" in done.stdout
    done = octavo("bench", "-n", "2", "--model", "none", "--warmup", "0")
    assert done.exit_code == 1
    assert "2 x the model 'none' does not exist" in done.stdout
    assert octavo("bench", "--concurrency", "0").exit_code == 2


def test_bench_workloads_and_figures(tmp_path):
    load = Load(num_requests=5, prompt_words=20, shared_words=8)
    texts = make_prompts(load)
    assert texts == make_prompts(load)
    assert len({text.split(":")[0] for text in texts}) == 5
    assert len({tuple(text.split()[:8]) for text in texts}) == 1
    file = tmp_path / "p"
    lines = ['{"prompt": "a"}', '{"body": {"messages": [{"role": "user", "content": "b"}]}}', "[1]", "c {"]
    file.write_text("\n".join(lines))
    assert read_prompts(file) == ["a", "b", "[1]", "c {"]
    samples = [Sample([0.1 * n, 0.1 * n + 0.4], n, 10, 5) for n in range(1, 11)] + [Sample(error="no")]
    figures = summarise(samples, 2.0)
    assert (figures.requests, figures.failed, figures.errors) == (11, 1, {"no": 1})
    assert (figures.output_tokens_per_second, figures.prompt_tokens_per_second) == (25.0, 50.0)
    assert figures.ttft["p50"] == pytest.approx(0.5)
    assert figures.ttft["p90"] == pytest.approx(0.9)
    assert figures.ttft["p99"] == figures.ttft["max"] == pytest.approx(1.0)
    assert figures.itl["mean"] == pytest.approx(0.1)


def findings(**options) -> dict[str, list[doctor.Finding]]:
    found: dict[str, list[doctor.Finding]] = {}
    for one in doctor.examine(ServiceConfig(**options)):
        found.setdefault(one.name, []).append(one)
    return found


def test_doctor_finds_this_machine_fit(octavo, default_model_dir):
    found = findings(model=str(default_model_dir), port=0, device="cpu")
    assert not [one for group in found.values() for one in group if one.failed]
    assert set(found) >= {"versions", "devices", "memory", "model", "port", "ray", "jobs", "options"}
    assert "8192 tokens" in found["model"][0].text
    told = orjson.loads(octavo("doctor", str(default_model_dir), "--json").stdout)
    assert {check["name"] for check in told["checks"]} >= {"versions", "devices", "port"}


def test_doctor_says_what_is_wrong_and_what_to_do(octavo, tmp_path, monkeypatch):
    empty = tmp_path / "empty"
    empty.mkdir()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        wrong = {
            "devices": {"device": "cuda"},
            "model": {"model": str(tmp_path / "nowhere")},
            "port": {"port": port},
            "ray": {"ray_address": "127.0.0.1:1"},
        }
        for name, options in wrong.items():
            (bad, *_) = [one for one in findings(**options)[name] if one.failed]
            assert bad.remedy
            assert str(next(iter(options.values()))) in bad.text
        done = octavo("doctor", str(empty))
        assert done.exit_code == 2
        assert "config.json" in done.stdout
        monkeypatch.setenv("OCTAVO_PORT", str(port))
        assert octavo("doctor").exit_code == 2
    found = findings(host="0.0.0.0", block_size=8, port=0, num_workers=10_000)
    assert [one.status for one in found["options"]] == ["warn"]
    assert found["devices"][-1].status == "warn"
    monkeypatch.setattr(doctor, "_port", lambda config: 1 / 0)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    found = findings()
    assert "could not be checked" not in found["ray"][0].text
    assert "10.0.0.1:6379" in found["ray"][0].text


def test_every_command_has_help_json_and_starts_light():
    """What the shell waits for at every Tab: no heavy library before a command runs."""
    code = (
        "import sys; from octavo.cluster.cli.app import app; import typer.main; group = typer.main.get_command(app);"
        "heavy = {'torch', 'ray', 'transformers', 'grpc', 'fastapi', 'httpx', 'numba'} & set(sys.modules);"
        "print(sorted(heavy)); print(sorted(group.commands))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy, commands = done.stdout.splitlines()
    assert heavy == "[]"
    for name in (
        "serve",
        "chat",
        "generate",
        "batch",
        "bench",
        "doctor",
        "scale",
        "status",
        "simulate",
        "plan",
        "lab",
    ):
        assert f"'{name}'" in commands
        if name != "batch":
            assert "--json" in CliRunner().invoke(app, [name, "--help"]).stdout
    for name in ("run", "submit", "status", "cancel", "results"):
        assert "--json" in CliRunner().invoke(app, ["batch", name, "--help"]).stdout
    script = CliRunner().invoke(app, ["--show-completion", "bash"], prog_name="octavo")
    assert "octavo" in script.stdout
