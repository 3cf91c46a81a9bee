"""Makes every decision of a recording again, and compares.

The schedulers and the router are the plain ones of production, fed with recorded calls, times and results of workers.
A difference means that a decision rested on something that is not in its inputs, or that the code has changed since.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from octavo.cluster.recording import hash_events
from octavo.cluster.worker_link import scheduler_config
from octavo.protos import codec, recording_pb2, worker_pb2
from octavo.protos.errors import InvalidRequestError, OctavoError
from octavo.protos.types import Int32Array
from octavo.scheduler.events import Event, Finished, TokensOut
from octavo.scheduler.router import Routed, Router
from octavo.scheduler.scheduler import Scheduler
from octavo.scheduler.step_time import StepTimeModel

DIFFERENCES_MAX = 10


@dataclass(slots=True)
class LiveRequest:
    """What became of one request of the recording. Seconds on the coordinator's clock; -1 where there is none."""

    at_seconds: float
    prompt_token_ids: Int32Array
    num_output_tokens: int = 0
    """Of its longest branch."""
    predicted_ttft_seconds: float = -1.0
    ttft_seconds: float = -1.0
    total_seconds: float = -1.0


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """Of one worker: what a step computed, and how long that took."""

    num_tokens: int
    num_rows: int
    context_tokens: int
    ended_at: float
    """By the coordinator's clock."""
    seconds: float
    """As the coordinator saw it: from its plan, or from the result before, to its own result. What lies between two
    steps counts as well, as it does for a client."""


@dataclass(slots=True)
class Replay:
    """What a recording holds, and how much of it came out the same."""

    num_steps: int = 0
    num_steps_same: int = 0
    num_routed: int = 0
    num_routed_same: int = 0
    num_others: int = 0
    """Results, ends from outside and looks at the clock; each with what it caused."""
    num_others_same: int = 0
    num_coordinators: int = 0
    differences: list[str] = field(default_factory=list)
    """The first few, in words."""
    requests: dict[str, LiveRequest] = field(default_factory=dict)
    """In order of arrival."""
    steps: list[MeasuredStep] = field(default_factory=list)
    schedulers: list[Scheduler] = field(default_factory=list)
    """Of the last coordinator, as they stood at the end."""
    router_policy: str = ""
    """Of the last coordinator."""

    @property
    def same(self) -> bool:
        return not self.differences

    def differs(self, what: str) -> None:
        if len(self.differences) < DIFFERENCES_MAX:
            self.differences.append(what)


def replay(records: Iterable[recording_pb2.Record]) -> Replay:
    """Raises `InvalidRequestError` for records that do not follow one another."""
    found = Replay()
    player: _Player | None = None
    for record in records:
        kind = record.WhichOneof("call")
        if kind == "started":
            player = _Player(found, record.started)
        elif player is None:
            raise InvalidRequestError("a recording begins with a coordinator's start", param="recording")
        else:
            try:
                player.play(kind, getattr(record, kind))
            except IndexError:
                raise InvalidRequestError(
                    f"the recording's {kind} names a worker that has not joined", param="recording"
                ) from None
    return found


class _Player:
    """One life of a coordinator."""

    def __init__(self, found: Replay, started: recording_pb2.Started) -> None:
        self._found = found
        found.num_coordinators += 1
        found.schedulers, found.router_policy = [], started.router_policy
        self._ids: list[str] = []
        self._options = json.loads(started.scheduler_options)
        self._router = Router(started.router_seed, policy=started.router_policy)
        self._plans: dict[tuple[int, int], tuple[worker_pb2.StepPlan, float]] = {}
        """In flight, by scheduler and step, each with when it was made."""
        self._last_result: dict[int, float] = {}
        """When each scheduler got its last result."""

    def play(self, kind: str, call: object) -> None:
        getattr(self, f"_{kind}")(call)

    def _joined(self, call: recording_pb2.Joined) -> None:
        info = codec.decode_worker_info(call.info)
        config = scheduler_config(info, call.epoch, self._options)
        self._ids.append(info.worker_id)
        self._found.schedulers.append(Scheduler(config, StepTimeModel.of_worker(info)))

    def _adopted(self, call: recording_pb2.Adopted) -> None:
        self._found.schedulers[call.scheduler].adopt(map(codec.decode_cached_prefix, call.prefixes))

    def _routed(self, call: recording_pb2.Routed) -> None:
        request, resume = codec.decode_resume(call.request)
        workers = {self._ids[number]: self._found.schedulers[number] for number in call.schedulers}
        events: list[Event] = []
        try:
            outcome, events = self._router.route(request, workers, call.now, resume if call.resumed else None)
        except OctavoError as error:
            outcome = type(error).__name__
        same = (outcome, hash_events(events)) == (call.outcome, call.events)
        self._found.num_routed += 1
        self._found.num_routed_same += same
        if not same:
            self._found.differs(
                f"request {request.request_id} at {call.now:.6f} s: recorded {call.outcome}, now {outcome}"
                + ("" if outcome != call.outcome else ", for other scores")
            )
        if events and not call.resumed:
            one = LiveRequest(call.now, request.prompt_token_ids)
            for event in events:
                if isinstance(event, Routed):
                    one.predicted_ttft_seconds = event.scores[0].ttft_seconds
            self._found.requests[request.request_id] = one

    def _planned(self, call: recording_pb2.Planned) -> None:
        scheduler = self._found.schedulers[call.scheduler]
        plan = scheduler.plan(call.now)
        recorded = call.plan if call.HasField("plan") else None
        now = None if plan is None else codec.encode_plan(plan)
        if recorded is None and now is None:
            return
        same = recorded == now
        self._found.num_steps += 1
        self._found.num_steps_same += same
        if not same:
            names = _fields_that_differ(recorded, now)
            self._found.differs(
                f"step of {self._ids[call.scheduler]} at {call.now:.6f} s: {', '.join(names)} differ"
            )
        if now is not None:
            self._plans[call.scheduler, now.step_id] = now, call.now

    def _committed(self, call: recording_pb2.Committed) -> None:
        result = codec.decode_result(call.result)
        found = self._plans.pop((call.scheduler, result.step_id), None)
        if found is not None:
            plan, began = (
                codec.decode_plan(found[0]),
                max(found[1], self._last_result.get(call.scheduler, 0.0)),
            )
            seconds = call.now - began - result.parts_seconds.get("swap", 0.0)
            if len(plan.rows) and seconds > 0:
                tokens = plan.num_scheduled_tokens
                context = int(plan.start_positions.sum()) + tokens
                self._found.steps.append(MeasuredStep(tokens, len(plan.rows), context, call.now, seconds))
        self._last_result[call.scheduler] = call.now
        self._others(
            call.events,
            lambda: self._found.schedulers[call.scheduler].commit(result, call.now),
            f"step {result.step_id} of {self._ids[call.scheduler]} at {call.now:.6f} s",
        )

    def _expired(self, call: recording_pb2.Expired) -> None:
        self._others(
            call.events,
            lambda: self._found.schedulers[call.scheduler].expire(call.now),
            f"requests of {self._ids[call.scheduler]} past their time at {call.now:.6f} s",
        )

    def _aborted(self, call: recording_pb2.Aborted) -> None:
        scheduler = self._found.schedulers[call.scheduler]

        def go() -> list[Event]:
            if call.HasField("branch"):
                return scheduler.abort_branch(call.request_id, call.branch, call.now)
            return scheduler.abort(call.request_id, call.now)

        self._others(call.events, go, f"end of request {call.request_id} at {call.now:.6f} s")

    def _others(self, recorded: int, call: Callable[[], list[Event]], what: str) -> None:
        try:
            events = call()
        except OctavoError as error:
            events = []
            self._found.differs(f"{what}: {error.message}")
        same = hash_events(events) == recorded
        self._found.num_others += 1
        self._found.num_others_same += same
        if not same:
            self._found.differs(f"{what}: other events")
        self._take(events)

    def _take(self, events: Sequence[Event]) -> None:
        for event in events:
            one = self._found.requests.get(event.request_id)
            if one is None:
                continue
            if isinstance(event, TokensOut):
                one.num_output_tokens = max(one.num_output_tokens, event.offset + len(event.token_ids))
                if event.metrics is not None:
                    one.ttft_seconds = event.metrics.ttft_seconds
            elif isinstance(event, Finished) and event.metrics is not None:
                one.total_seconds = event.metrics.total_seconds


def _fields_that_differ(one: worker_pb2.StepPlan | None, other: worker_pb2.StepPlan | None) -> list[str]:
    if one is None or other is None:
        return ["whether there is one"]
    names = [field.name for field in worker_pb2.StepPlan.DESCRIPTOR.fields]
    return [name for name in names if getattr(one, name) != getattr(other, name)]
