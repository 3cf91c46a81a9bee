"""Writes down what a coordinator was asked and what it decided, so that every decision can be made again.

A `RecordedRouter` and `RecordedScheduler`s stand where the plain ones would; they decide nothing themselves. Schedulers
are deterministic and see no clock of their own, so the calls with their times and the workers' results are all it takes
(`replay.py`). One coordinator, one file; one that is restarted goes on in the same file, after a new `Started`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

import xxhash
from google.protobuf import proto
from google.protobuf.message import DecodeError

from octavo._version import __version__
from octavo.protos import codec, recording_pb2
from octavo.protos.errors import InvalidRequestError, OctavoError
from octavo.protos.types import CachedPrefix, FinishReason, Request, Resume, StepPlan, StepResult, WorkerInfo
from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.events import Event
from octavo.scheduler.router import Router
from octavo.scheduler.scheduler import Scheduler
from octavo.scheduler.step_time import StepTimeModel

logger = logging.getLogger(__name__)

FIRST_LINE = b"octavo recording 1\n"


def hash_events(events: Sequence[Event]) -> int:
    """64 bits over all fields of all events, in order; 0 for none."""
    return xxhash.xxh3_64_intdigest(repr(events).encode()) if events else 0


class Recorder:
    """Appends to one file. A file that can no longer be written ends the recording, never what is recorded."""

    def __init__(self, path: Path) -> None:
        """Raises `OSError`."""
        self._file: BinaryIO | None = path.open("ab")
        if self._file.tell() == 0:
            self._file.write(FIRST_LINE)
        self._num_schedulers = 0

    def start(self, router_seed: int, router_policy: str, scheduler_options: Mapping[str, Any]) -> None:
        """A coordinator begins."""
        self._num_schedulers = 0
        started = recording_pb2.Started(
            octavo_version=__version__,
            router_seed=router_seed,
            router_policy=router_policy,
            scheduler_options=json.dumps(dict(scheduler_options)),
        )
        self.write(recording_pb2.Record(started=started))

    def join(self, info: WorkerInfo, epoch: int) -> int:
        """A worker joins; the number of its scheduler."""
        joined = recording_pb2.Joined(info=codec.encode_worker_info(info), epoch=epoch)
        self.write(recording_pb2.Record(joined=joined))
        self._num_schedulers += 1
        return self._num_schedulers - 1

    def write(self, record: recording_pb2.Record, *, flush: bool = False) -> None:
        """`flush`: there is time for it."""
        if self._file is None:
            return
        try:
            proto.serialize_length_prefixed(record, self._file)
            if flush:
                self._file.flush()
        except OSError as error:
            logger.error("the recording ends here: %s", error)
            self._file = None

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class RecordedRouter(Router):
    """Routes between `RecordedScheduler`s."""

    def __init__(self, recorder: Recorder, seed: int, *, policy: str) -> None:
        super().__init__(seed, policy=policy)
        self._recorder = recorder

    def route(
        self,
        request: Request,
        workers: Mapping[str, Scheduler],
        now: float,
        resume: Resume | None = None,
    ) -> tuple[str, list[Event]]:
        outcome = ""
        events: list[Event] = []
        try:
            outcome, events = super().route(request, workers, now, resume)
            return outcome, events
        except OctavoError as error:
            outcome = type(error).__name__
            raise
        finally:
            routed = recording_pb2.Routed(
                now=now,
                request=codec.encode_resume(request, resume or Resume()),
                resumed=resume is not None,
                schedulers=[cast(RecordedScheduler, one).number for one in workers.values()],
                outcome=outcome,
                events=hash_events(events),
            )
            self._recorder.write(recording_pb2.Record(routed=routed))


class RecordedScheduler(Scheduler):
    """`add` is the router's to record."""

    def __init__(
        self, recorder: Recorder, number: int, config: SchedulerConfig, step_time: StepTimeModel
    ) -> None:
        super().__init__(config, step_time)
        self.number = number
        self._recorder = recorder

    def adopt(self, prefixes: Iterable[CachedPrefix]) -> int:
        prefixes = list(prefixes)
        adopted = recording_pb2.Adopted(
            scheduler=self.number, prefixes=map(codec.encode_cached_prefix, prefixes)
        )
        self._recorder.write(recording_pb2.Record(adopted=adopted))
        return super().adopt(prefixes)

    def plan(self, now: float) -> StepPlan | None:
        plan = super().plan(now)
        planned = recording_pb2.Planned(
            scheduler=self.number, now=now, plan=None if plan is None else codec.encode_plan(plan)
        )
        # Without a plan the worker is idle, or has enough to do.
        self._recorder.write(recording_pb2.Record(planned=planned), flush=plan is None)
        return plan

    def commit(self, result: StepResult, now: float) -> list[Event]:
        events = super().commit(result, now)
        committed = recording_pb2.Committed(
            scheduler=self.number, now=now, result=codec.encode_result(result), events=hash_events(events)
        )
        self._recorder.write(recording_pb2.Record(committed=committed))
        return events

    def expire(self, now: float) -> list[Event]:
        events = super().expire(now)
        expired = recording_pb2.Expired(scheduler=self.number, now=now, events=hash_events(events))
        self._recorder.write(recording_pb2.Record(expired=expired))
        return events

    def abort(self, request_id: str, now: float, reason: FinishReason = FinishReason.ABORT) -> list[Event]:
        assert reason is FinishReason.ABORT, "a coordinator ends requests for no other reason"
        events = super().abort(request_id, now)
        self._record_abort(request_id, None, now, events)
        return events

    def abort_branch(self, request_id: str, branch: int, now: float) -> list[Event]:
        events = super().abort_branch(request_id, branch, now)
        self._record_abort(request_id, branch, now, events)
        return events

    def _record_abort(self, request_id: str, branch: int | None, now: float, events: list[Event]) -> None:
        aborted = recording_pb2.Aborted(
            scheduler=self.number, now=now, request_id=request_id, branch=branch, events=hash_events(events)
        )
        self._recorder.write(recording_pb2.Record(aborted=aborted))


def is_recording(path: Path) -> bool:
    """Whether the file begins as a recording does. Raises `OSError`."""
    with path.open("rb") as file:
        return file.read(len(FIRST_LINE)) == FIRST_LINE


def read_recording(path: Path) -> Iterator[recording_pb2.Record]:
    """All records that were written whole: a coordinator that was killed leaves half a one at the end.

    Raises `InvalidRequestError` for a file that is none.
    """
    try:
        with path.open("rb") as file:
            if file.readline() != FIRST_LINE:
                raise InvalidRequestError(f"{path} is no recording of this version", param="recording")
            while True:
                try:
                    record = proto.parse_length_prefixed(recording_pb2.Record, file)
                except (DecodeError, ValueError):
                    return
                if record is None:
                    return
                yield record
    except OSError as error:
        raise InvalidRequestError(f"{path} cannot be read: {error}", param="recording") from None
