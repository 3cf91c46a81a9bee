"""How long clients wait when a process of the served system is killed: the real service on a local Ray, over HTTP.

    python -m tests.chaos.on_ray [--repeats 3]

Twelve streams over two workers that have no model (20 ms a step); kill -9 of a worker actor's process, of the
coordinator actor's, and of both. Prints the longest time between two events that any client saw, and ends with 1 when
a stream is not what it would have been.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import threading
import time

from octavo.cluster.service import Service, ServiceConfig
from octavo.worker.default_model import default_model_dir

NUM_STREAMS, MAX_TOKENS = 12, 300
FAULTS = {
    "none": (),
    "worker": ("worker",),
    "coordinator": ("coordinator",),
    "coordinator and worker": ("coordinator", "worker"),
}


class Client(threading.Thread):
    """One streamed completion."""

    def __init__(self, system) -> None:
        super().__init__()
        self._system = system
        self.lines: list[str] = []
        self.gap_seconds = 0.0

    def run(self) -> None:
        body = self._system.body(stream=True, max_tokens=MAX_TOKENS)
        last = None
        with self._system.client.stream("POST", "/v1/completions", json=body, timeout=120) as reply:
            for line in reply.iter_lines():
                if not line:
                    continue
                now = time.monotonic()
                self.gap_seconds = max(self.gap_seconds, now - (last or now))
                last = now
                self.lines.append(line)

    def text(self) -> str:

        events = [line.removeprefix("data: ") for line in self.lines]
        assert events[-1] == "[DONE]"
        return "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])


def run_fault(system, parts: tuple[str, ...], want: str) -> float:
    clients = [Client(system) for _ in range(NUM_STREAMS)]
    for client in clients:
        client.start()
    while any(len(client.lines) < 40 for client in clients):
        time.sleep(0.02)
    doomed = []
    if "coordinator" in parts:
        doomed += system.processes("ray::Coordinator")
    if "worker" in parts:
        doomed.append(system.worker_process("worker-0"))
    for process in doomed:
        process.send_signal(signal.SIGKILL)
    for client in clients:
        client.join()
    assert [client.text() for client in clients] == [want] * NUM_STREAMS
    deadline = time.monotonic() + 60
    while system.client.get("/health").json()["status"] != "ready":
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return max(client.gap_seconds for client in clients)


def main() -> int:
    from ray import cloudpickle

    from ..cluster import support, test_service
    from ..scheduler import fake_worker

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    # Workers are other processes and know nothing of the tests' modules.
    for module in (test_service, support, fake_worker):
        cloudpickle.register_pickle_by_value(module)
    config = ServiceConfig(
        model=str(default_model_dir()),
        num_workers=2,
        device="cpu",
        port=0,
        num_blocks=test_service.NUM_BLOCKS * 4,
    )
    system = test_service.System(Service(config, build=test_service.build_fake))
    gaps: dict[str, list[float]] = {name: [] for name in FAULTS}
    try:
        system.start()
        want = system.complete(max_tokens=MAX_TOKENS).json()["choices"][0]["text"]
        for _ in range(args.repeats):
            for name, parts in FAULTS.items():
                gaps[name].append(run_fault(system, parts, want))
                print(f"{name}: {gaps[name][-1]:.2f} s", file=sys.stderr, flush=True)
    except AssertionError as error:
        print(f"FAILED: {error}")
        return 1
    finally:
        system.service.stop(grace_seconds=0.0)
    print("| killed | runs | pause, median s | pause, longest s |")
    print("|---|---|---|---|")
    for name, values in gaps.items():
        print(f"| {name} | {len(values)} | {statistics.median(values):.2f} | {max(values):.2f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
