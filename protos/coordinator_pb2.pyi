from octavo.protos import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class HealthStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    HEALTH_STATUS_UNSPECIFIED: _ClassVar[HealthStatus]
    HEALTH_STATUS_LOADING: _ClassVar[HealthStatus]
    HEALTH_STATUS_READY: _ClassVar[HealthStatus]
    HEALTH_STATUS_DEGRADED: _ClassVar[HealthStatus]
    HEALTH_STATUS_DRAINING: _ClassVar[HealthStatus]
    HEALTH_STATUS_DEAD: _ClassVar[HealthStatus]
HEALTH_STATUS_UNSPECIFIED: HealthStatus
HEALTH_STATUS_LOADING: HealthStatus
HEALTH_STATUS_READY: HealthStatus
HEALTH_STATUS_DEGRADED: HealthStatus
HEALTH_STATUS_DRAINING: HealthStatus
HEALTH_STATUS_DEAD: HealthStatus

class CompileGrammarRequest(_message.Message):
    __slots__ = ("structured_output",)
    STRUCTURED_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    structured_output: _common_pb2.StructuredOutput
    def __init__(self, structured_output: _Optional[_Union[_common_pb2.StructuredOutput, _Mapping]] = ...) -> None: ...

class CompileGrammarResponse(_message.Message):
    __slots__ = ("error",)
    ERROR_FIELD_NUMBER: _ClassVar[int]
    error: _common_pb2.ErrorDetail
    def __init__(self, error: _Optional[_Union[_common_pb2.ErrorDetail, _Mapping]] = ...) -> None: ...

class ServeRequest(_message.Message):
    __slots__ = ("hello", "submit", "abort", "resume")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    hello: IngressHello
    submit: _common_pb2.Request
    abort: Abort
    resume: ResumeRequest
    def __init__(self, hello: _Optional[_Union[IngressHello, _Mapping]] = ..., submit: _Optional[_Union[_common_pb2.Request, _Mapping]] = ..., abort: _Optional[_Union[Abort, _Mapping]] = ..., resume: _Optional[_Union[ResumeRequest, _Mapping]] = ...) -> None: ...

class ServeResponse(_message.Message):
    __slots__ = ("hello", "outputs", "rejection")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    REJECTION_FIELD_NUMBER: _ClassVar[int]
    hello: CoordinatorHello
    outputs: OutputBatch
    rejection: Rejection
    def __init__(self, hello: _Optional[_Union[CoordinatorHello, _Mapping]] = ..., outputs: _Optional[_Union[OutputBatch, _Mapping]] = ..., rejection: _Optional[_Union[Rejection, _Mapping]] = ...) -> None: ...

class IngressHello(_message.Message):
    __slots__ = ("protocol_version", "ingress_id")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    INGRESS_ID_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    ingress_id: str
    def __init__(self, protocol_version: _Optional[int] = ..., ingress_id: _Optional[str] = ...) -> None: ...

class CoordinatorHello(_message.Message):
    __slots__ = ("protocol_version", "model", "unfinished_requests_max")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    UNFINISHED_REQUESTS_MAX_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    model: _common_pb2.ModelInfo
    unfinished_requests_max: int
    def __init__(self, protocol_version: _Optional[int] = ..., model: _Optional[_Union[_common_pb2.ModelInfo, _Mapping]] = ..., unfinished_requests_max: _Optional[int] = ...) -> None: ...

class ResumeRequest(_message.Message):
    __slots__ = ("request", "branches", "metrics")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    BRANCHES_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    request: _common_pb2.Request
    branches: _containers.RepeatedCompositeFieldContainer[BranchSoFar]
    metrics: RequestMetrics
    def __init__(self, request: _Optional[_Union[_common_pb2.Request, _Mapping]] = ..., branches: _Optional[_Iterable[_Union[BranchSoFar, _Mapping]]] = ..., metrics: _Optional[_Union[RequestMetrics, _Mapping]] = ...) -> None: ...

class BranchSoFar(_message.Message):
    __slots__ = ("token_ids", "finish_reason")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    token_ids: bytes
    finish_reason: _common_pb2.FinishReason
    def __init__(self, token_ids: _Optional[bytes] = ..., finish_reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ...) -> None: ...

class Abort(_message.Message):
    __slots__ = ("request_id", "reason", "branch")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    BRANCH_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    reason: str
    branch: int
    def __init__(self, request_id: _Optional[str] = ..., reason: _Optional[str] = ..., branch: _Optional[int] = ...) -> None: ...

class OutputBatch(_message.Message):
    __slots__ = ("deltas",)
    DELTAS_FIELD_NUMBER: _ClassVar[int]
    deltas: _containers.RepeatedCompositeFieldContainer[OutputDelta]
    def __init__(self, deltas: _Optional[_Iterable[_Union[OutputDelta, _Mapping]]] = ...) -> None: ...

class OutputDelta(_message.Message):
    __slots__ = ("request_id", "branch", "offset", "token_ids", "logprobs", "finish_reason", "request_finished", "error", "error_name", "metrics", "score", "prompt_logprobs")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    BRANCH_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FINISHED_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    ERROR_NAME_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    branch: int
    offset: int
    token_ids: bytes
    logprobs: _common_pb2.TokenLogprobs
    finish_reason: _common_pb2.FinishReason
    request_finished: bool
    error: str
    error_name: str
    metrics: RequestMetrics
    score: float
    prompt_logprobs: _common_pb2.PromptLogprobs
    def __init__(self, request_id: _Optional[str] = ..., branch: _Optional[int] = ..., offset: _Optional[int] = ..., token_ids: _Optional[bytes] = ..., logprobs: _Optional[_Union[_common_pb2.TokenLogprobs, _Mapping]] = ..., finish_reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., request_finished: _Optional[bool] = ..., error: _Optional[str] = ..., error_name: _Optional[str] = ..., metrics: _Optional[_Union[RequestMetrics, _Mapping]] = ..., score: _Optional[float] = ..., prompt_logprobs: _Optional[_Union[_common_pb2.PromptLogprobs, _Mapping]] = ...) -> None: ...

class RequestMetrics(_message.Message):
    __slots__ = ("cached_tokens", "num_preemptions", "queue_seconds", "ttft_seconds", "total_seconds", "recomputed_tokens")
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TTFT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    cached_tokens: int
    num_preemptions: int
    queue_seconds: float
    ttft_seconds: float
    total_seconds: float
    recomputed_tokens: int
    def __init__(self, cached_tokens: _Optional[int] = ..., num_preemptions: _Optional[int] = ..., queue_seconds: _Optional[float] = ..., ttft_seconds: _Optional[float] = ..., total_seconds: _Optional[float] = ..., recomputed_tokens: _Optional[int] = ...) -> None: ...

class Rejection(_message.Message):
    __slots__ = ("request_id", "error")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    error: _common_pb2.ErrorDetail
    def __init__(self, request_id: _Optional[str] = ..., error: _Optional[_Union[_common_pb2.ErrorDetail, _Mapping]] = ...) -> None: ...

class GetTokensRequest(_message.Message):
    __slots__ = ("request_id", "branch")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    BRANCH_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    branch: int
    def __init__(self, request_id: _Optional[str] = ..., branch: _Optional[int] = ...) -> None: ...

class GetTokensResponse(_message.Message):
    __slots__ = ("token_ids", "num_prompt_tokens", "cache_salt", "adapter", "uncached", "error")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    UNCACHED_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    token_ids: bytes
    num_prompt_tokens: int
    cache_salt: str
    adapter: str
    uncached: bool
    error: _common_pb2.ErrorDetail
    def __init__(self, token_ids: _Optional[bytes] = ..., num_prompt_tokens: _Optional[int] = ..., cache_salt: _Optional[str] = ..., adapter: _Optional[str] = ..., uncached: _Optional[bool] = ..., error: _Optional[_Union[_common_pb2.ErrorDetail, _Mapping]] = ...) -> None: ...

class GetTimelineRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class GetTimelineResponse(_message.Message):
    __slots__ = ("timeline_json", "error")
    TIMELINE_JSON_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    timeline_json: str
    error: _common_pb2.ErrorDetail
    def __init__(self, timeline_json: _Optional[str] = ..., error: _Optional[_Union[_common_pb2.ErrorDetail, _Mapping]] = ...) -> None: ...

class GetLiveRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetLiveResponse(_message.Message):
    __slots__ = ("live_json",)
    LIVE_JSON_FIELD_NUMBER: _ClassVar[int]
    live_json: str
    def __init__(self, live_json: _Optional[str] = ...) -> None: ...

class GetStatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatsResponse(_message.Message):
    __slots__ = ("stats_json",)
    STATS_JSON_FIELD_NUMBER: _ClassVar[int]
    stats_json: str
    def __init__(self, stats_json: _Optional[str] = ...) -> None: ...

class GetHealthRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetHealthResponse(_message.Message):
    __slots__ = ("status", "detail", "workers", "advice")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    ADVICE_FIELD_NUMBER: _ClassVar[int]
    status: HealthStatus
    detail: str
    workers: _containers.RepeatedCompositeFieldContainer[WorkerHealth]
    advice: _containers.RepeatedCompositeFieldContainer[Advice]
    def __init__(self, status: _Optional[_Union[HealthStatus, str]] = ..., detail: _Optional[str] = ..., workers: _Optional[_Iterable[_Union[WorkerHealth, _Mapping]]] = ..., advice: _Optional[_Iterable[_Union[Advice, _Mapping]]] = ...) -> None: ...

class Advice(_message.Message):
    __slots__ = ("code", "reason", "remedy")
    CODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    REMEDY_FIELD_NUMBER: _ClassVar[int]
    code: str
    reason: str
    remedy: str
    def __init__(self, code: _Optional[str] = ..., reason: _Optional[str] = ..., remedy: _Optional[str] = ...) -> None: ...

class WorkerHealth(_message.Message):
    __slots__ = ("worker_id", "status", "detail", "seconds_since_heard", "steps")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    SECONDS_SINCE_HEARD_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    status: HealthStatus
    detail: str
    seconds_since_heard: float
    steps: int
    def __init__(self, worker_id: _Optional[str] = ..., status: _Optional[_Union[HealthStatus, str]] = ..., detail: _Optional[str] = ..., seconds_since_heard: _Optional[float] = ..., steps: _Optional[int] = ...) -> None: ...
