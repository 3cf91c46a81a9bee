"""Routes requests to workers and outputs to ingresses: the coordinator without Ray and without gRPC servers.

Owns who is unfinished, where it runs and whom it answers; every accepted request gets exactly one terminal
reply. Plain asyncio on one loop; nothing here waits for a worker or an ingress. Workers announce themselves
until somebody attaches, so that this process may be restarted at any time: whoever comes to life first, the
others find it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from octavo.cluster.backend import HealthReport, HealthStatus
from octavo.cluster.cluster_stats import total
from octavo.cluster.forking import TokensSoFar, not_running
from octavo.cluster.worker_link import WorkerLink, scheduler_config
from octavo.protos.errors import (
    ConfigError,
    InvalidRequestError,
    OctavoError,
    OverloadedError,
    UnavailableError,
    WorkerLostError,
)
from octavo.protos.types import ModelInfo, OutputDelta, Request, WorkerInfo
from octavo.scheduler.router import Router, check_policy
from octavo.scheduler.scheduler import Scheduler
from octavo.scheduler.step_time import StepTimeModel

logger = logging.getLogger(__name__)

UNFINISHED_REQUESTS_MAX = 8192
"""All ingresses together. One more is an `OverloadedError`."""
RETRY_AFTER_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class CoordinatorConfig:
    """Raises `ConfigError` naming the option."""

    worker_ids: tuple[str, ...]
    """Workers that should be there; health is degraded while one is not."""
    scheduler_options: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `SchedulerConfig` that are configured, not discovered."""
    unfinished_requests_max: int = UNFINISHED_REQUESTS_MAX
    lease_seconds: float | None = None
    """How long a worker may be silent; None: by its device."""
    seed: int = 0
    router_policy: str = "predicted_ttft"
    """One of `ROUTER_POLICIES`; `docs/routing.md` compares them."""

    def __post_init__(self) -> None:
        if not self.worker_ids or len(set(self.worker_ids)) != len(self.worker_ids):
            raise ConfigError("worker_ids must be at least one, each once", param="worker_ids")
        if self.unfinished_requests_max < 1:
            raise ConfigError(
                f"unfinished_requests_max must be at least 1, got {self.unfinished_requests_max}",
                param="unfinished_requests_max",
            )
        check_policy(self.router_policy)


class IngressSink(Protocol):
    """Where outputs of one ingress go. Calls must not wait."""

    def push(self, deltas: list[OutputDelta]) -> None: ...


@dataclass(slots=True)
class _Slot:
    """One expected worker."""

    link: WorkerLink | None = None
    task: asyncio.Task[None] | None = None
    address: str | None = None
    ever_served: bool = False
    detail: str = "not joined yet"
    num_losses: int = 0


@dataclass(slots=True)
class _Open:
    """One unfinished request."""

    sink: IngressSink
    link: WorkerLink


class CoordinatorCore:
    """See the module. `on_stuck` is told the id of a worker whose process should be ended and started anew."""

    def __init__(
        self,
        config: CoordinatorConfig,
        *,
        on_stuck: Callable[[str], None] = lambda worker_id: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.model: ModelInfo | None = None
        """Of the first worker that joined."""
        self._on_stuck = on_stuck
        self._clock = clock
        # An epoch must top those of earlier incarnations, which left no record but their time of day.
        self._epoch = time.time_ns() // 1_000_000
        self._slots = {worker_id: _Slot() for worker_id in config.worker_ids}
        self._open: dict[str, _Open] = {}
        self._router = Router(config.seed, policy=config.router_policy)
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._lost_counts: dict[str, Any] | None = None
        """What the schedulers of lost workers had counted."""
        self._counts = dict.fromkeys(("submitted", "rejected", "finished", "failed", "aborted"), 0)

    # --- workers -------------------------------------------------------------------------------------------

    def announce(self, worker_id: str, address: str) -> None:
        """A worker that nobody is attached to says where it is. Attaches, unless that is under way.

        Raises `ConfigError` for an id that is not expected.
        """
        slot = self._slots.get(worker_id)
        if slot is None:
            raise ConfigError(
                f"worker {worker_id!r} is not one of {', '.join(self._slots)}", param="worker_id"
            )
        if slot.task is not None and not slot.task.done():
            if slot.address == address:
                return
            # Restarted elsewhere before its old stream was seen to break.
            slot.task.cancel()
        slot.address = address
        slot.task = asyncio.create_task(self._attend(worker_id, slot, address))

    async def _attend(self, worker_id: str, slot: _Slot, address: str) -> None:
        previous = slot.link
        if previous is not None:
            self._on_lost(previous, WorkerLostError(f"worker {worker_id} was restarted"))
            self._keep_counts(previous)
        self._epoch += 1
        link = WorkerLink(
            worker_id,
            address,
            self._epoch,
            make_scheduler=self._make_scheduler,
            deliver=self._deliver,
            clock=self._clock,
            lease_seconds=self.config.lease_seconds,
        )
        slot.link = link
        slot.detail = "attaching"
        try:
            error = await link.run()
        except asyncio.CancelledError:
            error = WorkerLostError(f"worker {worker_id} was let go")
        if slot.link is link:
            slot.link = None
            slot.detail = error.message
            slot.num_losses += 1
            self._keep_counts(link)
            logger.warning("worker %s is lost: %s", worker_id, error.message)
        self._on_lost(link, error)
        if link.stuck:
            self._on_stuck(worker_id)

    def _make_scheduler(self, info: WorkerInfo, epoch: int) -> Scheduler:
        if self.model is None:
            self.model = info.model
        elif info.model != self.model:
            raise ConfigError(f"worker {info.worker_id} serves {info.model.name}, not {self.model.name}")
        slot = self._slots[info.worker_id]
        slot.ever_served = True
        slot.detail = ""
        options = dict(self.config.scheduler_options)
        return Scheduler(scheduler_config(info, epoch, options), StepTimeModel.of_worker(info))

    def _on_lost(self, link: WorkerLink, error: OctavoError) -> None:
        """What becomes of a lost worker's requests: they fail. Moving them to another worker begins here, with
        the prompt and the tokens so far of each in `link.scheduler`."""
        if not isinstance(error, WorkerLostError):
            error = WorkerLostError(f"worker {link.worker_id}: {error.message}")
        self._deliver(link.fail_all(error))

    def _keep_counts(self, link: WorkerLink) -> None:
        if link.attached_once:
            lost = [] if self._lost_counts is None else [self._lost_counts]
            self._lost_counts = total((), [*lost, link.scheduler.snapshot()])

    def _serving(self) -> list[WorkerLink]:
        return [slot.link for slot in self._slots.values() if slot.link is not None and slot.link.serving]

    # --- requests ------------------------------------------------------------------------------------------

    def submit(self, request: Request, sink: IngressSink) -> None:
        """Accept a request: from now on `sink` gets its deltas, the last with `request_finished`.

        Raises an `OctavoError`, and then nothing follows, for one that is refused.
        """
        try:
            self._check(request)
            serving = {link.worker_id: link for link in self._serving()}
            schedulers = {worker_id: link.scheduler for worker_id, link in serving.items()}
            worker_id, _ = self._router.route(request, schedulers, self._clock())
        except OctavoError:
            self._counts["rejected"] += 1
            raise
        self._counts["submitted"] += 1
        self._open[request.request_id] = _Open(sink, serving[worker_id])
        self._idle.clear()
        serving[worker_id].wake()

    def _check(self, request: Request) -> None:
        if self._draining:
            raise UnavailableError("the server is shutting down and takes no new requests")
        if request.request_id in self._open:
            raise InvalidRequestError(f"request id {request.request_id!r} is in use", param="request_id")
        if not self._serving():
            raise UnavailableError("no worker is ready; try again in a few seconds")
        if len(self._open) >= self.config.unfinished_requests_max:
            raise OverloadedError(
                f"{len(self._open)} requests are unfinished; the limit is {self.config.unfinished_requests_max}",
                retry_after_seconds=RETRY_AFTER_SECONDS,
            )
        assert self.model is not None, "a serving worker has said which"
        # The front door checks this too; a worker must never see an id outside its embedding.
        vocab_size = self.model.vocab_size
        request.params.check_vocab(vocab_size)
        prompt = request.prompt_token_ids
        if int(prompt.min()) < 0 or int(prompt.max()) >= vocab_size:
            raise InvalidRequestError(f"prompt token ids must be in [0, {vocab_size - 1}]", param="prompt")

    def tokens(self, request_id: str, branch: int) -> TokensSoFar:
        """Where one branch of an unfinished request stands, for any ingress: who knows an id may go on from it.

        Raises `NotFoundError` and `InvalidRequestError` as `Backend.tokens`.
        """
        entry = self._open.get(request_id)
        if entry is None:
            raise not_running(request_id)
        return entry.link.tokens(request_id, branch)

    def abort(self, request_id: str, sink: IngressSink) -> None:
        """End a request of `sink` without a reply. One that has ended, or is another's, is left alone."""
        entry = self._open.get(request_id)
        if entry is None or entry.sink is not sink:
            return
        self._close(request_id, "aborted")
        entry.link.abort(request_id)

    def stop_branch(self, request_id: str, branch: int, sink: IngressSink) -> None:
        """End one branch of a request of `sink`, whose text is complete; `sink` gets that branch's last delta. One
        that has ended, or is another's, is left alone."""
        entry = self._open.get(request_id)
        if entry is not None and entry.sink is sink:
            self._deliver(entry.link.stop_branch(request_id, branch))

    def detach(self, sink: IngressSink) -> None:
        """The ingress is gone: end all its requests."""
        for request_id in [key for key, entry in self._open.items() if entry.sink is sink]:
            self.abort(request_id, sink)

    def _deliver(self, deltas: list[OutputDelta]) -> None:
        batches: dict[int, tuple[IngressSink, list[OutputDelta]]] = {}
        for delta in deltas:
            entry = self._open.get(delta.request_id)
            if entry is None:
                continue
            batches.setdefault(id(entry.sink), (entry.sink, []))[1].append(delta)
            if delta.request_finished:
                self._close(delta.request_id, "finished" if delta.error is None else "failed")
        for sink, batch in batches.values():
            sink.push(batch)

    def _close(self, request_id: str, outcome: str) -> None:
        del self._open[request_id]
        self._counts[outcome] += 1
        if not self._open:
            self._idle.set()

    # --- life ----------------------------------------------------------------------------------------------

    async def drain(self, grace_seconds: float) -> int:
        """Refuse new requests and wait for the unfinished, `grace_seconds` at most; the rest end with an error.

        Returns how many did not finish by themselves.
        """
        self._draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), grace_seconds)
        except (asyncio.TimeoutError, TimeoutError):
            logger.warning("%d requests did not finish within %g s", len(self._open), grace_seconds)
        left = len(self._open)
        for slot in self._slots.values():
            if slot.link is not None:
                self._deliver(slot.link.fail_all(UnavailableError("the server shut down")))
        return left

    async def close(self) -> None:
        """End every worker stream. Workers finish their running step and wait for the next epoch."""
        tasks = [slot.task for slot in self._slots.values() if slot.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- what can be asked ---------------------------------------------------------------------------------

    @property
    def num_unfinished(self) -> int:
        return len(self._open)

    def health(self) -> HealthReport:
        """Never waits for anything."""
        workers = [self._worker_health(worker_id, slot) for worker_id, slot in self._slots.items()]
        ready = sum(worker["status"] == HealthStatus.READY.value for worker in workers)
        detail = "" if ready == len(workers) else f"{ready} of {len(workers)} workers serve"
        if self._draining:
            status = HealthStatus.DRAINING
            detail = f"shutting down, {len(self._open)} requests left"
        elif ready == len(workers):
            status = HealthStatus.READY
        elif ready:
            status = HealthStatus.DEGRADED
        elif any(slot.ever_served for slot in self._slots.values()):
            status = HealthStatus.DEAD
        else:
            status = HealthStatus.LOADING
        return HealthReport(status=status, workers=tuple(workers), detail=detail)

    def _worker_health(self, worker_id: str, slot: _Slot) -> dict[str, Any]:
        link = slot.link
        if link is not None and link.serving:
            status = HealthStatus.READY
        else:
            status = HealthStatus.DEAD if slot.ever_served else HealthStatus.LOADING
        return {
            "worker_id": worker_id,
            "status": status.value,
            "detail": slot.detail,
            "seconds_since_heard": None if link is None else link.seconds_since_heard,
            "steps": 0 if link is None else link.num_steps,
        }

    def stats(self) -> dict[str, Any]:
        """Counts and gauges of all schedulers together, of each serving worker's, and of requests here."""
        workers = {link.worker_id: self._worker_stats(link) for link in self._serving()}
        lost = [] if self._lost_counts is None else [self._lost_counts]
        return {
            **total(workers.values(), lost),
            "requests": dict(self._counts),
            "unfinished": len(self._open),
            "workers": workers,
        }

    def _worker_stats(self, link: WorkerLink) -> dict[str, Any]:
        return {
            **link.scheduler.snapshot(),
            "device": link.info.device,
            "dtype": link.info.dtype,
            "epoch": link.epoch,
            "losses": self._slots[link.worker_id].num_losses,
        }
