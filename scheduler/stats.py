"""Counters of one scheduler: what `Engine.stats`, `/metrics` and the closing tables read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from octavo.protos.types import FinishReason, StepResult
from octavo.scheduler.events import PreemptionKind
from octavo.scheduler.kv_manager import KVManager
from octavo.scheduler.plan_builder import PlanRecord
from octavo.scheduler.sequence import SequenceGroup


class SchedulerStats:
    """Totals since the start, and the block waste at the fullest moment."""

    def __init__(self) -> None:
        self.steps = 0
        self.scheduled_tokens = 0
        self.sampled_tokens = 0
        self.max_step_tokens = 0
        self.step_seconds = 0.0
        self.cached_tokens = 0
        self.query_tokens = 0
        self.recomputed_tokens = 0
        self.preemptions = dict.fromkeys(PreemptionKind, 0)
        self.finished = dict.fromkeys(FinishReason, 0)
        self.block_steps = 0
        """Blocks in use, summed over steps."""
        self.peak_blocks = 0
        self.peak_wasted_slots = 0

    def on_plan(self, record: PlanRecord, kv: KVManager, running: Iterable[SequenceGroup]) -> None:
        self.steps += 1
        self.scheduled_tokens += record.num_tokens
        self.max_step_tokens = max(self.max_step_tokens, record.num_tokens)
        self.block_steps += kv.pool.num_used
        if kv.pool.num_used > self.peak_blocks:
            self.peak_blocks = kv.pool.num_used
            self.peak_wasted_slots = kv.num_wasted_slots(seq for group in running for seq in group.live)

    def on_commit(self, record: PlanRecord, result: StepResult) -> None:
        self.sampled_tokens += len(record.samples)
        self.step_seconds += result.step_seconds

    def on_start(self, *, cached_tokens: int, asked_tokens: int, recomputed_tokens: int) -> None:
        self.cached_tokens += cached_tokens
        self.query_tokens += asked_tokens
        self.recomputed_tokens += recomputed_tokens

    def on_preemption(self, kind: PreemptionKind) -> None:
        self.preemptions[kind] += 1

    def on_finish(self, reason: FinishReason) -> None:
        self.finished[reason] += 1

    def snapshot(
        self,
        kv: KVManager,
        *,
        num_running: int,
        num_waiting: int,
        num_swapped: int,
        num_wasted_slots: int,
    ) -> dict[str, Any]:
        cached = kv.pool.num_cached_free
        used_slots = kv.pool.num_used * kv.block_size
        peak_slots = self.peak_blocks * kv.block_size
        return {
            "steps": self.steps,
            "running": num_running,
            "waiting": num_waiting,
            "swapped": num_swapped,
            "blocks_total": kv.pool.num_blocks,
            "blocks_used": kv.pool.num_used,
            "blocks_cached": cached,
            "blocks_free": kv.pool.num_free - cached,
            "host_blocks_total": kv.host.num_blocks,
            "host_blocks_used": kv.host.num_used,
            "host_blocks_cached": kv.host.num_cached_free,
            "blocks_demoted": kv.num_blocks_demoted,
            "blocks_promoted": kv.num_blocks_promoted,
            "block_size": kv.block_size,
            "scheduled_tokens": self.scheduled_tokens,
            "sampled_tokens": self.sampled_tokens,
            "max_step_tokens": self.max_step_tokens,
            "step_seconds": self.step_seconds,
            "cache_hit_tokens": self.cached_tokens,
            "cache_query_tokens": self.query_tokens,
            "block_steps": self.block_steps,
            "recomputed_tokens": self.recomputed_tokens,
            "preemptions": {kind.value: count for kind, count in self.preemptions.items()},
            "finished": {reason.value: count for reason, count in self.finished.items()},
            "waste": num_wasted_slots / used_slots if used_slots else 0.0,
            "peak_blocks": self.peak_blocks,
            "peak_wasted_slots": self.peak_wasted_slots,
            "peak_waste": self.peak_wasted_slots / peak_slots if peak_slots else 0.0,
        }
