"""`python -m octavo.cluster.metrics.reference docs/metrics.md` writes the tables of that page from `table.py`.

Owns the mapping from vLLM's names, so that dashboards made for it can be moved over.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from octavo.cluster.metrics.table import METRICS, Scope

VLLM = {
    "vllm:num_requests_running": "sum(octavo_requests_running)",
    "vllm:num_requests_waiting": "sum(octavo_requests_waiting)",
    "vllm:num_requests_swapped": "sum(octavo_requests_swapped)",
    "vllm:kv_cache_usage_perc": 'octavo_kv_usage_ratio{tier="device"}',
    "vllm:gpu_cache_usage_perc": 'octavo_kv_usage_ratio{tier="device"}',
    "vllm:cpu_cache_usage_perc": 'octavo_kv_usage_ratio{tier="host"}',
    "vllm:prefix_cache_queries_total": "octavo_prefix_cache_query_tokens_total",
    "vllm:prefix_cache_hits_total": "octavo_prefix_cache_hit_tokens_total",
    "vllm:num_preemptions_total": "sum without (kind) (octavo_preemptions_total)",
    "vllm:prompt_tokens_total": "octavo_request_prompt_tokens_sum",
    "vllm:generation_tokens_total": "octavo_generation_tokens_total",
    "vllm:iteration_tokens_total_sum": "octavo_scheduled_tokens_total",
    "vllm:iteration_tokens_total_count": "octavo_step_seconds_count",
    "vllm:request_success_total": 'octavo_requests_finished_total{reason=~"stop|length"}',
    "vllm:request_prompt_tokens": "octavo_request_prompt_tokens",
    "vllm:request_generation_tokens": "octavo_branch_output_tokens",
    "vllm:time_to_first_token_seconds": "octavo_time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds": "octavo_inter_token_latency_seconds",
    "vllm:time_per_output_token_seconds": "octavo_inter_token_latency_seconds",
    "vllm:e2e_request_latency_seconds": "octavo_request_latency_seconds",
    "vllm:request_queue_time_seconds": "octavo_queue_time_seconds",
    "vllm:request_prefill_time_seconds": "octavo_prefill_time_seconds",
    "vllm:request_decode_time_seconds": "octavo_decode_time_seconds",
    "http_requests_total": "octavo_http_requests_total",
    "http_request_duration_seconds": "octavo_http_request_seconds",
}
"""Theirs to an expression in ours. A histogram's name stands for its `_bucket`, `_sum` and `_count`."""

_SECTIONS = {
    Scope.WORKER: "label `worker`, one series a worker",
    Scope.SYSTEM: "the system",
    Scope.HTTP: "each HTTP process; label `replica` where there are several",
}
_BLOCK = re.compile(r"(<!-- begin (\w+) -->\n).*?(<!-- end \2 -->)", re.DOTALL)


def with_tables(page: str) -> str:
    """`page` with what stands between its markers made anew."""
    return _BLOCK.sub(lambda found: found[1] + _table(found[2]) + found[3], page)


def _table(name: str) -> str:
    if name == "vllm":
        rows = [f"| `{theirs}` | `{ours}` |" for theirs, ours in VLLM.items()]
        return "\n".join(("| vLLM | here |", "|---|---|", *rows)) + "\n"
    rows = ["| name | type | labels | what it tells |", "|---|---|---|---|"]
    rows += [
        f"| `{metric.name}` | {metric.kind} | {', '.join(metric.labels)} | {metric.help} |"
        for metric in METRICS
        if metric.scope is Scope(name)
    ]
    return f"Of {_SECTIONS[Scope(name)]}:\n\n" + "\n".join(rows) + "\n"


def main() -> None:
    (page,) = map(Path, sys.argv[1:])
    page.write_text(with_tables(page.read_text()))


if __name__ == "__main__":
    main()
