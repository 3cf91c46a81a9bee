from octavo.protos import coordinator_pb2 as _coordinator_pb2
from octavo.protos import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Record(_message.Message):
    __slots__ = ("started", "joined", "adopted", "routed", "planned", "committed", "expired", "aborted")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    JOINED_FIELD_NUMBER: _ClassVar[int]
    ADOPTED_FIELD_NUMBER: _ClassVar[int]
    ROUTED_FIELD_NUMBER: _ClassVar[int]
    PLANNED_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    EXPIRED_FIELD_NUMBER: _ClassVar[int]
    ABORTED_FIELD_NUMBER: _ClassVar[int]
    started: Started
    joined: Joined
    adopted: Adopted
    routed: Routed
    planned: Planned
    committed: Committed
    expired: Expired
    aborted: Aborted
    def __init__(self, started: _Optional[_Union[Started, _Mapping]] = ..., joined: _Optional[_Union[Joined, _Mapping]] = ..., adopted: _Optional[_Union[Adopted, _Mapping]] = ..., routed: _Optional[_Union[Routed, _Mapping]] = ..., planned: _Optional[_Union[Planned, _Mapping]] = ..., committed: _Optional[_Union[Committed, _Mapping]] = ..., expired: _Optional[_Union[Expired, _Mapping]] = ..., aborted: _Optional[_Union[Aborted, _Mapping]] = ...) -> None: ...

class Started(_message.Message):
    __slots__ = ("octavo_version", "router_seed", "router_policy", "scheduler_options")
    OCTAVO_VERSION_FIELD_NUMBER: _ClassVar[int]
    ROUTER_SEED_FIELD_NUMBER: _ClassVar[int]
    ROUTER_POLICY_FIELD_NUMBER: _ClassVar[int]
    SCHEDULER_OPTIONS_FIELD_NUMBER: _ClassVar[int]
    octavo_version: str
    router_seed: int
    router_policy: str
    scheduler_options: str
    def __init__(self, octavo_version: _Optional[str] = ..., router_seed: _Optional[int] = ..., router_policy: _Optional[str] = ..., scheduler_options: _Optional[str] = ...) -> None: ...

class Joined(_message.Message):
    __slots__ = ("info", "epoch")
    INFO_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    info: _worker_pb2.WorkerInfo
    epoch: int
    def __init__(self, info: _Optional[_Union[_worker_pb2.WorkerInfo, _Mapping]] = ..., epoch: _Optional[int] = ...) -> None: ...

class Adopted(_message.Message):
    __slots__ = ("scheduler", "prefixes")
    SCHEDULER_FIELD_NUMBER: _ClassVar[int]
    PREFIXES_FIELD_NUMBER: _ClassVar[int]
    scheduler: int
    prefixes: _containers.RepeatedCompositeFieldContainer[_worker_pb2.CachedPrefix]
    def __init__(self, scheduler: _Optional[int] = ..., prefixes: _Optional[_Iterable[_Union[_worker_pb2.CachedPrefix, _Mapping]]] = ...) -> None: ...

class Routed(_message.Message):
    __slots__ = ("now", "request", "resumed", "schedulers", "outcome", "events")
    NOW_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    RESUMED_FIELD_NUMBER: _ClassVar[int]
    SCHEDULERS_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    now: float
    request: _coordinator_pb2.ResumeRequest
    resumed: bool
    schedulers: _containers.RepeatedScalarFieldContainer[int]
    outcome: str
    events: int
    def __init__(self, now: _Optional[float] = ..., request: _Optional[_Union[_coordinator_pb2.ResumeRequest, _Mapping]] = ..., resumed: _Optional[bool] = ..., schedulers: _Optional[_Iterable[int]] = ..., outcome: _Optional[str] = ..., events: _Optional[int] = ...) -> None: ...

class Planned(_message.Message):
    __slots__ = ("scheduler", "now", "plan")
    SCHEDULER_FIELD_NUMBER: _ClassVar[int]
    NOW_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    scheduler: int
    now: float
    plan: _worker_pb2.StepPlan
    def __init__(self, scheduler: _Optional[int] = ..., now: _Optional[float] = ..., plan: _Optional[_Union[_worker_pb2.StepPlan, _Mapping]] = ...) -> None: ...

class Committed(_message.Message):
    __slots__ = ("scheduler", "now", "result", "events")
    SCHEDULER_FIELD_NUMBER: _ClassVar[int]
    NOW_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    scheduler: int
    now: float
    result: _worker_pb2.StepResult
    events: int
    def __init__(self, scheduler: _Optional[int] = ..., now: _Optional[float] = ..., result: _Optional[_Union[_worker_pb2.StepResult, _Mapping]] = ..., events: _Optional[int] = ...) -> None: ...

class Expired(_message.Message):
    __slots__ = ("scheduler", "now", "events")
    SCHEDULER_FIELD_NUMBER: _ClassVar[int]
    NOW_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    scheduler: int
    now: float
    events: int
    def __init__(self, scheduler: _Optional[int] = ..., now: _Optional[float] = ..., events: _Optional[int] = ...) -> None: ...

class Aborted(_message.Message):
    __slots__ = ("scheduler", "now", "request_id", "branch", "events")
    SCHEDULER_FIELD_NUMBER: _ClassVar[int]
    NOW_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    BRANCH_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    scheduler: int
    now: float
    request_id: str
    branch: int
    events: int
    def __init__(self, scheduler: _Optional[int] = ..., now: _Optional[float] = ..., request_id: _Optional[str] = ..., branch: _Optional[int] = ..., events: _Optional[int] = ...) -> None: ...
