"""`octavo status`: how a running server is, at a glance."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import typer

from octavo.cluster.cli.console import (
    DEFAULT_SERVER,
    EXIT_UNAVAILABLE,
    ApiKeyOption,
    JsonOption,
    ServerOption,
    print_json,
    reports_errors,
)

WELL = ("ready", "degraded", "draining")


@reports_errors
def status(
    *,
    url: ServerOption = DEFAULT_SERVER,
    api_key: ApiKeyOption = None,
    json: JsonOption = False,
) -> None:
    """Show a server's workers, queue, KV cache, recent preemptions, and what could be set up better.

    Exit code 3: it is not there, or not well.
    """
    from octavo.cluster.client import Client
    from octavo.protos.errors import UnavailableError

    with Client(url, api_key, max_retries=0, timeout=10.0) as client:
        health = client.health(check=False)
        try:
            stats = client.get("/stats")
            models = [card.id for card in client.models()]
        except UnavailableError:
            stats, models = {}, []  # nothing runs that could be counted; `health` says why
    if json:
        print_json({"url": client.base_url, "models": models, "health": health, "stats": stats})
    else:
        _print(client.base_url, models, health, stats)
    if health.get("status") not in WELL:
        raise typer.Exit(EXIT_UNAVAILABLE)


def _print(url: str, models: list[str], health: Mapping[str, Any], stats: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.markup import escape

    console = Console()
    state = health.get("status", "unknown")
    colour = {"ready": "green", "degraded": "yellow", "draining": "yellow"}.get(state, "red")
    detail = f": {escape(health['detail'])}" if health.get("detail") else ""
    console.print(
        f"{', '.join(models) or 'no model'} at {url} is [{colour}]{state}[/]{detail}", soft_wrap=True
    )
    if stats:
        console.print(_summary(stats), soft_wrap=True)
    if workers := _workers(health, stats):
        console.print(workers)
    for one in health.get("advice", ()):
        console.print(f"[yellow]advice[/] {escape(one['reason'])}: {escape(one['remedy'])}", soft_wrap=True)


def _summary(stats: Mapping[str, Any]) -> str:
    waiting = stats.get("waiting", 0) + stats.get("without_worker", 0)
    asked, found = stats.get("cache_query_tokens", 0), stats.get("cache_hit_tokens", 0)
    parts = [
        f"{stats.get('running', 0)} running, {waiting} waiting, {stats.get('swapped', 0)} swapped",
        f"{sum(_kinds(stats.get('finished')).values())} finished",
        f"{sum(_kinds(stats.get('preemptions')).values())} preemptions, "
        f"{stats.get('preemptions_last_minute', 0)} in the last minute",
    ]
    if asked:
        parts.append(f"{found / asked:.0%} of prompt tokens found in the cache")
    return "; ".join(parts)


def _kinds(counts: Any) -> Mapping[str, int]:
    """Counts by kind; 0 stands for none at all."""
    return counts if isinstance(counts, Mapping) else {}


def _workers(health: Mapping[str, Any], stats: Mapping[str, Any]) -> Any:
    from rich.table import Table

    if not health.get("workers"):
        return None
    table = Table(box=None, pad_edge=False)
    for heading in ("worker", "state", "device", "running", "waiting", "KV used", "cached", "steps"):
        table.add_column(heading, justify="left" if heading in ("worker", "state", "device") else "right")
    for worker in health["workers"]:
        counts = (stats.get("workers") or {}).get(worker["worker_id"], {})
        blocks = counts.get("blocks_total") or 0
        table.add_row(
            worker["worker_id"],
            worker["status"],
            str(counts.get("device", "")),
            str(counts.get("running", "")),
            str(counts.get("waiting", "")),
            f"{counts['blocks_used'] / blocks:.0%} of {blocks}" if blocks else "",
            f"{counts['blocks_cached'] / blocks:.0%}" if blocks else "",
            str(worker.get("steps", "")),
        )
    return table
