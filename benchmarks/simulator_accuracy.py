"""Does the simulator tell what a live run measures? Below saturation, near it and close to it.

python benchmarks/simulator_accuracy.py [--seconds 60] [--loads 0.5,0.8,0.95] [--json] [--save-calibration FILE]

Starts the whole system (Ray, coordinator, one worker, HTTP) with `--record` and sends completions: a burst, which shows
the saturated rate, and Poisson arrivals at 0.3 and 0.7 of it; step times are fitted to these. Then Poisson arrivals at
each load. Each of these runs is replayed, and simulated with the fitted step times; its own answers' lengths are those
of the trace.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from octavo.cluster.recording import read_recording
from octavo.cluster.replay import Replay, replay
from octavo.cluster.service import Service
from octavo.cluster.service_config import ServiceConfig
from octavo.cluster.simulator.calibration import calibrate, write_calibration
from octavo.cluster.simulator.hardware import Device
from octavo.cluster.simulator.live import beside

CALIBRATION_LOADS = (0.3, 0.7)
WARM_UP = 4
"""Requests before a run that do not count."""


def body(rng: random.Random) -> dict[str, Any]:
    """Prompts of 20 to 300 tokens and answers of 16 to 96."""
    prompt = [rng.randint(1000, 40_000) for _ in range(rng.randint(20, 300))]
    return {"prompt": prompt, "max_tokens": rng.randint(16, 96), "ignore_eos": True}


async def drive(service: Service, rate: float, seconds: float, seed: int) -> float:
    """Open loop, Poisson arrivals; with an infinite rate `seconds` is a count, all at once. Returns seconds taken."""
    rng = random.Random(seed)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=service.url, timeout=600, limits=limits) as client:

        async def ask(fields: dict[str, Any]) -> None:
            fields = {"model": service.model_name, **fields}
            (await client.post("/v1/completions", json=fields)).raise_for_status()

        begin = time.monotonic()
        tasks, at = [], 0.0
        if rate == float("inf"):
            tasks = [asyncio.create_task(ask(body(rng))) for _ in range(int(seconds))]
        while rate != float("inf") and (at := at + rng.expovariate(rate)) < seconds:
            await asyncio.sleep(max(0.0, begin + at - time.monotonic()))
            tasks.append(asyncio.create_task(ask(body(rng))))
        await asyncio.gather(*tasks)
        return time.monotonic() - begin


def run(folder: Path, name: str, rate: float, seconds: float, seed: int) -> tuple[Replay, float]:
    """One life of the system and its recording."""
    path = folder / f"{name}.rec"
    config = ServiceConfig(port=0, recording=str(path), jobs_dir="", prefix_cache=False)
    service = Service(config)
    try:
        service.start()
        # The first steps of a life compile and warm up.
        asyncio.run(drive(service, float("inf"), WARM_UP, seed=999))
        spent = asyncio.run(drive(service, rate, seconds, seed))
    finally:
        service.stop()
    found = replay(read_recording(path))
    for request_id in list(found.requests)[:WARM_UP]:
        del found.requests[request_id]
    begin = next(iter(found.requests.values())).at_seconds
    found.steps = [step for step in found.steps if step.ended_at > begin]
    return found, spent


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--loads", default="0.5,0.8,0.95")
    parser.add_argument("--burst", type=int, default=48)
    parser.add_argument("--save-calibration", type=Path)
    parser.add_argument(
        "--keep", type=Path, metavar="FOLDER", help="keep the recordings, to be looked at again"
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        found, spent = run(folder, "saturated", float("inf"), options.burst, seed=1)
        saturated = options.burst / spent
        for load in CALIBRATION_LOADS:
            calm, _ = run(folder, f"calibration-{load}", load * saturated, options.seconds, seed=2)
            found.steps += calm.steps
        device: Device = calibrate(found, "this machine")
        if options.save_calibration:
            write_calibration(device, options.save_calibration)
        for number, load in enumerate(map(float, options.loads.split(","))):
            found, _ = run(folder, f"load-{load}", load * saturated, options.seconds, seed=10 + number)
            live, simulated = beside(found, device, f"load {load}")
            results.append(
                {
                    "load": load,
                    "requests": live.requests,
                    "decisions_same": found.same,
                    "steps": found.num_steps,
                    "live": live.as_dict(),
                    "simulated": simulated.as_dict(),
                    "off": live.off(simulated),
                }
            )
            if not options.json:
                one = results[-1]
                print(
                    f"load {load:.2f}: {live.requests} requests, {found.num_steps} steps replayed "
                    f"{'the same' if found.same else 'OTHERWISE'}; TTFT {live.ttft_mean:.3f} s live, "
                    f"{simulated.ttft_mean:.3f} simulated ({one['off']['ttft_mean']:+.1%}); ITL {live.itl_mean:.4f} "
                    f"live, {simulated.itl_mean:.4f} simulated ({one['off']['itl_mean']:+.1%})",
                    flush=True,
                )
    if options.json:
        print(json.dumps({"saturated_requests_per_second": saturated, "runs": results}, indent=2))
    else:
        print(f"saturated at {saturated:.2f} requests/s")


if __name__ == "__main__":
    main()
