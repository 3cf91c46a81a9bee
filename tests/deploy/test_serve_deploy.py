"""`serve deploy` of the shipped config, for real: a Ray of its own with a token and a dashboard, and a tiny model."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
START_SECONDS = 120
LOOPBACK = {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


def free_ports(count: int) -> list[int]:
    """Below those that systems hand out to clients, so that no process that starts meanwhile takes one."""
    found: list[int] = []
    port = 20_000 + os.getpid() % 8_000
    while len(found) < count:
        port += 1
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        found.append(port)
    return found


class Cluster:
    """A head node that was started as the files in deploy/ start it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # Ray's sockets lie there, whose paths may not be long.
        self._temp_dir = tempfile.mkdtemp(prefix="octavo-ray-")
        self.token = secrets.token_hex(32)
        (folder / "token").write_text(self.token)
        self.port, self.dashboard_port, gcs_port = free_ports(3)
        self._environment = {
            **os.environ,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(folder / "token"),
            "PYTHONPATH": str(ROOT),
        }
        command = [
            str(BIN / "ray"), "start", "--head", "--block", f"--port={gcs_port}", "--node-ip-address=127.0.0.1",
            "--dashboard-host=127.0.0.1", f"--dashboard-port={self.dashboard_port}", "--num-cpus=2",
            "--disable-usage-stats", f"--temp-dir={self._temp_dir}",
        ]  # fmt: skip
        with (folder / "ray.log").open("w") as log:
            self.process = subprocess.Popen(
                command, env=self._environment, stdout=log, stderr=log, start_new_session=True
            )

    @property
    def dashboard(self) -> str:
        return f"http://127.0.0.1:{self.dashboard_port}"

    def deploy(self, config: Path) -> None:
        """`serve deploy`."""
        done = subprocess.run(
            [str(BIN / "serve"), "deploy", str(config), "--address", self.dashboard],
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=START_SECONDS,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def wait_for(self, url: str, status: int) -> None:
        deadline = time.monotonic() + START_SECONDS
        answer = "no answer"
        while time.monotonic() < deadline:
            try:
                reply = httpx.get(url, timeout=10)
                if reply.status_code == status:
                    return
                answer = reply.text
            except httpx.TransportError as error:
                answer = repr(error)
            assert self.process.poll() is None, (self._folder / "ray.log").read_text()[-2000:]
            time.sleep(0.1)
        raise AssertionError(f"{url}: {answer[:2000]}")

    def actors(self) -> set[str]:
        """Names of the processes of ours that run."""
        found = set()
        for child in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                found |= {
                    name for name in ("ray::Coordinator", "ray::WorkerActor") if name in child.cmdline()[0]
                }
        return found

    def end(self) -> None:
        ours = psutil.Process(self.process.pid).children(recursive=True)
        self.process.send_signal(signal.SIGTERM)
        _, left = psutil.wait_procs(ours, timeout=15)
        for one in left:
            one.kill()
        self.process.wait(10)
        shutil.rmtree(self._temp_dir, ignore_errors=True)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    try:
        yield cluster
    finally:
        cluster.end()


@pytest.mark.cluster
@pytest.mark.timeout(240)
def test_the_config_deploys_on_a_cluster_with_a_token(
    cluster: Cluster, tmp_path: Path, tiny_model_dir: Callable[..., Path], default_model_dir: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model_dir("llama", vocab_size=49152), model)
    for file in default_model_dir.glob("tokenizer*"):
        shutil.copy(file, model)
    config: dict[str, Any] = yaml.safe_load((ROOT / "deploy/serve/octavo.yaml").read_text())
    config["http_options"]["port"] = cluster.port
    config["applications"][0]["args"] |= {"model": str(model), "num_blocks": 64, "jobs_dir": ""}
    (tmp_path / "serve.yaml").write_text(yaml.safe_dump(config))

    cluster.wait_for(f"{cluster.dashboard}/api/version", 401)
    named = {"authorization": f"Bearer {cluster.token}"}
    assert httpx.get(f"{cluster.dashboard}/api/version", headers=named).status_code == 200

    cluster.deploy(tmp_path / "serve.yaml")
    cluster.wait_for(f"http://127.0.0.1:{cluster.port}/ready", 200)
    body = {"prompt": "Hi", "max_tokens": 5, "ignore_eos": True}
    reply = httpx.post(f"http://127.0.0.1:{cluster.port}/v1/completions", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    assert reply.json()["usage"]["completion_tokens"] == 5
    applications = f"{cluster.dashboard}/api/serve/applications/"
    deployments = httpx.get(applications, headers=named).json()["applications"]["octavo"]["deployments"]
    assert {name: one["status"] for name, one in deployments.items()} == {
        "ingress": "HEALTHY",
        "system": "HEALTHY",
    }
    assert cluster.actors() == {"ray::Coordinator", "ray::WorkerActor"}
    listening = {
        connection.laddr.ip
        for connection in psutil.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
        and connection.laddr.port in (cluster.port, cluster.dashboard_port)
    }
    assert listening <= LOOPBACK
    # What the application owned goes with it.
    assert httpx.delete(applications, headers=named, timeout=60).status_code == 200
    deadline = time.monotonic() + 30
    while cluster.actors():
        assert time.monotonic() < deadline, cluster.actors()
        time.sleep(0.1)
