"""Routes requests to workers and outputs to ingresses: the coordinator without Ray and without gRPC servers.

Owns which worker runs what. Plain asyncio on one loop; nothing here waits for a worker or an ingress. Workers
announce themselves until somebody attaches, and ingresses resume what they have open, so that this process may be
restarted at any time: whoever comes to life first, the others find it. A worker that is lost takes no request along:
each goes on elsewhere from what its caller has got (`delivered.py`), or waits here for a worker.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.cluster import live, worker_slot
from octavo.cluster.backend import HealthReport
from octavo.cluster.cluster_stats import total
from octavo.cluster.coordinator_config import CoordinatorConfig
from octavo.cluster.departures import Departures
from octavo.cluster.forking import TokensSoFar, not_running
from octavo.cluster.grammar_room import GrammarRoom
from octavo.cluster.guards import Guards
from octavo.cluster.metrics.router_meter import RouterMeter
from octavo.cluster.open_requests import IngressSink, OpenRequest, OpenRequests
from octavo.cluster.recording import RecordedRouter, RecordedScheduler, Recorder
from octavo.cluster.timeline import Timelines
from octavo.cluster.waiting_room import WaitingRoom
from octavo.cluster.worker_link import WorkerLink, scheduler_config
from octavo.cluster.worker_slot import WorkerSlot
from octavo.protos.errors import (
    ConfigError,
    InvalidRequestError,
    OctavoError,
    OverloadedError,
    UnavailableError,
    WorkerLostError,
)
from octavo.protos.structured_output import StructuredOutput
from octavo.protos.types import FinishReason, ModelInfo, Request, Resume, WorkerInfo
from octavo.scheduler.autoscaling import FleetLoad
from octavo.scheduler.events import Event
from octavo.scheduler.router import Router
from octavo.scheduler.scheduler import Scheduler
from octavo.scheduler.step_time import StepTimeModel

if TYPE_CHECKING:
    from octavo.cluster.tracing import RequestTracer

logger = logging.getLogger(__name__)

RETRY_AFTER_SECONDS = 1.0
LOSSES_MAX = 3
"""Workers that a request may be lost with without making a token in between: then it may be the reason, and ends."""
SETTLE_SECONDS = 1.0
"""After the first worker has joined: requests that wait go to all that join in this time, not all to the first."""


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
        self._slots = {worker_id: WorkerSlot(worker_id) for worker_id in config.worker_ids}
        self._tracer = None if config.otlp_endpoint is None else _otlp_tracer(config.otlp_endpoint)
        self._timelines = Timelines(clock, on_end=None if self._tracer is None else self._tracer.on_end)
        self._requests = OpenRequests(clock, on_end=self._timelines.end)
        self._recorder: Recorder | None = None
        self._departures = Departures(self._slots, self._requests, clock=clock, end_process=on_stuck)
        self._router = Router(config.seed, policy=config.router_policy)
        if config.recording is not None:
            self._recorder = Recorder(Path(config.recording))
            self._recorder.start(config.seed, config.router_policy, config.scheduler_options)
            self._router = RecordedRouter(self._recorder, config.seed, policy=config.router_policy)
        self._router_meter = RouterMeter()
        self._guards = Guards(
            config.setup_advice, prefix_cache=bool(config.scheduler_options.get("prefix_cache", True))
        )
        self._draining = False
        self._settled = False
        """Whether the workers that joined after there was none may get what waits."""
        self._num_moved = 0
        self._grammars = GrammarRoom(self._slots, on_ready=self._place_waiting)
        self._waiting = WaitingRoom(config.worker_wait_seconds, clock, self._requests.fail)
        self._lost_counts: dict[str, Any] | None = None
        """What the schedulers of lost workers had counted."""

    # --- workers -------------------------------------------------------------------------------------------

    def announce(self, worker_id: str, address: str, node_id: str | None = None) -> None:
        """A worker that nobody is attached to says where it is. Attaches, unless that is under way, or its node is
        about to go.

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
        slot.node_id = node_id
        if self._departures.refuses(slot):
            return
        if slot.leaving is not None:
            slot.leaving.cancel()
            slot.leaving = None
        slot.address = address
        slot.task = asyncio.create_task(self._attend(slot, address))

    async def _attend(self, slot: WorkerSlot, address: str) -> None:
        worker_id, previous = slot.worker_id, slot.link
        if previous is not None:
            self._on_lost(previous, WorkerLostError(f"worker {worker_id} was restarted"))
            self._keep_counts(previous)
        self._epoch += 1
        link = WorkerLink(
            worker_id,
            address,
            self._epoch,
            make_scheduler=self._make_scheduler,
            deliver=lambda deltas: self._requests.deliver(deltas, link),
            clock=self._clock,
            lease_seconds=self.config.lease_seconds,
            observe=lambda events: self._observe(events, worker_id),
            access=self.config.access,
            keepalive_seconds=self.config.keepalive_seconds,
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

    def _observe(self, events: Sequence[Event], worker_id: str) -> None:
        self._timelines.observe(events, worker_id)
        self._guards.on_events(events, self._clock())

    def _make_scheduler(self, info: WorkerInfo, epoch: int) -> Scheduler:
        if self.model is None:
            self.model = info.model
        elif info.model != self.model:
            raise ConfigError(f"worker {info.worker_id} serves {info.model.name}, not {self.model.name}")
        slot = self._slots[info.worker_id]
        slot.ever_served = True
        slot.detail = ""
        loop = asyncio.get_running_loop()
        if not self._schedulers():
            self._settled = False
            loop.call_later(SETTLE_SECONDS, self._settle)
        # Once this returns the link serves.
        loop.call_soon(self._place_waiting)
        options = dict(self.config.scheduler_options)
        limits, step_time = scheduler_config(info, epoch, options), StepTimeModel.of_worker(info)
        if self._recorder is None:
            return Scheduler(limits, step_time)
        return RecordedScheduler(self._recorder, self._recorder.join(info, epoch), limits, step_time)

    def _on_lost(self, link: WorkerLink, error: OctavoError) -> None:
        """The requests of a lost worker go on elsewhere."""
        if not isinstance(error, WorkerLostError):
            error = WorkerLostError(f"worker {link.worker_id}: {error.message}")
        for entry in self._requests:
            if entry.link is not link:
                continue
            entry.on_loss()
            if entry.num_losses > LOSSES_MAX:
                self._requests.fail(entry, error)
            else:
                self._num_moved += 1
                self._timelines.on_migration(
                    entry.request.request_id, error.message, from_worker=link.worker_id
                )
                self._waiting.enter(entry)
        self._place_waiting()

    def _settle(self) -> None:
        self._settled = True
        self._place_waiting()

    def _place_waiting(self) -> None:
        """Give what waits to the workers that serve, unless more of them are about to join."""
        schedulers = self._schedulers()
        if not schedulers or not (self._settled or len(schedulers) == len(self.expected_workers)):
            return
        now = self._clock()
        for entry in self._waiting.take_all():
            if self._requests.get(entry.request.request_id) is not entry:
                continue
            ready = self._with_grammar(entry.request, schedulers)
            if not ready:
                self._waiting.enter(entry)
                continue
            try:
                resume = entry.so_far.resume(now)
                self._check_ids(entry.request, resume)
                worker_id, events = self._router.route(entry.request, ready, now, resume)
            except OctavoError as error:
                self._requests.fail(entry, error)
                continue
            self._on_routed(events, worker_id)
            self._put(entry, worker_id)

    def _with_grammar(self, request: Request, schedulers: dict[str, Scheduler]) -> dict[str, Scheduler]:
        """Of `schedulers` those whose worker has what the request's output must match."""
        wanted = request.params.structured_output
        if wanted is None:
            return schedulers
        return {name: schedulers[name] for name in self._grammars.having(wanted, schedulers)}

    def _keep_counts(self, link: WorkerLink) -> None:
        if link.attached_once:
            lost = [] if self._lost_counts is None else [self._lost_counts]
            self._lost_counts = total((), [*lost, link.scheduler.snapshot()])

    def _schedulers(self) -> dict[str, Scheduler]:
        """Of the workers that take requests, by id."""
        return {
            slot.worker_id: slot.link.scheduler
            for slot in self._slots.values()
            if slot.link is not None and slot.takes_requests
        }

    def _on_routed(self, events: list[Event], worker_id: str) -> None:
        self._timelines.observe(events, worker_id)
        self._router_meter.observe(events)

    def _put(self, entry: OpenRequest, worker_id: str) -> None:
        """Its scheduler has it; now it is known to run there."""
        link = self._slots[worker_id].link
        assert link is not None
        entry.link = link
        link.wake()

    @property
    def expected_workers(self) -> list[str]:
        """Those that should be there."""
        return [slot.worker_id for slot in self._slots.values() if not slot.retiring]

    async def expect(self, worker_ids: Collection[str], grace_seconds: float = 0.0) -> None:
        """See `Departures.expect`."""
        await self._departures.expect(worker_ids, grace_seconds)

    def leave_nodes(self, nodes: Mapping[str, float]) -> None:
        """See `Departures.leave_nodes`."""
        self._departures.leave_nodes(nodes)

    # --- requests ------------------------------------------------------------------------------------------

    def submit(self, request: Request, sink: IngressSink) -> None:
        """Accept a request: from now on `sink` gets its deltas, the last with `request_finished`.

        Raises an `OctavoError`, and then nothing follows, for one that is refused.
        """
        try:
            self._check(request)
            self._check_ids(request, Resume())
            schedulers = self._schedulers()
            # Without a front door nobody has asked for its grammar; then its first step waits for it.
            ready = self._with_grammar(request, schedulers) or schedulers
            worker_id, events = self._router.route(request, ready, self._clock())
        except OctavoError:
            self._requests.counts["rejected"] += 1
            raise
        self._on_routed(events, worker_id)
        self._guards.on_request(request)
        self._put(self._open(request, sink), worker_id)

    def resume(self, request: Request, resume: Resume, sink: IngressSink) -> None:
        """Go on with a request that was accepted before, by whoever was coordinator then. It may wait for a worker.

        Raises as `submit`, but never for load.
        """
        try:
            self._check_open(request)
        except OctavoError:
            self._requests.counts["rejected"] += 1
            raise
        self._num_moved += 1
        self._timelines.on_migration(
            request.request_id,
            "its stream or its coordinator was lost",
            age_seconds=resume.metrics.total_seconds if resume.metrics else 0.0,
        )
        self._waiting.enter(self._open(request, sink, resume))
        self._place_waiting()

    def _open(self, request: Request, sink: IngressSink, resume: Resume | None = None) -> OpenRequest:
        if self._tracer is not None:
            self._tracer.on_open(request)
        return self._requests.open(request, sink, resume)

    def _check_open(self, request: Request) -> None:
        if self._draining:
            raise UnavailableError("the server is shutting down and takes no new requests")
        if self._requests.get(request.request_id) is not None:
            raise InvalidRequestError(f"request id {request.request_id!r} is in use", param="request_id")

    def _check(self, request: Request) -> None:
        self._check_open(request)
        if not self._schedulers():
            raise UnavailableError("no worker is ready; try again in a few seconds")
        if len(self._requests) >= self.config.unfinished_requests_max:
            raise OverloadedError(
                f"{len(self._requests)} requests are unfinished; the limit is "
                f"{self.config.unfinished_requests_max}",
                retry_after_seconds=RETRY_AFTER_SECONDS,
            )

    def _check_ids(self, request: Request, resume: Resume) -> None:
        """The front door checks this too; a worker must never see an id outside its embedding."""
        assert self.model is not None, "a serving worker has said which"
        vocab_size = self.model.vocab_size
        request.params.check_vocab(vocab_size)
        known = [request.prompt_token_ids, *(branch.token_ids for branch in resume.branches)]
        if any(((token_ids < 0) | (token_ids >= vocab_size)).any() for token_ids in known):
            raise InvalidRequestError(f"prompt token ids must be in [0, {vocab_size - 1}]", param="prompt")

    def tokens(self, request_id: str, branch: int) -> TokensSoFar:
        """Where one branch of an unfinished request stands, for any ingress: who knows an id may go on from it.

        Raises as `Backend.tokens`, and `UnavailableError` while the request waits for a worker.
        """
        entry = self._requests.get(request_id)
        if entry is None:
            raise not_running(request_id)
        if entry.link is None:
            raise UnavailableError(f"request {request_id!r} waits for a worker; try again in a few seconds")
        return entry.link.tokens(request_id, branch)

    async def compile_grammar(self, wanted: StructuredOutput) -> None:
        """See `GrammarRoom.compile`."""
        await self._grammars.compile(wanted)

    def timeline(self, request_id: str) -> dict[str, Any]:
        """See `Timelines.describe`."""
        return self._timelines.describe(request_id)

    def abort(self, request_id: str, sink: IngressSink) -> None:
        """End a request of `sink` without a reply. One that has ended, or is another's, is left alone."""
        entry = self._requests.get(request_id)
        if entry is not None and entry.sink is sink:
            self._requests.abort(entry)

    def stop_branch(self, request_id: str, branch: int, sink: IngressSink) -> None:
        """End one branch of a request of `sink`, whose text is complete; `sink` gets that branch's last delta. One
        that has ended, or is another's, is left alone."""
        entry = self._requests.get(request_id)
        if entry is None or entry.sink is not sink:
            return
        if entry.link is not None:
            self._requests.deliver(entry.link.stop_branch(request_id, branch), entry.link)
        elif entry.so_far.num_outputs:
            self._requests.deliver(entry.so_far.end(FinishReason.STOP, self._clock(), branch=branch), None)

    def detach(self, sink: IngressSink) -> None:
        """The ingress is gone: end all its requests."""
        for entry in self._requests:
            if entry.sink is sink:
                self._requests.abort(entry)

    # --- life ----------------------------------------------------------------------------------------------

    async def drain(self, grace_seconds: float) -> int:
        """Refuse new requests and wait for the unfinished, `grace_seconds` at most; the rest end with an error.

        Returns how many did not finish by themselves.
        """
        self._draining = True
        try:
            async with asyncio.timeout(grace_seconds):
                await self._requests.idle.wait()
        except TimeoutError:
            logger.warning("%d requests did not finish within %g s", len(self._requests), grace_seconds)
        left = len(self._requests)
        for entry in self._requests:
            self._requests.fail(entry, UnavailableError("the server shut down"))
        return left

    async def close(self) -> None:
        """End every worker stream. Workers finish their running step and wait for the next epoch."""
        tasks = [
            task for slot in self._slots.values() for task in (slot.leaving, slot.task) if task is not None
        ]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._grammars.close()
        self._waiting.close()
        if self._recorder is not None:
            self._recorder.close()
        if self._tracer is not None:
            # It waits for the collector.
            await asyncio.to_thread(self._tracer.close)

    # --- what can be asked ---------------------------------------------------------------------------------

    @property
    def num_unfinished(self) -> int:
        return len(self._requests)

    def load(self) -> FleetLoad:
        """For the autoscaling policy."""
        totals = self._totals()
        schedulers = self._schedulers()
        return FleetLoad.of(
            self._router.outlook(schedulers),
            num_expected=len(self.expected_workers),
            num_serving=len(schedulers),
            prompt_tokens=totals["scheduled_tokens"] - totals["sampled_tokens"],
            preemptions=sum(totals["preemptions"].values()) if totals["preemptions"] else 0,
        )

    def _totals(self) -> dict[str, Any]:
        """Of all workers together, lost ones included."""
        live = [slot.link.scheduler.snapshot() for slot in self._slots.values() if slot.link and slot.serving]
        return total(live, [] if self._lost_counts is None else [self._lost_counts])

    def health(self) -> HealthReport:
        """Never waits for anything."""
        return worker_slot.report(
            self._slots.values(),
            draining=self._draining,
            num_unfinished=len(self._requests),
            advice=self._guards.look(self._schedulers(), self._clock()),
        )

    def live(self) -> dict[str, Any]:
        """See `live.py`."""
        workers: list[dict[str, Any]] = []
        for slot in self._slots.values():
            told = slot.health()
            if slot.link is not None and slot.serving and len(workers) < live.WORKERS_MAX:
                told |= live.describe_worker(slot.link.scheduler, slot.link.last_steps)
            workers.append(told)
        return {
            **live.told_of(self.stats()),
            "advice": [one.as_dict() for one in self.health().advice],
            "workers": workers,
            "requests": self._timelines.latest(),
        }

    def stats(self) -> dict[str, Any]:
        """Counts and gauges of all schedulers together, of each serving worker's, and of requests here."""
        workers = {slot.worker_id: slot.stats() for slot in self._slots.values() if slot.serving}
        lost = [] if self._lost_counts is None else [self._lost_counts]
        return {
            **total(workers.values(), lost),
            "requests": dict(self._requests.counts),
            "request_errors": dict(self._requests.errors),
            "unfinished": len(self._requests),
            "moved": self._num_moved,
            "preemptions_last_minute": self._guards.num_preempted(self._clock()),
            "without_worker": sum(entry.link is None for entry in self._requests),
            "router": {**self._router_meter.snapshot(), "index_bytes": self._router.index_bytes},
            "worker_statuses": worker_slot.count_by_status(self._slots.values()),
            "worker_losses": {slot.worker_id: slot.num_losses for slot in self._slots.values()},
            "workers": workers,
        }


def _otlp_tracer(endpoint: str) -> RequestTracer:
    """OpenTelemetry is imported by whoever wants traces. Raises `ConfigError` where it is not installed."""
    from octavo.cluster.tracing import otlp_tracer

    return otlp_tracer(endpoint)
