"""A real Prometheus for tests: the one that is installed, or Debian's package unpacked into the cache folder."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from octavo.worker.model_cache import cache_root

FETCH_SECONDS = 120
START_SECONDS = 20


def tool(name: str) -> Path:
    """`prometheus` or `promtool`. Skips the test, with the reason, where neither way leads to it."""
    installed = shutil.which(name)
    if installed is not None:
        return Path(installed)
    folder = cache_root() / "tools" / "prometheus"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(str(folder) + ".lock"):
        if not folder.exists():
            _fetch(folder)
    return folder / "usr/bin" / name


def _fetch(folder: Path) -> None:
    """Debian's package needs no installing: its programs are linked with nothing but the C library."""
    if not (shutil.which("apt-get") and shutil.which("dpkg")):
        pytest.skip("prometheus is not installed and there is no apt-get to fetch it with")
    scratch = folder.with_name("prometheus.part")
    shutil.rmtree(scratch, ignore_errors=True)
    (scratch / "lists/partial").mkdir(parents=True)
    (scratch / "cache/archives/partial").mkdir(parents=True)
    # Own lists: the machine's may be missing, and only root may bring them up to date.
    options = [
        "-o", f"Dir::State::Lists={scratch}/lists",
        "-o", f"Dir::Cache={scratch}/cache",
        "-o", "APT::Sandbox::User=",
        "-o", "Debug::NoLocking=1",
    ]  # fmt: skip
    try:
        for command in (["update"], ["download", "prometheus"]):
            _run(["apt-get", "-q", *options, *command], scratch)
        (package,) = scratch.glob("prometheus_*.deb")
        _run(["dpkg", "-x", package.name, "unpacked"], scratch)
    except (subprocess.SubprocessError, ValueError) as error:
        said = getattr(error, "stderr", None) or str(error)
        pytest.skip(f"prometheus is not installed and Debian's package could not be fetched: {said[-300:]}")
    (scratch / "unpacked").rename(folder)
    shutil.rmtree(scratch)


def _run(command: list[str], folder: Path) -> None:
    subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True, timeout=FETCH_SECONDS)


class Prometheus:
    """One that runs."""

    def __init__(self, url: str) -> None:
        self._url = url

    def get(self, path: str, **parameters: str) -> Any:
        """Data of an answer of its HTTP API; an error is a failed assertion that says why."""
        url = f"{self._url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=10) as reply:
                body = json.load(reply)
        except urllib.error.HTTPError as error:
            body = json.load(error)
        assert body["status"] == "success", f"{parameters}: {body}"
        return body["data"]

    def query(self, expr: str) -> list[Any]:
        """The series of an instant query."""
        found: list[Any] = self.get("query", query=expr)["result"]
        return found

    def wait_scraped(self, times: int, seconds: float = 30.0) -> None:
        """Until every target was read so often and every rule evaluated."""
        deadline = time.monotonic() + seconds
        while True:
            counts = [float(one["value"][1]) for one in self.query("sum_over_time(up[1h])")]
            rules = [rule for group in self.get("rules")["groups"] for rule in group["rules"]]
            if counts and min(counts) >= times and all(rule["health"] != "unknown" for rule in rules):
                return
            assert time.monotonic() < deadline, (counts, rules)
            time.sleep(0.1)


@contextmanager
def running(config: dict[str, Any], folder: Path, port: int) -> Iterator[Prometheus]:
    """A Prometheus with `config` on a loopback port, its data in `folder`."""
    path = folder / "prometheus.yaml"
    path.write_text(json.dumps(config))  # JSON is YAML
    command = [
        str(tool("prometheus")),
        f"--config.file={path}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        _wait_ready(port, process, folder)
        yield Prometheus(f"http://127.0.0.1:{port}")
    finally:
        process.terminate()
        process.wait(10)


def _wait_ready(port: int, process: subprocess.Popen[bytes], folder: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/-/ready", timeout=1) as reply:
                if reply.status == 200:
                    return
        except OSError:
            pass
        log = (folder / "prometheus.log").read_text()[-2000:]
        assert process.poll() is None, log
        assert time.monotonic() < deadline, log
        time.sleep(0.05)
