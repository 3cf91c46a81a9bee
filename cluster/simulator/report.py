"""What a simulated run says: one flat summary, for a table, for JSON and for comparing runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from octavo.cluster.simulator.fleet import Outcome, RunRecord, SizeChange, quantile
from octavo.cluster.simulator.history import system


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """A request is good when its first token comes within `ttft_seconds` and the others, on average, every
    `itl_seconds`."""

    ttft_seconds: float = 2.0
    itl_seconds: float = 0.1

    def met_by(self, one: Outcome) -> bool:
        return one.ttft_seconds <= self.ttft_seconds and one.itl_seconds <= self.itl_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One run. Times in seconds; shares between 0 and 1."""

    trace: str
    device: str
    device_source: str
    """"roofline": computed from data sheets; "measured": fitted to steps of that machine."""
    workers: int
    """At the beginning."""
    workers_mean: float
    """Over the run; one that loads or drains counts."""
    workers_peak: int
    size_changes: tuple[SizeChange, ...]
    """Of a fleet that scales itself."""
    system: str
    """One of `history.SYSTEMS`."""
    policy: str
    block_size: int
    max_num_batched_tokens: int
    requests: int
    refused: int
    seconds: float
    """Virtual, from the first arrival to the last token."""
    ttft_mean: float
    ttft_p50: float
    ttft_p99: float
    itl_mean: float
    itl_p99: float
    """Over all tokens but first ones, by the steps that they came in."""
    goodput_requests_per_second: float
    slo_share: float
    """Of all requests, those within the SLO; refused ones are not."""
    prompt_tokens_per_second: float
    output_tokens_per_second: float
    hit_rate: float
    """Of all prompt tokens, those found cached."""
    preemptions: int
    recomputed_share: float
    """Of all tokens that were scheduled."""
    waste: float
    """Of the slots in use when most blocks were, those that held no token; mean over workers."""
    utilisation: float
    """Share of the time in which a worker computes; mean over workers."""
    ttft_error_mean: float
    """Mean absolute difference of the TTFT predicted when routing."""
    cached_as_predicted: float
    """Share of requests that found cached what their reservation said at their turn."""
    cached_as_told: float
    """Share of requests that found cached what was when they were routed: nothing changed while they waited."""
    index_exact: float
    index_bytes: int
    dollars_per_million_tokens: float
    """Of prompts and outputs together, by the device's price; 0 without a price."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def summarise(record: RunRecord, slo: Slo) -> Summary:
    """Raises nothing: a run in which every request was refused has zeros."""
    done, config, device = record.outcomes, record.config, record.config.device
    limits = config.scheduler_config()
    ttft = [one.ttft_seconds for one in done]
    begin = done[0].at_seconds if done else 0.0
    seconds = max(1e-9, record.end_seconds - begin)
    prompt = sum(one.num_prompt_tokens for one in done)
    output = sum(one.num_output_tokens for one in done)
    good = sum(slo.met_by(one) for one in done)
    count = max(1, len(done))
    stats = record.schedulers
    return Summary(
        trace=record.trace_name,
        device=device.name,
        device_source=device.source,
        workers=config.num_workers,
        workers_mean=record.worker_seconds / seconds,
        workers_peak=max([config.num_workers, *(change.num_workers for change in record.size_changes)]),
        size_changes=tuple(record.size_changes),
        system=config.system,
        policy=system(config.system).policy or config.policy,
        block_size=limits.block_size,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        requests=len(done) + record.refused,
        refused=record.refused,
        seconds=seconds,
        ttft_mean=sum(ttft) / count,
        ttft_p50=quantile(ttft, 0.5),
        ttft_p99=quantile(ttft, 0.99),
        itl_mean=_weighted_mean(record.step_seconds, record.step_tokens),
        itl_p99=_weighted_quantile(record.step_seconds, record.step_tokens, 0.99),
        goodput_requests_per_second=good / seconds,
        slo_share=good / max(1, len(done) + record.refused),
        prompt_tokens_per_second=prompt / seconds,
        output_tokens_per_second=output / seconds,
        hit_rate=sum(one.cached_tokens for one in done) / max(1, prompt),
        preemptions=sum(one.num_preemptions for one in done),
        recomputed_share=sum(one["recomputed_tokens"] for one in stats)
        / max(1, sum(one["scheduled_tokens"] for one in stats)),
        waste=sum(one["peak_waste"] for one in stats) / max(1, len(stats)),
        utilisation=sum(record.busy_seconds) / max(1e-9, record.worker_seconds),
        ttft_error_mean=sum(abs(one.ttft_seconds - one.predicted_ttft_seconds) for one in done) / count,
        cached_as_predicted=sum(one.cached_tokens == one.predicted_cached_tokens for one in done) / count,
        cached_as_told=sum(not one.repredictions for one in done) / count,
        index_exact=sum(one.index_exact for one in done) / count,
        index_bytes=record.index_bytes,
        dollars_per_million_tokens=device.dollars_per_hour
        * (record.worker_seconds / 3600)
        / max(1, prompt + output)
        * 1e6,
    )


def _weighted_mean(values: Sequence[float], weights: Sequence[float]) -> float:
    return float(np.average(values, weights=weights)) if len(values) else 0.0


def _weighted_quantile(values: Sequence[float], weights: Sequence[float], share: float) -> float:
    if not len(values):
        return 0.0
    order = np.argsort(values, kind="stable")
    passed = np.cumsum(np.asarray(weights)[order])
    return float(np.asarray(values)[order][np.searchsorted(passed, share * passed[-1])])


SHOWN: tuple[tuple[str, str, str], ...] = (
    ("workers", "workers", "d"),
    ("system", "system", ""),
    ("workers_mean", "workers, mean", ".1f"),
    ("policy", "policy", ""),
    ("block_size", "block size", "d"),
    ("max_num_batched_tokens", "budget", "d"),
    ("ttft_mean", "TTFT mean s", ".3f"),
    ("ttft_p99", "TTFT p99 s", ".2f"),
    ("itl_mean", "ITL mean s", ".4f"),
    ("itl_p99", "ITL p99 s", ".4f"),
    ("slo_share", "in SLO", ".1%"),
    ("goodput_requests_per_second", "good requests/s", ".2f"),
    ("output_tokens_per_second", "output tokens/s", ".0f"),
    ("hit_rate", "cache hits", ".1%"),
    ("preemptions", "preemptions", "d"),
    ("waste", "block waste", ".2%"),
    ("utilisation", "busy", ".0%"),
    ("dollars_per_million_tokens", "$/M tokens", ".3f"),
)
"""Field, heading and format of the table that people read."""


def rows(summaries: Sequence[Summary]) -> list[list[str]]:
    """Cells of the table, a list a run."""
    return [[format(getattr(one, name), style) for name, _, style in SHOWN] for one in summaries]
