"""`octavo scale`: another number of workers for a system that runs."""

from __future__ import annotations

import logging
import sys
import time
from typing import Annotated, Any

import typer

from octavo.cluster.cli.console import JsonOption, print_json, reports_errors

POLL_SECONDS = 0.5


@reports_errors
def scale(
    *,
    workers: Annotated[int, typer.Option(min=1, help="How many workers there should be.")],
    ray_address: Annotated[
        str, typer.Option(help="The Ray cluster that the system runs on: auto, or host:port.")
    ] = "auto",
    timeout: Annotated[float, typer.Option(min=0, help="Wait so many seconds for it; 0: only ask.")] = 600.0,
    json: JsonOption = False,
) -> None:
    """Add workers to a running system, or let some go; no answer is cut.

    A worker that goes takes nothing new and finishes what it runs; after 30 seconds the rest goes on elsewhere. With
    --json, one line when done: {"workers", "ready"}.
    """
    import ray

    from octavo.cluster.coordinator import COORDINATOR_NAME, NAMESPACE
    from octavo.protos.errors import ConfigError, UnavailableError

    try:
        ray.init(address=ray_address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
        coordinator = ray.get_actor(COORDINATOR_NAME, namespace=NAMESPACE)
    except (ConnectionError, ValueError) as error:
        raise UnavailableError(f"no Octavo runs on the Ray cluster at {ray_address}: {error}") from error
    try:
        ray.get(coordinator.want.remote(workers))
        deadline = time.monotonic() + timeout
        told = ""
        while time.monotonic() < deadline:
            wish, _ = ray.get(coordinator.scaling.remote())
            if wish is not None and wish.refusal is not None:
                raise ConfigError(wish.refusal, param="workers")
            shown: list[dict[str, Any]] = list(ray.get(coordinator.health.remote()).workers)
            line = ", ".join(f"{worker['worker_id']} {worker['status']}" for worker in shown)
            if line != told:
                print(line, file=sys.stderr, flush=True)
                told = line
            if len(shown) == workers and all(worker["status"] == "ready" for worker in shown):
                break
            time.sleep(POLL_SECONDS)
        else:
            if timeout:
                raise UnavailableError(f"after {timeout:g} s: {told}")
        if json:
            print_json({"workers": workers, "ready": bool(timeout)})
    finally:
        ray.shutdown()
