"""Bad calls in numbers: 10,000 mutated bodies, then schemathesis on the OpenAPI document.

    python -m tests.fuzz.run [--bodies 10000] [--seed 1] [--examples 60] [--url http://127.0.0.1:8000]

Without --url a system with a tiny model is served by this process. schemathesis runs in an environment of its own, made
in the folder `clients` of the cache on first use. Ends with 1 when anything was a 5xx, hung, was no JSON or harmed the
neighbour's stream. docs/http.md has the last outcome.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import subprocess
import sys
import tempfile
import threading
import time
import venv
from collections.abc import Iterator
from pathlib import Path

from octavo.cluster.tokenizer import Tokenizer
from octavo.worker.model_cache import cache_root

from ..e2e.support import Background
from ..tiny_model import tiny_model
from .attack import Verdict, attack
from .bodies import mutated

SETTINGS = """[checks.not_a_server_error]
expected-statuses = ["2xx", "3xx", "4xx", 504]
"""
"""504 is what a caller gets who asks for a `timeout` of no time."""


@contextlib.contextmanager
def served(url: str | None) -> Iterator[str]:
    if url is not None:
        yield url
        return
    from octavo.worker.build import build_executor
    from octavo.worker.config import WorkerConfig

    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "model").mkdir()
        folder = tiny_model(Path(name) / "model")
        options = {"num_blocks": 400, "max_num_batched_tokens": 256, "max_num_seqs": 64, "max_model_len": 192}
        executor = build_executor(
            WorkerConfig(worker_id="worker-0", model=str(folder), device="cpu", **options)
        )
        with Background(executor, Tokenizer(folder), jobs_dir=f"{name}/jobs") as running:
            yield running.system.url


def schemathesis(url: str, examples: int, seed: int) -> tuple[int, str]:
    """Exit status and report. A neighbour streams meanwhile."""
    root = cache_root() / "clients" / "schemathesis"
    done = root / ".installed"
    if not done.exists():
        venv.create(root, with_pip=True)
        subprocess.run([root / "bin" / "python", "-m", "pip", "install", "-q", "schemathesis"], check=True)
        done.touch()
    (root / "schemathesis.toml").write_text(SETTINGS)
    command = [
        *(str(root / "bin" / "schemathesis"), "run", f"{url}/openapi.json", "--mode", "all", "--no-color"),
        *("--checks", "not_a_server_error,response_schema_conformance,content_type_conformance"),
        *("--request-timeout", "60", "--max-examples", str(examples), "--seed", str(seed)),
        *("--exclude-path", "/health", "--exclude-path", "/ready"),
    ]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=root, check=False)
    return ran.returncode, ran.stdout + ran.stderr


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bodies", type=int, default=10_000)
    parser.add_argument(
        "--examples", type=int, default=60, help="of schemathesis, for each operation; 0: none"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--url", help="a running server, in place of one of our own")
    args = parser.parse_args()
    failed = False
    with served(args.url) as url:
        if args.bodies:
            began = time.monotonic()
            verdict = asyncio.run(attack(url, mutated(args.seed, args.bodies)))
            statuses = ", ".join(f"{status}: {count}" for status, count in sorted(verdict.statuses.items()))
            print(
                f"{args.bodies} bodies in {time.monotonic() - began:.0f} s ({statuses}); "
                f"{verdict.neighbours} neighbour streams; {len(verdict.faults)} faults"
            )
            print("\n".join(verdict.faults[:20]))
            failed |= bool(verdict.faults)
        if args.examples:
            neighbour = _Neighbour(url)
            status, report = schemathesis(url, args.examples, args.seed)
            verdict = neighbour.stop()
            print(report)
            print(
                f"schemathesis: exit {status}; {verdict.neighbours} neighbour streams, {len(verdict.faults)} harmed"
            )
            failed |= bool(status or verdict.faults)
    return int(failed)


class _Neighbour(threading.Thread):
    """The neighbour's stream over and over, until `stop`."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url = url
        self._over = threading.Event()
        self._verdict = Verdict()
        self.start()

    def run(self) -> None:
        def until_over() -> Iterator[tuple[str, bytes]]:
            while not self._over.is_set():
                time.sleep(0.05)
                yield "/tokenize", b'{"prompt": "x"}'

        self._verdict = asyncio.run(attack(self._url, until_over()))

    def stop(self) -> Verdict:
        self._over.set()
        self.join()
        return self._verdict


if __name__ == "__main__":
    sys.exit(main())
