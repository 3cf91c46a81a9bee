"""A batch whose coordinator, HTTP process and one worker are killed on the way: the served system on a local Ray.

    python -m tests.chaos.job [--lines 2000]

The same file is answered twice by two workers with a tiny model and its real executor: undisturbed, and with kill -9
of all three. Every custom_id must be there once, with the answer of the undisturbed run. Half of the lines are greedy,
half sampled with a seed. Ends with 1 when that is not so.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from octavo.cluster.client import Client
from octavo.cluster.client_jobs import Batch
from octavo.cluster.service import Service, ServiceConfig
from octavo.protos.errors import UnavailableError

from ..tiny_model import tiny_model

URL = "/v1/completions"
NEAR_TIE = 1e-3
"""Rule R1: greedy answers may part where the two likeliest tokens are this close."""
SECONDS_MAX = 600.0
REPLICA, COORDINATOR, WORKER = "ray::ServeReplica", "ray::Coordinator", "ray::WorkerActor"


def write_job(path: Path, num_lines: int, max_tokens: int = 8, logprobs: int | None = 2) -> Path:
    """A file of requests: even lines greedy, odd ones sampled, all with a seed.

    logprobs: of the greedy ones, by which near ties are known.
    """
    with path.open("w") as file:
        for number in range(num_lines):
            # Among all 49,152 a draw may fall within a rounding error of a neighbour's share: once in 8,000 it did.
            chosen = (
                {"temperature": 0.9, "top_k": 20} if number % 2 else {"temperature": 0, "logprobs": logprobs}
            )
            body = {
                "prompt": f"Line {number} of a long file says",
                "max_tokens": max_tokens,
                "ignore_eos": True,
                "return_token_ids": True,
                "seed": number,
                **chosen,
            }
            line = {"custom_id": f"line-{number}", "method": "POST", "url": URL, "body": body}
            file.write(json.dumps(line) + "\n")
    return path


def kill(name: str) -> None:
    """kill -9 of one of our processes, by the name that Ray gives it."""
    for process in psutil.Process().children(recursive=True):
        try:
            if name in " ".join(process.cmdline()):
                process.send_signal(signal.SIGKILL)
                return
        except psutil.Error:
            continue
    raise AssertionError(f"no process {name}")


def answer(
    client: Client, path: Path, faults: Sequence[tuple[float, Callable[[], None]]] = ()
) -> tuple[Batch, dict[str, Any]]:
    """The batch at its end and its results by custom_id, each once.

    faults: (share of the lines that are answered when it strikes, what it does), in order.
    """
    batch = client.batches.create(path)
    waiting = list(faults)
    deadline = time.monotonic() + SECONDS_MAX
    while not batch.ended:
        assert time.monotonic() < deadline, f"no end: {batch}"
        if waiting and batch.total and batch.completed >= waiting[0][0] * batch.total:
            waiting.pop(0)[1]()
        time.sleep(0.02)
        try:
            batch = client.batches.retrieve(batch.id)
        except UnavailableError:
            continue  # its HTTP process is one of those that are killed
    assert not waiting, f"{len(waiting)} faults came too late"
    records = client.batches.results(batch.id)
    counts = Counter(record["custom_id"] for record in records)
    assert set(counts.values()) == {1}, f"answered more than once: {counts.most_common(3)}"
    return batch, {record["custom_id"]: record for record in records}


def differences(calm: dict[str, Any], disturbed: dict[str, Any]) -> list[str]:
    """Lines whose answers are not the same, near ties of greedy ones excused."""
    assert calm.keys() == disturbed.keys()
    return [custom_id for custom_id in calm if not _same(calm[custom_id], disturbed[custom_id])]


def _same(calm: Any, disturbed: Any) -> bool:
    if calm["error"] or disturbed["error"] or calm["response"]["status_code"] != 200:
        return False
    ours, theirs = (record["response"]["body"]["choices"][0] for record in (calm, disturbed))
    pairs = zip(ours["token_ids"], theirs["token_ids"], strict=True)
    parted = next((position for position, (a, b) in enumerate(pairs) if a != b), None)
    if parted is None:
        return True
    if ours.get("logprobs") is None:
        return False
    first, second = sorted(ours["logprobs"]["top_logprobs"][parted].values(), reverse=True)[:2]
    return bool(first - second < NEAR_TIE)


@dataclass
class Outcome:
    lines: int
    calm_seconds: float
    disturbed_seconds: float
    wrong: list[str]
    moved: int


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lines", type=int, default=2000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "model").mkdir()
        config = ServiceConfig(
            model=str(tiny_model(folder / "model")),
            num_workers=2,
            device="cpu",
            port=0,
            num_blocks=1000,
            max_model_len=512,
            jobs_dir=str(folder / "jobs"),
        )
        service = Service(config)
        try:
            service.start(lambda line: print(line, file=sys.stderr, flush=True))
            # Somebody must look after a system: it is what `octavo serve` does.
            threading.Thread(target=_look_after, args=(service,), daemon=True).start()
            outcome = run(service, write_job(folder / "in.jsonl", args.lines))
        finally:
            service.stop(grace_seconds=0.0)
    print(
        f"{outcome.lines} lines: {outcome.calm_seconds:.1f} s undisturbed, {outcome.disturbed_seconds:.1f} s with "
        f"coordinator, HTTP process and a worker killed; {outcome.moved} requests moved; every custom_id once, "
        f"{len(outcome.wrong)} answers differ {outcome.wrong[:5] or ''}".rstrip()
    )
    return 1 if outcome.wrong else 0


def _look_after(service: Service) -> None:
    while service.alive():
        time.sleep(1.0)


def run(service: Service, path: Path) -> Outcome:
    """Both runs of one file. Raises `AssertionError` when a line is missing or there twice."""
    with Client(service.url, max_retries=0) as client:
        began = time.monotonic()
        _, calm = answer(client, path)
        calm_seconds = time.monotonic() - began
        moved = service.stats()["moved"]
        began = time.monotonic()
        faults = (
            (0.15, lambda: kill(COORDINATOR)),
            (0.4, lambda: kill(WORKER)),
            (0.65, lambda: kill(REPLICA)),
        )
        batch, disturbed = answer(client, path, faults)
        assert batch.status == "completed", batch
        return Outcome(
            batch.total,
            calm_seconds,
            time.monotonic() - began,
            differences(calm, disturbed),
            service.stats()["moved"] - moved,
        )


if __name__ == "__main__":
    sys.exit(main())
