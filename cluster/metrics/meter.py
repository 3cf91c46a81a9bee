"""What one worker's driver measures of its steps and of its requests' lives, for `/metrics`.

Owns histograms and sums; the scheduler's own counts are `scheduler/stats.py`'s. Costs a handful of array operations a
step, whatever its size: the time between two tokens is taken for all rows of a step at once. Not thread-safe: the
driver calls it where it touches the scheduler.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from octavo.cluster.metrics import table
from octavo.cluster.metrics.histogram import Histogram
from octavo.protos.types import MASKED_TOKEN, Int32Array, NewSequence, RequestMetrics, StepPlan, StepResult
from octavo.scheduler.events import Admitted, Event, Finished, Preempted, PreemptionKind, Resumed, TokensOut


@dataclass(slots=True)
class _Sent:
    """What must be remembered of a plan until its result is in."""

    sample_rows: Int32Array
    new_rows: list[tuple[int, float, bool]]
    """(row, when its branch got its last token, whether it belongs to a beam search)"""
    copied_rows: list[tuple[int, int]]
    """(parent row, row that takes its state)"""


class WorkerMeter:
    """Of one scheduler and its worker, from the first plan on."""

    def __init__(self, max_num_seqs: int) -> None:
        self._histograms = {
            "time_to_first_token": Histogram(table.TIME_TO_FIRST_TOKEN.buckets),
            "inter_token_latency": Histogram(table.INTER_TOKEN_LATENCY.buckets),
            "request_latency": Histogram(table.REQUEST_SECONDS.buckets),
            "queue_time": Histogram(table.QUEUE_SECONDS.buckets),
            "prefill_time": Histogram(table.PREFILL_SECONDS.buckets),
            "decode_time": Histogram(table.DECODE_SECONDS.buckets),
            "prompt_tokens": Histogram(table.PROMPT_TOKENS.buckets),
            "output_tokens": Histogram(table.OUTPUT_TOKENS.buckets),
            "step_time": Histogram(table.STEP.buckets),
        }
        self._step_parts: dict[str, float] = {}
        self._scheduling = {"plan": 0.0, "commit": 0.0}
        self._budget_tokens = 0
        self._preemption_cost = {kind.value: 0.0 for kind in PreemptionKind}
        self._preemption_parked = {kind.value: 0.0 for kind in PreemptionKind}
        self._parked: dict[str, Preempted] = {}
        """By request id; bounded as the scheduler's requests are."""
        self._in_flight: deque[_Sent] = deque()
        self._token_at = np.full(max_num_seqs, np.nan)
        """When each row got its last token; NaN: none yet."""
        self._in_search = np.zeros(max_num_seqs, np.bool_)
        """Rows of beam searches, which give no token before their end."""

    def on_plan(self, plan: StepPlan, *, budget_tokens: int, seconds: float) -> None:
        """A plan was made, which took `seconds` and could have had `budget_tokens`."""
        self._scheduling["plan"] += seconds
        if len(plan.rows):
            self._budget_tokens += budget_tokens
        copied = [(parent, child) for parent, child, *_ in (*plan.forks.tolist(), *plan.beam_moves.tolist())]
        self._in_flight.append(_Sent(plan.sample_rows, list(map(self._new_row, plan.new_sequences)), copied))

    def on_result(self, result: StepResult, now: float, *, seconds: float) -> None:
        """The oldest plan's result was committed, which took `seconds`."""
        self._scheduling["commit"] += seconds
        self._histograms["step_time"].observe(result.step_seconds)
        for part, spent in result.parts_seconds.items():
            self._step_parts[part] = self._step_parts.get(part, 0.0) + spent
        sent = self._in_flight.popleft()
        for row, token_at, in_search in sent.new_rows:
            self._token_at[row], self._in_search[row] = token_at, in_search
        for parent, child in sent.copied_rows:
            self._token_at[child] = np.nan
            self._in_search[child] = self._in_search[parent]
        rows = sent.sample_rows[(result.token_ids != MASKED_TOKEN) & ~self._in_search[sent.sample_rows]]
        gaps = now - self._token_at[rows]
        self._token_at[rows] = now
        self._histograms["inter_token_latency"].observe_all(gaps[~np.isnan(gaps)])

    def _new_row(self, sequence: NewSequence) -> tuple[int, float, bool]:
        request = sequence.request
        parked = self._parked.get(request.request_id)
        # To within a step: that is how far the plan that parked it is from its last token.
        token_at = np.nan if parked is None else parked.time
        return sequence.row, token_at, request.params.beam_width is not None

    def observe(self, events: Iterable[Event]) -> None:
        """Take in what the scheduler said."""
        histograms = self._histograms
        for event in events:
            if isinstance(event, TokensOut):
                if event.metrics is not None:
                    self._on_first_token(event.metrics)
            elif isinstance(event, Admitted):
                histograms["prompt_tokens"].observe(event.num_prompt_tokens)
            elif isinstance(event, Preempted):
                swapped = event.kind is PreemptionKind.SWAP
                cost = event.swap_seconds if swapped else event.recompute_seconds
                self._preemption_cost[event.kind.value] += cost or 0.0
                self._parked[event.request_id] = event
            elif isinstance(event, Resumed):
                self._unpark(event)
            elif isinstance(event, Finished):
                if event.num_output_tokens:
                    histograms["output_tokens"].observe(event.num_output_tokens)
                if event.request_finished:
                    self._unpark(event)
                    if event.metrics is not None:
                        self._on_end(event.metrics)

    def _on_first_token(self, metrics: RequestMetrics) -> None:
        histograms = self._histograms
        histograms["time_to_first_token"].observe(metrics.ttft_seconds)
        histograms["queue_time"].observe(metrics.queue_seconds)
        histograms["prefill_time"].observe(metrics.ttft_seconds - metrics.queue_seconds)

    def _on_end(self, metrics: RequestMetrics) -> None:
        histograms = self._histograms
        histograms["request_latency"].observe(metrics.total_seconds)
        # One that ended without a token was never decoded: then the two are the same.
        if metrics.total_seconds > metrics.ttft_seconds:
            histograms["decode_time"].observe(metrics.total_seconds - metrics.ttft_seconds)

    def _unpark(self, event: Event) -> None:
        parked = self._parked.pop(event.request_id, None)
        if parked is not None:
            self._preemption_parked[parked.kind.value] += event.time - parked.time

    def snapshot(self) -> dict[str, Any]:
        """JSON-able, by the keys that `table.py` reads."""
        return {
            **{key: histogram.snapshot() for key, histogram in self._histograms.items()},
            "step_parts": dict(self._step_parts),
            "scheduling": dict(self._scheduling),
            "budget_tokens": self._budget_tokens,
            "preemption_cost": dict(self._preemption_cost),
            "preemption_parked": dict(self._preemption_parked),
        }
