"""A partition: Octavo over three machines with addresses of their own, of which one is cut off while streams run.

    python -m tests.chaos.partition

The machines are network namespaces of this one (`deploy/netns/network.sh`; needs root), each with a Ray node and a
worker that runs the real executor and sampler over a pool that holds tokens in place of KV. 40 greedy and 20 sampled
streams run while one machine is cut off for a while that is longer than the workers' lease and shorter than Ray's
patience, and then until Ray gives the node up. Each time all streams must say what the undisturbed ones said. Prints
the longest pause that any client saw, and ends with 1 at the first stream that is not what it would have been.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from octavo.cluster.service import Service
from octavo.protos.auth import new_token

from ..cluster.ray_nodes import HttpStreams, wait_for
from . import on_ray

ROOT = Path(__file__).resolve().parents[2]
NETWORK = ROOT / "deploy" / "netns" / "network.sh"
NUM_MACHINES = 3
ADDRESSES = [f"10.77.0.{number + 1}" for number in range(NUM_MACHINES)]
RAY_PORT, HTTP_PORT = 6390, 8000
URL = f"http://{ADDRESSES[0]}:{HTTP_PORT}"
CLIENT = httpx.Client(base_url=URL, timeout=5, trust_env=False)
SHORT_SECONDS = 9.0
"""Above the lease of a CPU worker, 5 s, and below what Ray waits for a silent node."""
RAY_IS_UP, RAY_SECONDS = "Ray runtime started", 90.0
START_SECONDS, HEAL_SECONDS = 240.0, 180.0


def network(*words: str) -> None:
    subprocess.run([str(NETWORK), *words], check=True)


class Machines:
    """Use as a context manager: nothing is left of them."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="oct-ns-"))
        self._token = new_token()
        """Of Ray, on all machines."""
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Machines:
        network("up", str(NUM_MACHINES))
        return self

    def __exit__(self, *_: object) -> None:
        network("down")
        for process in self._processes:
            process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def start(self, machine: int, *command: str) -> subprocess.Popen[bytes]:
        env = {
            **os.environ,
            "RAY_TMPDIR": str(self._folder / str(machine)),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": self._token,
        }
        Path(env["RAY_TMPDIR"]).mkdir(exist_ok=True)
        with open(self._folder / f"{machine}.log", "ab") as log:
            process = subprocess.Popen(
                [str(NETWORK), "exec", str(machine), *command], stdout=log, stderr=log, cwd=ROOT, env=env
            )
        self._processes.append(process)
        return process

    def start_ray(self, machine: int) -> subprocess.Popen[bytes]:
        """Returns once the node is up."""
        where = (
            ["--head", "--port", str(RAY_PORT), "--include-dashboard=false"]
            if machine == 0
            else ["--address", f"{ADDRESSES[0]}:{RAY_PORT}"]
        )
        ray = Path(sys.executable).parent / "ray"
        common = ["--num-cpus", "1", "--object-store-memory", "100000000", "--disable-usage-stats", "--block"]
        before = self.log(machine).count(RAY_IS_UP)
        node = self.start(
            machine, str(ray), "start", *where, "--node-ip-address", ADDRESSES[machine], *common
        )
        wait_for(lambda: self.log(machine).count(RAY_IS_UP) > before, RAY_SECONDS)
        return node

    def serve(self) -> None:
        """The system itself, from machine 0."""
        self.start(0, sys.executable, "-m", "tests.chaos.partition", "--serve")

    def log(self, machine: int) -> str:
        path = self._folder / f"{machine}.log"
        return path.read_text() if path.exists() else ""


def health() -> dict[str, Any]:
    try:
        return CLIENT.get("/health").json()
    except httpx.TransportError:
        return {"status": "no answer", "workers": []}


def wait_ready(seconds: float) -> float:
    """How long it took."""
    began = time.monotonic()
    wait_for(lambda: health()["status"] == "ready", seconds)
    return time.monotonic() - began


def serve() -> None:
    """Runs on machine 0 until it is killed."""
    on_ray.know_the_tests()
    config = on_ray.service_config(f"{ADDRESSES[0]}:{RAY_PORT}", host=ADDRESSES[0], port=HTTP_PORT)
    service = Service(config, build=on_ray.build_pool).start(lambda line: print(line, flush=True))
    while service.alive():
        time.sleep(1.0)


def run_cut(want: list[dict[int, str]], seconds: float) -> HttpStreams:
    """Streams with machine 2 cut off in the middle, joined again after `seconds` or when all have ended."""
    streams = HttpStreams(URL, on_ray.make_bodies())
    streams.wait_running(20, 120)
    network("cut", "2")
    time.sleep(seconds)
    assert streams.texts() == want, "after a cut the streams say something else"
    return streams


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    if parser.parse_args().serve:
        serve()
        return 1
    with Machines() as machines:
        try:
            last = [machines.start_ray(machine) for machine in range(NUM_MACHINES)][-1]
            machines.serve()
            print(f"ready after {wait_ready(START_SECONDS):.0f} s: {health()['workers']}", flush=True)
            calm = HttpStreams(URL, on_ray.make_bodies())
            want = calm.texts()
            print(f"undisturbed: longest pause {calm.gap_seconds:.2f} s", flush=True)
            streams = run_cut(want, SHORT_SECONDS)
            print(
                f"cut off for {SHORT_SECONDS:g} s: longest pause {streams.gap_seconds:.2f} s; {health()['detail']}"
            )
            network("join", "2")
            print(f"ready again after {wait_ready(HEAL_SECONDS):.1f} s", flush=True)
            streams = run_cut(want, 0.0)
            began = time.monotonic()
            print(
                f"cut off for good: longest pause {streams.gap_seconds:.2f} s; {health()['detail']}",
                flush=True,
            )
            time.sleep(60.0)  # by then Ray has given the node up
            network("join", "2")
            wait_for(lambda: last.poll() is not None, 60)
            print(
                f"Ray's node ended {time.monotonic() - began:.0f} s after the streams had, once it was joined again"
            )
            machines.start_ray(2)
            print(f"ready again {wait_ready(HEAL_SECONDS):.1f} s after it was started anew", flush=True)
            assert HttpStreams(URL, on_ray.make_bodies()).texts() == want, "after all this"
        except AssertionError as error:
            print(f"FAILED: {error}\n{health()}\n{machines.log(0)[-3000:]}\n{machines.log(2)[-3000:]}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
