"""A recorded run beside its simulation: the same arrivals, the same limits, and how far the times are off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from octavo.cluster.replay import LiveRequest, Replay
from octavo.cluster.simulator.fleet import FleetConfig, Outcome, quantile
from octavo.cluster.simulator.hardware import Device
from octavo.cluster.simulator.run import simulate
from octavo.cluster.simulator.traces import Trace, TraceRequest
from octavo.protos.errors import InvalidRequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class Latencies:
    """Of the requests that were answered, in seconds."""

    requests: int
    ttft_mean: float
    ttft_p50: float
    ttft_p99: float
    itl_mean: float
    """Mean over requests of more than one token of their mean time between tokens."""

    def off(self, other: Latencies) -> dict[str, float]:
        """By what share `other` differs from this, e.g. 0.1: a tenth more."""
        names = ("ttft_mean", "ttft_p50", "ttft_p99", "itl_mean")
        return {name: getattr(other, name) / getattr(self, name) - 1 for name in names if getattr(self, name)}

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def _latencies(done: Sequence[LiveRequest | Outcome]) -> Latencies:
    ttft = [one.ttft_seconds for one in done]
    itl = [
        (one.total_seconds - one.ttft_seconds) / (one.num_output_tokens - 1)
        for one in done
        if one.num_output_tokens > 1
    ]
    return Latencies(
        requests=len(done),
        ttft_mean=sum(ttft) / max(1, len(ttft)),
        ttft_p50=quantile(ttft, 0.5),
        ttft_p99=quantile(ttft, 0.99),
        itl_mean=sum(itl) / max(1, len(itl)),
    )


def _answered(found: Replay) -> list[LiveRequest]:
    return [one for one in found.requests.values() if one.total_seconds >= 0 and one.num_output_tokens]


def recorded_trace(found: Replay, name: str) -> Trace:
    """Arrivals, prompts and lengths of the requests that were answered, from 0. Of several branches the longest counts.

    Raises `InvalidRequestError` where there is none.
    """
    done = _answered(found)
    if not done:
        raise InvalidRequestError("no request of the recording was answered", param="recording")
    begin = done[0].at_seconds
    return Trace(
        name,
        [
            TraceRequest(
                one.at_seconds - begin,
                len(one.prompt_token_ids),
                one.num_output_tokens,
                token_ids=one.prompt_token_ids,
            )
            for one in done
        ],
    )


def fleet_of(found: Replay, device: Device) -> FleetConfig:
    """The last coordinator's workers, taken as alike, at the speed of `device`."""
    limits = found.schedulers[0].config
    return FleetConfig(
        device=device,
        num_workers=len(found.schedulers),
        policy=found.router_policy,
        block_size=limits.block_size,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_num_seqs=limits.max_num_seqs,
        max_model_len=limits.max_model_len,
        pipeline_depth=limits.pipeline_depth,
        host_blocks=limits.num_host_blocks,
        prefix_cache=limits.prefix_cache,
        preemption=limits.preemption,
        itl_target=limits.itl_target,
        kv_tokens=limits.num_blocks * limits.block_size,
    )


def beside(found: Replay, device: Device, name: str) -> tuple[Latencies, Latencies]:
    """(measured, simulated). Raises as `recorded_trace`."""
    trace = recorded_trace(found, name)
    record = simulate(fleet_of(found, device), trace)
    return _latencies(_answered(found)), _latencies(record.outcomes)
