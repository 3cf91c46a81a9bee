"""`python -m octavo.cluster.metrics.dashboards deploy/grafana` writes the dashboards, or `--check`s them.

Owns what is shown: each panel is a title and its queries. The files are checked in, so that nobody needs this to use
them.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from octavo.cluster.metrics.grafana import Dashboard, Panel, Query, Row, rendered

QUANTILES = (0.5, 0.95, 0.99)


def _rate(name: str, by: str = "", where: str = "") -> str:
    return f"sum{f' by ({by})' if by else ''} (rate(octavo_{name}{where}[$__rate_interval]))"


def _total(name: str, by: str = "", where: str = "") -> str:
    return f"sum{f' by ({by})' if by else ''} (octavo_{name}{where})"


def _quantiles(name: str, where: str = "") -> tuple[Query, ...]:
    return tuple(
        Query(f"histogram_quantile({share}, {_rate(f'{name}_bucket', 'le', where)})", f"p{share * 100:g}")
        for share in QUANTILES
    )


def _mean(name: str, where: str = "") -> Query:
    return Query(f"{_rate(f'{name}_sum', '', where)} / {_rate(f'{name}_count', '', where)}", "mean")


def _load(where: str = "") -> Panel:
    return Panel(
        "Requests",
        tuple(
            Query(_total(f"requests_{state}", "", where), state)
            for state in ("running", "waiting", "swapped")
        ),
        text="Running hold blocks; waiting stand in the queue; swapped are parked in host memory.",
        stacked=True,
    )


def _tokens(where: str = "") -> Panel:
    return Panel(
        "Tokens a second",
        (
            Query(_rate("generation_tokens_total", "", where), "output"),
            Query(_rate("request_prompt_tokens_sum", "", where), "prompt"),
            Query(_rate("scheduled_tokens_total", "", where), "scheduled"),
            Query(_rate("recomputed_tokens_total", "", where), "computed again"),
        ),
    )


def _budget(where: str = "") -> Panel:
    used, offered = _rate("scheduled_tokens_total", "", where), _rate("step_budget_tokens_total", "", where)
    return Panel(
        "Budget use",
        (Query(f"{used} / {offered}", "scheduled of budget"),),
        "percentunit",
        "Near 1: prompts fill every step, and more of them wait.",
    )


def _cache(where: str = "") -> Panel:
    hits = _rate("prefix_cache_hit_tokens_total", "", where)
    return Panel(
        "Prefix cache hit ratio",
        (Query(f"{hits} / {_rate('prefix_cache_query_tokens_total', '', where)}", "hit of asked tokens"),),
        "percentunit",
    )


def _preemption(where: str = "") -> tuple[Panel, ...]:
    return (
        Panel("Preemptions a second", (Query(_rate("preemptions_total", "kind", where), "{{kind}}"),)),
        Panel(
            "Preemption: cost",
            (Query(_rate("preemption_cost_seconds_total", "kind", where), "{{kind}}"),),
            "percentunit",
            "Device and link seconds that preemptions take a second.",
        ),
        Panel(
            "Preemption: requests parked",
            (Query(_rate("preemption_parked_seconds_total", "kind", where), "{{kind}}"),),
            text="How many requests stood parked on average; counted once they are back.",
        ),
    )


FLEET = Dashboard(
    "octavo-fleet",
    "Octavo / Fleet",
    (
        Row(
            "Load",
            (
                _load(),
                Panel(
                    "Unfinished",
                    (
                        Query(_total("requests_unfinished"), "accepted"),
                        Query(_total("requests_without_worker"), "without worker"),
                    ),
                ),
                Panel("Workers", (Query(_total("workers", "status"), "{{status}}"),), stacked=True),
            ),
        ),
        Row("Throughput", (_tokens(), _budget(), _cache())),
        Row(
            "KV cache",
            (
                Panel(
                    "KV in use",
                    (
                        Query("avg by (tier) (octavo_kv_usage_ratio)", "{{tier}}, mean"),
                        Query("max by (tier) (octavo_kv_usage_ratio)", "{{tier}}, fullest worker"),
                    ),
                    "percentunit",
                ),
                Panel(
                    "Fragmentation",
                    (
                        Query("max(octavo_kv_waste_ratio)", "worst worker"),
                        Query("avg(octavo_kv_waste_ratio)", "mean"),
                    ),
                    "percentunit",
                    "Slots of used blocks without a token. Paging keeps it below one block a branch.",
                ),
                Panel(
                    "Blocks between device and host",
                    (
                        Query(_rate("kv_blocks_demoted_total"), "to the host"),
                        Query(_rate("kv_blocks_promoted_total"), "back again"),
                    ),
                ),
            ),
        ),
        Row("Preemption", _preemption()),
        Row(
            "Router",
            (
                Panel(
                    "Requests routed a second",
                    (Query(_rate("router_decisions_total", "worker"), "{{worker}}"),),
                ),
                Panel(
                    "Predicted time to first token",
                    (
                        Query(
                            "histogram_quantile(0.5, "
                            f"{_rate('router_score_seconds_bucket', 'le, candidate')})",
                            "{{candidate}}",
                        ),
                    ),
                    "s",
                    "Median score of the worker that was chosen and of the best other one.",
                ),
                Panel(
                    "Prompt tokens that the router expects cached",
                    (
                        Query(_rate("router_expected_cached_tokens_total"), "expected"),
                        Query(_rate("prefix_cache_hit_tokens_total"), "found"),
                    ),
                ),
            ),
        ),
        Row(
            "Failures",
            (
                Panel("Requests that failed", (Query(_rate("request_errors_total", "error"), "{{error}}"),)),
                Panel(
                    "Ended, refused, moved",
                    (
                        Query(_rate("requests_ended_total", "outcome"), "{{outcome}}"),
                        Query(_rate("requests_rejected_total"), "rejected"),
                        Query(_rate("requests_moved_total"), "moved"),
                    ),
                    "reqps",
                ),
                Panel(
                    "Workers lost in the last hour",
                    (Query("sum by (worker) (increase(octavo_worker_losses_total[1h]))", "{{worker}}"),),
                ),
            ),
        ),
        Row(
            "Front door",
            (
                Panel(
                    "HTTP requests", (Query(_rate("http_requests_total", "status"), "{{status}}"),), "reqps"
                ),
                Panel(
                    "Open",
                    (
                        Query(_total("http_requests_in_flight"), "requests"),
                        Query(_total("http_streams"), "streams"),
                        Query("max(octavo_ingresses)", "HTTP processes"),
                    ),
                ),
                Panel(
                    "Batches",
                    (
                        Query(_rate("batch_lines_total", "outcome"), "lines {{outcome}}"),
                        Query(_total("batches_running"), "batches at work"),
                    ),
                ),
                Panel(
                    "Wire, coordinator and HTTP process",
                    (Query(_rate("ingress_wire_bytes_total", "direction"), "{{direction}}"),),
                    "Bps",
                ),
                Panel("Router's index", (Query("max(octavo_router_index_bytes)", "index"),), "bytes"),
            ),
        ),
    ),
)

_HERE = '{worker=~"$worker"}'

WORKER = Dashboard(
    "octavo-worker",
    "Octavo / Worker",
    (
        Row("Load", (_load(_HERE), _tokens(_HERE), _budget(_HERE))),
        Row(
            "Steps",
            (
                Panel("Step time", (*_quantiles("step_seconds", _HERE), _mean("step_seconds", _HERE)), "s"),
                Panel(
                    "Step time by part",
                    (
                        Query(
                            f"{_rate('step_part_seconds_total', 'part', _HERE)} / scalar("
                            f"{_rate('step_seconds_count', '', _HERE)})",
                            "{{part}}",
                        ),
                    ),
                    "s",
                    "Mean seconds of a step.",
                    stacked=True,
                ),
                Panel(
                    "Busy",
                    (
                        Query(_rate("step_seconds_sum", "worker", _HERE), "{{worker}} computes"),
                        Query(_rate("scheduling_seconds_total", "part", _HERE), "scheduler, {{part}}"),
                    ),
                    "percentunit",
                    "Share of the time that a worker computes, and that its scheduler takes in the coordinator.",
                ),
                Panel(
                    "Steps and tokens",
                    (
                        Query(_rate("step_seconds_count", "", _HERE), "steps a second"),
                        Query(
                            f"{_rate('scheduled_tokens_total', '', _HERE)} / {_rate('step_seconds_count', '', _HERE)}",
                            "tokens a step",
                        ),
                    ),
                ),
                Panel("Inter-token latency", _quantiles("inter_token_latency_seconds", _HERE), "s"),
                Panel(
                    "Wire, coordinator and worker",
                    (Query(_rate("worker_wire_bytes_total", "direction", _HERE), "{{direction}}"),),
                    "Bps",
                ),
            ),
        ),
        Row(
            "Memory",
            (
                Panel(
                    "KV blocks on the device",
                    (Query(_total("kv_blocks", "state", '{worker=~"$worker", tier="device"}'), "{{state}}"),),
                    stacked=True,
                ),
                Panel(
                    "KV blocks on the host",
                    (Query(_total("kv_blocks", "state", '{worker=~"$worker", tier="host"}'), "{{state}}"),),
                    stacked=True,
                ),
                Panel(
                    "Fragmentation",
                    (
                        Query(f"max by (worker) (octavo_kv_waste_ratio{_HERE})", "{{worker}}"),
                        Query(
                            f"max by (worker) (octavo_kv_waste_at_peak_ratio{_HERE})",
                            "{{worker}}, at its peak",
                        ),
                    ),
                    "percentunit",
                ),
                _cache(_HERE),
                Panel(
                    "Blocks between device and host",
                    (
                        Query(_rate("kv_blocks_demoted_total", "", _HERE), "to the host"),
                        Query(_rate("kv_blocks_promoted_total", "", _HERE), "back again"),
                    ),
                ),
                Panel(
                    "Host memory available",
                    (Query(f"min by (worker) (octavo_host_memory_available_bytes{_HERE})", "{{worker}}"),),
                    "bytes",
                ),
            ),
        ),
        Row("Preemption", _preemption(_HERE)),
    ),
    by_worker=True,
)

_WITHIN_SECOND = '{le="1.0"}'
_GOOD = 'octavo_requests_finished_total{reason=~"stop|length"}'

QUALITY = Dashboard(
    "octavo-request-quality",
    "Octavo / Request quality",
    (
        Row(
            "What callers wait for",
            (
                Panel(
                    "Time to first token, as the scheduler sees it",
                    _quantiles("time_to_first_token_seconds"),
                    "s",
                ),
                Panel("Time to first token, over HTTP", _quantiles("http_time_to_first_token_seconds"), "s"),
                Panel("Inter-token latency", _quantiles("inter_token_latency_seconds"), "s"),
                Panel("End to end", _quantiles("request_latency_seconds"), "s"),
                Panel(
                    "First token within 1 s",
                    (
                        Query(
                            f"{_rate('time_to_first_token_seconds_bucket', '', _WITHIN_SECOND)} / "
                            f"{_rate('time_to_first_token_seconds_count')}",
                            "share",
                        ),
                    ),
                    "percentunit",
                ),
                Panel(
                    "Time to first token, spread",
                    (Query(_rate("time_to_first_token_seconds_bucket", "le"), "{{le}}"),),
                    "s",
                    kind="heatmap",
                ),
            ),
        ),
        Row(
            "Where the time goes",
            (
                Panel("Queue", _quantiles("queue_time_seconds"), "s"),
                Panel("Prefill", _quantiles("prefill_time_seconds"), "s"),
                Panel("Decode", _quantiles("decode_time_seconds"), "s"),
            ),
        ),
        Row(
            "What is asked",
            (
                Panel(
                    "Prompt tokens", (*_quantiles("request_prompt_tokens"), _mean("request_prompt_tokens"))
                ),
                Panel("Output tokens", (*_quantiles("branch_output_tokens"), _mean("branch_output_tokens"))),
                _cache(),
            ),
        ),
        Row(
            "How it ends",
            (
                Panel(
                    "Requests ended a second, by reason",
                    (Query(_rate("requests_finished_total", "reason"), "{{reason}}"),),
                    "reqps",
                ),
                Panel(
                    "Good answers",
                    (
                        Query(
                            f"sum(rate({_GOOD}[$__rate_interval])) / {_rate('requests_finished_total')}",
                            "share",
                        ),
                    ),
                    "percentunit",
                    "Ended by a stop or by their length, of all that ended.",
                ),
                Panel(
                    "HTTP calls",
                    _quantiles("http_request_seconds", '{route=~"/v1/.*"}'),
                    "s",
                    "From request to the last byte.",
                ),
            ),
        ),
    ),
)

DASHBOARDS = {"fleet.json": FLEET, "worker.json": WORKER, "request_quality.json": QUALITY}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--check", action="store_true", help="write nothing; 1 when a file is not up to date")
    args = parser.parse_args()
    for name, dashboard in DASHBOARDS.items():
        path, text = args.folder / name, rendered(dashboard)
        if args.check and path.read_text() != text:
            sys.exit(f"{path} is not up to date")
        if not args.check:
            path.write_text(text)


if __name__ == "__main__":
    main()
