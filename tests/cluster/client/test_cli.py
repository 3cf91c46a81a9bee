"""The `octavo` command: options, output, exit codes. Servers are small fakes; the real ones have their own tests."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import ClassVar

import orjson
import pytest
from typer.testing import CliRunner

from octavo.cluster import service as service_module
from octavo.cluster.cli.app import app
from octavo.protos import errors


@pytest.fixture
def octavo():
    def run(*arguments: str, stdin: str = ""):
        return CliRunner().invoke(app, list(arguments), input=stdin)

    return run


class FakeService:
    """Stands where the whole system would."""

    made: ClassVar[list[FakeService]] = []
    start_error: Exception | None = None
    start_seconds = 0.0
    lives = 10**9

    def __init__(self, config) -> None:
        self.config = config
        self.calls: list[str] = []
        self.url = "http://127.0.0.1:1234"
        self.model_name = "fake"
        FakeService.made.append(self)

    def start(self, on_progress) -> None:
        self.calls.append("start")
        on_progress("loading")
        time.sleep(self.start_seconds)
        if self.start_error:
            raise self.start_error

    def alive(self) -> bool:
        FakeService.lives -= 1
        return FakeService.lives > 0

    def stop(self, grace_seconds: float) -> None:
        self.calls.append(f"stop {grace_seconds:g}")


@pytest.fixture
def fake_service(monkeypatch):
    monkeypatch.setattr(service_module, "Service", FakeService)
    monkeypatch.setattr("octavo.cluster.cli.serve.HEALTH_INTERVAL_SECONDS", 0.01)
    monkeypatch.setattr(FakeService, "made", [])
    monkeypatch.setattr(FakeService, "start_error", None)
    monkeypatch.setattr(FakeService, "start_seconds", 0.0)
    monkeypatch.setattr(FakeService, "lives", 10**9)
    return FakeService


def signal_when_started(fake, number: int, times: int = 1) -> None:
    """Send this process a signal once the service runs."""

    def go() -> None:
        deadline = time.monotonic() + 10
        while not (fake.made and fake.made[0].calls) and time.monotonic() < deadline:
            time.sleep(0.01)
        for _ in range(times):
            time.sleep(0.1)
            os.kill(os.getpid(), number)

    threading.Thread(target=go, daemon=True).start()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_serve_runs_until_a_signal_and_drains(octavo, fake_service, number):
    signal_when_started(fake_service, number)
    done = octavo("serve", "--port", "0", "--grace-seconds", "3", "--json")
    assert done.exit_code == 0, done.output
    lines = [orjson.loads(line) for line in done.stdout.splitlines()]
    assert lines == [
        {"event": "ready", "url": "http://127.0.0.1:1234", "model": "fake"},
        {"event": "stopped", "failed": False},
    ]
    assert fake_service.made[0].calls == ["start", "stop 3"]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_starting_ends_it_at_once_and_cleans_up(octavo, fake_service, number):
    fake_service.start_seconds = 60
    signal_when_started(fake_service, number)
    done = octavo("serve")
    assert done.exit_code == 130
    assert "Traceback" not in done.output
    assert fake_service.made[0].calls == ["start", "stop 0"]


def test_serve_hands_every_option_over(octavo, fake_service):
    signal_when_started(fake_service, signal.SIGTERM)
    done = octavo(
        *("serve", "folder", "--workers", "2", "--device", "cpu", "--dtype", "float32", "--host", "0.0.0.0"),
        *(
            "--port",
            "81",
            "--ray-address",
            "auto",
            "--served-model-name",
            "m",
            "--api-key",
            "k",
            "--api-key",
            "l",
        ),
        *(
            "--block-size",
            "32",
            "--num-blocks",
            "99",
            "--max-num-batched-tokens",
            "64",
            "--max-num-seqs",
            "8",
        ),
        *("--host-blocks", "40", "--preemption", "swap", "--victims", "youngest"),
        *("--max-model-len", "500", "--gpu-memory-utilization", "0.5"),
    )
    assert done.exit_code == 0, done.output
    config = fake_service.made[0].config
    assert (config.model, config.num_workers, config.device, config.dtype) == ("folder", 2, "cpu", "float32")
    assert (config.host, config.port, config.ray_address) == ("0.0.0.0", 81, "auto")
    assert (config.served_model_name, config.api_keys) == ("m", ("k", "l"))
    assert (config.block_size, config.num_blocks, config.max_num_batched_tokens) == (32, 99, 64)
    assert (config.host_blocks, config.preemption, config.victims) == (40, "swap", "youngest")
    assert (config.max_num_seqs, config.max_model_len, config.gpu_memory_utilization) == (8, 500, 0.5)


def test_serve_reads_file_and_environment(octavo, fake_service, tmp_path, monkeypatch):
    file = tmp_path / "octavo.yaml"
    file.write_text("num_workers: 3\nport: 81\nprefix_cache: false\ngrace_seconds: 2\n")
    monkeypatch.setenv("OCTAVO_PORT", "82")
    monkeypatch.setenv("OCTAVO_BLOCKSIZE", "32")
    signal_when_started(fake_service, signal.SIGTERM)
    done = octavo("serve", "--config", str(file), "--prefix-cache")
    assert done.exit_code == 0, done.output
    assert "did you mean OCTAVO_BLOCK_SIZE?" in done.stderr
    config = fake_service.made[0].config
    assert (config.num_workers, config.port, config.prefix_cache) == (3, 82, True)
    assert fake_service.made[0].calls == ["start", "stop 2"]
    file.write_text("num_workers: none\n")
    done = octavo("serve", "--config", str(file), "--json")
    assert done.exit_code == 2
    assert f"num_workers must be an integer, got 'none' (from num_workers in {file})" in done.stderr
    assert orjson.loads(done.stdout)["error"]["param"] == "num_workers"


def test_serve_listens_on_loopback_unless_told(octavo, fake_service):
    signal_when_started(fake_service, signal.SIGTERM)
    octavo("serve")
    assert fake_service.made[0].config.host == "127.0.0.1"


def test_d22_serve_ends_with_an_error_when_the_system_is_beyond_repair(octavo, fake_service):
    fake_service.lives = 3
    done = octavo("serve")
    assert done.exit_code == 1
    assert "stopped working" in done.stderr
    assert fake_service.made[0].calls == ["start", "stop 0"]


def test_d27_a_start_that_fails_is_one_line_and_cleans_up(octavo, fake_service):
    fake_service.start_error = errors.ModelLoadError("/models/x: config.json is missing")
    done = octavo("serve", "/models/x")
    assert done.exit_code == 2
    assert "octavo: /models/x: config.json is missing" in done.stderr.splitlines()
    assert "Traceback" not in done.output
    assert fake_service.made[0].calls == ["start", "stop 0"]


def test_a_wrong_option_of_serve_is_refused_before_anything_starts(octavo):
    done = octavo("serve", "--block-size", "0", "--json")
    assert done.exit_code == 2
    assert orjson.loads(done.stdout)["error"]["param"] == "block_size"
    assert octavo("serve", "--workers", "0").exit_code == 2
    assert octavo("serve", "--port", "70000").exit_code == 2


def test_generate_on_a_server(octavo, server):
    done = octavo("generate", "hello", "--url", server.url)
    assert done.exit_code == 0, done.output
    assert done.stdout == "echo:hello\n"
    done = octavo("generate", "a", "b", "--url", server.url, "--json", "--max-tokens", "5", "--stop", "x")
    outputs = orjson.loads(done.stdout)["outputs"]
    assert [out["outputs"][0]["text"] for out in outputs] == ["echo:a", "echo:b"]
    assert outputs[0]["metrics"]["cached_tokens"] == 1
    assert server.bodies[-1]["max_tokens"] == 5
    assert server.bodies[-1]["stop"] == ["x"]


def test_generate_reads_standard_input_or_a_file(octavo, server, tmp_path):
    assert octavo("generate", "--url", server.url, stdin="from a pipe").stdout == "echo:from a pipe\n"
    file = tmp_path / "prompts.txt"
    file.write_text("one\n\ntwo\n")
    assert "echo:one" in octavo("generate", "-f", str(file), "--url", server.url).stdout
    assert octavo("generate", "x", "-f", str(file), "--url", server.url).exit_code == 2
    assert octavo("generate", "-f", str(tmp_path / "no"), "--url", server.url).exit_code == 2


def test_generate_tells_errors_by_exit_code(octavo, server, dead_url, no_waiting):
    assert octavo("generate", "x", "--temperature", "9").exit_code == 2
    assert octavo("generate", "x", "--url", dead_url).exit_code == 3
    server.fail(500)
    done = octavo("generate", "x", "--url", server.url, "--json")
    assert done.exit_code == 1
    assert orjson.loads(done.stdout)["error"]["message"] == "no"


def chunks(*texts: str) -> list[bytes]:
    events = [{"choices": [{"index": 0, "delta": {"content": text}}]} for text in texts]
    return [b"data: " + orjson.dumps(event) + b"\n\n" for event in events] + [b"data: [DONE]\n\n"]


def test_chat_streams_and_remembers(octavo, server):
    server.stream_events = chunks("Hel", "lo")
    done = octavo(
        "chat", "--url", server.url, "--system", "Be kind.", stdin="hi\n\nagain\n/reset\nnew\n/exit\nnever\n"
    )
    assert done.exit_code == 0, done.output
    assert done.stdout == "Hello\n" * 3
    said = [[message["content"] for message in body["messages"]] for body in server.bodies]
    assert said == [["Be kind.", "hi"], ["Be kind.", "hi", "Hello", "again"], ["Be kind.", "new"]]


def test_chat_as_json_lines(octavo, server):
    server.stream_events = chunks("ok")
    done = octavo("chat", "--url", server.url, "--json", stdin="hi\n")
    assert orjson.loads(done.stdout) == {"role": "assistant", "content": "ok"}


def test_a_refused_turn_does_not_end_the_chat(octavo, server):
    server.stream_events = chunks("ok")
    server.fail(400, "context_length_exceeded", "too long")
    done = octavo("chat", "--url", server.url, stdin="long\nshort\n")
    assert done.exit_code == 0
    assert "octavo: too long" in done.stderr
    assert [message["content"] for message in server.bodies[-1]["messages"]] == ["short"]


def test_version_and_help(octavo):
    assert octavo("--version").stdout.startswith("octavo ")
    assert orjson.loads(octavo("version", "--json").stdout)["octavo"]
    for command in ("serve", "generate", "chat", "version"):
        done = octavo(command, "--help")
        assert done.exit_code == 0
        assert "--json" in done.stdout
