"""The one table of metrics: name, type, labels, help, buckets, and where the value comes from.

Owns what there is to be seen of a running system. `/metrics`, the Ray dashboard, `docs/metrics.md` and the check of
dashboards and alerts are made from it. Names follow Prometheus' rules: the prefix `octavo_`, base units in the name,
counters end in `_total`. Knows nothing of how a value is told.

A row of the scopes WORKER and SYSTEM reads `stats()` of a backend (`CoordinatorCore.stats`, `EngineBackend.stats`); one
of the scope HTTP is counted by `HttpMetrics` in the process that answers.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Stats = Mapping[str, Any]
Read = Callable[[Stats], Any]
"""A row's value in the stats of its scope: a number, `Histogram.snapshot()`, or, for a row with labels, a mapping from
label value to such, as deep as there are labels. None: not known there."""


class Kind(enum.StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Scope(enum.StrEnum):
    WORKER = "worker"
    """One series a worker, with the label `worker`."""
    SYSTEM = "system"
    HTTP = "http"
    """One series an HTTP process, with the label `replica` where there are several."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One row."""

    name: str
    kind: Kind
    scope: Scope
    help: str
    labels: tuple[str, ...] = ()
    """Without the one that the scope adds."""
    read: Read | None = None
    """None in the scope HTTP, and for `BACKEND_UP`."""
    buckets: tuple[float, ...] = ()
    """Of a histogram: upper bounds, without the infinite one."""


SECONDS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    120.0,
    300.0,
)
"""Of whole requests and their phases."""
STEP_SECONDS = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5,
                1.0, 2.5, 10.0)  # fmt: skip
"""Of steps, and of the time between two tokens."""
TOKENS = (1, 8, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
HTTP_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


def _at(*keys: str) -> Read:
    """What stands under `keys`, one inside the other."""

    def read(stats: Stats) -> Any:
        value: Any = stats
        for key in keys:
            if not isinstance(value, Mapping) or key not in value:
                return None
            value = value[key]
        return value

    return read


_TIERS = {"device": "", "host": "host_"}
"""Tier to the prefix of its counts."""


def _kv_blocks(stats: Stats) -> Any:
    found = {}
    for tier, prefix in _TIERS.items():
        total, used, cached = (stats.get(f"{prefix}blocks_{state}") for state in ("total", "used", "cached"))
        if total is None or used is None or cached is None:
            return None
        found[tier] = {"used": used, "cached": cached, "free": total - used - cached}
    return found


def _kv_usage(stats: Stats) -> Any:
    blocks = _kv_blocks(stats)
    if blocks is None:
        return None
    totals = {tier: sum(states.values()) for tier, states in blocks.items()}
    return {tier: blocks[tier]["used"] / total for tier, total in totals.items() if total}


def _ended(stats: Stats) -> Any:
    counts = stats.get("requests")
    return counts and {outcome: counts[outcome] for outcome in ("finished", "failed", "aborted")}


def _worker(kind: Kind, name: str, text: str, read: Read, **more: Any) -> Metric:
    return Metric(f"octavo_{name}", kind, Scope.WORKER, text, read=read, **more)


def _system(kind: Kind, name: str, text: str, read: Read, **more: Any) -> Metric:
    return Metric(f"octavo_{name}", kind, Scope.SYSTEM, text, read=read, **more)


def _http(kind: Kind, name: str, text: str, **more: Any) -> Metric:
    return Metric(f"octavo_{name}", kind, Scope.HTTP, text, **more)


C, G, H = Kind.COUNTER, Kind.GAUGE, Kind.HISTOGRAM

TIME_TO_FIRST_TOKEN = _worker(
    H, "time_to_first_token_seconds", "From a request's arrival at the scheduler to its first token.",
    _at("time_to_first_token"), buckets=SECONDS,
)  # fmt: skip
INTER_TOKEN_LATENCY = _worker(
    H, "inter_token_latency_seconds", "Between two output tokens of one branch, the time it was parked included.",
    _at("inter_token_latency"), buckets=STEP_SECONDS,
)  # fmt: skip
REQUEST_SECONDS = _worker(
    H, "request_latency_seconds", "From a request's arrival at the scheduler to its end.",
    _at("request_latency"), buckets=SECONDS,
)  # fmt: skip
QUEUE_SECONDS = _worker(
    H, "queue_time_seconds", "From a request's arrival to its first admission.",
    _at("queue_time"), buckets=SECONDS,
)  # fmt: skip
PREFILL_SECONDS = _worker(
    H, "prefill_time_seconds", "From a request's first admission to its first token.",
    _at("prefill_time"), buckets=SECONDS,
)  # fmt: skip
DECODE_SECONDS = _worker(
    H, "decode_time_seconds", "From a request's first token to its end.",
    _at("decode_time"), buckets=SECONDS,
)  # fmt: skip
PROMPT_TOKENS = _worker(
    H, "request_prompt_tokens", "Prompt tokens of admitted requests.",
    _at("prompt_tokens"), buckets=TOKENS,
)  # fmt: skip
OUTPUT_TOKENS = _worker(
    H, "branch_output_tokens", "Output tokens of branches that ended; a request with n = 2 has two.",
    _at("output_tokens"), buckets=TOKENS,
)  # fmt: skip
STEP = _worker(
    H, "step_seconds", "A worker's steps, as it measured them.", _at("step_time"), buckets=STEP_SECONDS,
)  # fmt: skip
ROUTER_SCORE = _system(
    H, "router_score_seconds",
    "Predicted time to first token on the worker that was chosen, and on the best of the others.",
    _at("router", "scores"), labels=("candidate",), buckets=SECONDS,
)  # fmt: skip

HTTP_REQUESTS = _http(
    C, "http_requests_total", "HTTP requests answered; status 499: the client left first.",
    labels=("method", "route", "status"),
)  # fmt: skip
HTTP_REQUEST_SECONDS = _http(
    H, "http_request_seconds", "From request to the last byte of the reply.", labels=("route",),
    buckets=HTTP_SECONDS,
)  # fmt: skip
HTTP_IN_FLIGHT = _http(G, "http_requests_in_flight", "HTTP requests open.")
HTTP_STREAMS = _http(G, "http_streams", "Event streams open.")
HTTP_OUTPUT_TOKENS = _http(
    C, "http_output_tokens_total", "Output tokens that reached this process, of aborted requests too."
)
HTTP_CHOICES_STARTED = _http(C, "http_choices_started_total", "Choices with a first token.")
HTTP_CHOICES_FINISHED = _http(
    C, "http_choices_finished_total", "Choices that ended, by reason; those of aborted calls are missing.",
    labels=("reason",),
)  # fmt: skip
HTTP_FIRST_TOKEN_SECONDS = _http(
    H, "http_time_to_first_token_seconds", "From a call's arrival to its first token.", buckets=HTTP_SECONDS
)
BATCH_LINES = _http(
    C, "batch_lines_total", "Lines of batches that were answered, by outcome.", labels=("outcome",)
)
BATCHES_RUNNING = _http(G, "batches_running", "Batches that this process works on.")

BACKEND_UP = Metric(
    "octavo_backend_up", Kind.GAUGE, Scope.SYSTEM, "1 when the backend answered this scrape, else 0."
)

METRICS: tuple[Metric, ...] = (
    BACKEND_UP,
    # --- load
    _worker(G, "requests_running", "Requests that hold blocks and run.", _at("running")),
    _worker(G, "requests_waiting", "Requests in the queue, those parked for recompute included.", _at("waiting")),
    _worker(G, "requests_swapped", "Requests parked in host memory.", _at("swapped")),
    _system(G, "requests_unfinished", "Requests accepted that have not ended, wherever they are.",
            _at("unfinished")),
    _system(G, "requests_without_worker", "Requests that wait for a lost worker's return.", _at("without_worker")),
    # --- requests
    _system(C, "requests_submitted_total", "Requests accepted.", _at("requests", "submitted")),
    _system(C, "requests_rejected_total", "Requests refused: malformed, too large, or too many at once.",
            _at("requests", "rejected")),
    _system(C, "requests_ended_total", "Requests that ended, by outcome.", _ended, labels=("outcome",)),
    _system(C, "request_errors_total", "Requests that failed, by the error that they ended with.",
            _at("request_errors"), labels=("error",)),
    _system(C, "requests_moved_total", "Requests that went on after their worker or coordinator was lost.",
            _at("moved")),
    _worker(C, "requests_finished_total", "Requests that ended, by reason.", _at("finished"), labels=("reason",)),
    TIME_TO_FIRST_TOKEN, INTER_TOKEN_LATENCY, REQUEST_SECONDS, QUEUE_SECONDS, PREFILL_SECONDS, DECODE_SECONDS,
    PROMPT_TOKENS, OUTPUT_TOKENS,
    # --- steps
    STEP,
    _worker(C, "step_part_seconds_total", "The workers' steps by part.", _at("step_parts"), labels=("part",)),
    _worker(C, "scheduling_seconds_total", "What the scheduler takes beside the steps, by part.",
            _at("scheduling"), labels=("part",)),
    _worker(C, "scheduled_tokens_total", "Tokens run, prompt and output, recomputed ones included.",
            _at("scheduled_tokens")),
    _worker(C, "step_budget_tokens_total", "Token budgets of all steps: what could have been scheduled.",
            _at("budget_tokens")),
    _worker(C, "generation_tokens_total", "Output tokens sampled.", _at("sampled_tokens")),
    # --- KV cache
    _worker(G, "kv_blocks", "KV blocks: used by requests, kept for their prefix, free.", _kv_blocks,
            labels=("tier", "state")),
    _worker(G, "kv_usage_ratio", "Share of a tier's KV blocks that requests hold.", _kv_usage, labels=("tier",)),
    _worker(G, "kv_block_size_tokens", "Tokens a block.", _at("block_size")),
    _worker(G, "kv_waste_ratio", "Fragmentation: share of the used blocks' slots without a token.", _at("waste")),
    _worker(G, "kv_waste_at_peak_ratio", "The same at the moment with the most blocks in use.", _at("peak_waste")),
    _worker(G, "kv_blocks_used_max", "Most blocks in use so far.", _at("peak_blocks")),
    _worker(C, "kv_block_steps_total", "KV blocks in use, summed over steps.", _at("block_steps")),
    _worker(C, "prefix_cache_query_tokens_total", "Prompt tokens that were looked up in the prefix cache.",
            _at("cache_query_tokens")),
    _worker(C, "prefix_cache_hit_tokens_total", "Prompt tokens whose KV was found.", _at("cache_hit_tokens")),
    _worker(C, "kv_blocks_demoted_total", "Cached blocks that moved from the device to the host.",
            _at("blocks_demoted")),
    _worker(C, "kv_blocks_promoted_total", "Cached blocks that were loaded from the host again.",
            _at("blocks_promoted")),
    # --- preemption
    _worker(C, "preemptions_total", "Requests parked, by kind.", _at("preemptions"), labels=("kind",)),
    _worker(C, "preemption_cost_seconds_total",
            "Device and link time that preemptions cost, as priced: the KV moved out and back, or computed again.",
            _at("preemption_cost"), labels=("kind",)),
    _worker(C, "preemption_parked_seconds_total", "Time that requests were parked.", _at("preemption_parked"),
            labels=("kind",)),
    _worker(C, "recomputed_tokens_total", "Tokens computed again because of preemption or a loss.",
            _at("recomputed_tokens")),
    # --- router
    _system(C, "router_decisions_total", "Requests routed, by the worker that got them.",
            _at("router", "decisions"), labels=("worker",)),
    ROUTER_SCORE,
    _system(C, "router_expected_cached_tokens_total",
            "Prompt tokens that the router expects to be cached where it sends them.",
            _at("router", "expected_cached_tokens")),
    _system(G, "router_index_bytes", "Size of the router's index of prefixes.", _at("router", "index_bytes")),
    # --- health
    _system(G, "workers", "Workers that should be there, by status.", _at("worker_statuses"), labels=("status",)),
    _system(C, "worker_losses_total", "Times that a worker was lost.", _at("worker_losses"), labels=("worker",)),
    _system(G, "ingresses", "HTTP processes that hold a stream to the coordinator.", _at("ingresses")),
    _worker(G, "host_memory_bytes", "Memory of the worker's machine, or of its container.",
            _at("host_memory", "total")),
    _worker(G, "host_memory_available_bytes", "Of this, what the worker may still take.",
            _at("host_memory", "available")),
    # --- wire
    _worker(C, "worker_wire_bytes_total", "Bytes of messages between coordinator and worker, by direction.",
            _at("wire_bytes"), labels=("direction",)),
    _system(C, "ingress_wire_bytes_total",
            "Bytes of messages between this HTTP process and the coordinator, by direction.",
            _at("ingress_wire_bytes"), labels=("direction",)),
    # --- front door
    HTTP_REQUESTS, HTTP_REQUEST_SECONDS, HTTP_IN_FLIGHT, HTTP_STREAMS, HTTP_OUTPUT_TOKENS, HTTP_CHOICES_STARTED,
    HTTP_CHOICES_FINISHED, HTTP_FIRST_TOKEN_SECONDS, BATCH_LINES, BATCHES_RUNNING,
)  # fmt: skip
"""In the order of the docs."""
