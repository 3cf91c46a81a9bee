from octavo.protos import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

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

class StepRequest(_message.Message):
    __slots__ = ("attach", "plan")
    ATTACH_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    attach: Attach
    plan: StepPlan
    def __init__(self, attach: _Optional[_Union[Attach, _Mapping]] = ..., plan: _Optional[_Union[StepPlan, _Mapping]] = ...) -> None: ...

class StepResponse(_message.Message):
    __slots__ = ("hello", "result", "heartbeat", "error")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    result: StepResult
    heartbeat: Heartbeat
    error: _common_pb2.ErrorDetail
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., result: _Optional[_Union[StepResult, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., error: _Optional[_Union[_common_pb2.ErrorDetail, _Mapping]] = ...) -> None: ...

class Attach(_message.Message):
    __slots__ = ("protocol_version", "epoch")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    epoch: int
    def __init__(self, protocol_version: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol_version", "info", "heartbeat_seconds", "plans_in_flight_max", "cached_prefixes")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    INFO_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PLANS_IN_FLIGHT_MAX_FIELD_NUMBER: _ClassVar[int]
    CACHED_PREFIXES_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    info: WorkerInfo
    heartbeat_seconds: float
    plans_in_flight_max: int
    cached_prefixes: _containers.RepeatedCompositeFieldContainer[CachedPrefix]
    def __init__(self, protocol_version: _Optional[int] = ..., info: _Optional[_Union[WorkerInfo, _Mapping]] = ..., heartbeat_seconds: _Optional[float] = ..., plans_in_flight_max: _Optional[int] = ..., cached_prefixes: _Optional[_Iterable[_Union[CachedPrefix, _Mapping]]] = ...) -> None: ...

class CachedPrefix(_message.Message):
    __slots__ = ("token_ids", "blocks", "cache_salt", "adapter")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    token_ids: bytes
    blocks: bytes
    cache_salt: str
    adapter: str
    def __init__(self, token_ids: _Optional[bytes] = ..., blocks: _Optional[bytes] = ..., cache_salt: _Optional[str] = ..., adapter: _Optional[str] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("finished_step_id", "running_step_id", "running_seconds", "host_memory_bytes", "host_memory_available_bytes")
    FINISHED_STEP_ID_FIELD_NUMBER: _ClassVar[int]
    RUNNING_STEP_ID_FIELD_NUMBER: _ClassVar[int]
    RUNNING_SECONDS_FIELD_NUMBER: _ClassVar[int]
    HOST_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    HOST_MEMORY_AVAILABLE_BYTES_FIELD_NUMBER: _ClassVar[int]
    finished_step_id: int
    running_step_id: int
    running_seconds: float
    host_memory_bytes: int
    host_memory_available_bytes: int
    def __init__(self, finished_step_id: _Optional[int] = ..., running_step_id: _Optional[int] = ..., running_seconds: _Optional[float] = ..., host_memory_bytes: _Optional[int] = ..., host_memory_available_bytes: _Optional[int] = ...) -> None: ...

class WorkerInfo(_message.Message):
    __slots__ = ("worker_id", "model", "device", "dtype", "block_size", "num_blocks", "num_host_blocks", "max_num_seqs", "kv_bytes_per_block", "prefill_tokens_per_second", "decode_step_seconds", "host_link_bytes_per_second")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_PER_BLOCK_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    DECODE_STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    HOST_LINK_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    model: _common_pb2.ModelInfo
    device: str
    dtype: str
    block_size: int
    num_blocks: int
    num_host_blocks: int
    max_num_seqs: int
    kv_bytes_per_block: int
    prefill_tokens_per_second: float
    decode_step_seconds: float
    host_link_bytes_per_second: float
    def __init__(self, worker_id: _Optional[str] = ..., model: _Optional[_Union[_common_pb2.ModelInfo, _Mapping]] = ..., device: _Optional[str] = ..., dtype: _Optional[str] = ..., block_size: _Optional[int] = ..., num_blocks: _Optional[int] = ..., num_host_blocks: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., kv_bytes_per_block: _Optional[int] = ..., prefill_tokens_per_second: _Optional[float] = ..., decode_step_seconds: _Optional[float] = ..., host_link_bytes_per_second: _Optional[float] = ...) -> None: ...

class NewSequence(_message.Message):
    __slots__ = ("row", "request", "branch", "max_tokens", "token_ids", "num_prompt_tokens", "num_computed_tokens")
    ROW_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    BRANCH_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    row: int
    request: _common_pb2.Request
    branch: int
    max_tokens: int
    token_ids: bytes
    num_prompt_tokens: int
    num_computed_tokens: int
    def __init__(self, row: _Optional[int] = ..., request: _Optional[_Union[_common_pb2.Request, _Mapping]] = ..., branch: _Optional[int] = ..., max_tokens: _Optional[int] = ..., token_ids: _Optional[bytes] = ..., num_prompt_tokens: _Optional[int] = ..., num_computed_tokens: _Optional[int] = ...) -> None: ...

class StepPlan(_message.Message):
    __slots__ = ("step_id", "epoch", "released_rows", "swaps_out", "swaps_in", "new_sequences", "beam_moves", "block_updates", "forks", "block_copies", "rows", "num_tokens", "start_positions", "sample_rows", "sample_indices", "samples_rows")
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RELEASED_ROWS_FIELD_NUMBER: _ClassVar[int]
    SWAPS_OUT_FIELD_NUMBER: _ClassVar[int]
    SWAPS_IN_FIELD_NUMBER: _ClassVar[int]
    NEW_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    BEAM_MOVES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_UPDATES_FIELD_NUMBER: _ClassVar[int]
    FORKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COPIES_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    START_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_ROWS_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDICES_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_ROWS_FIELD_NUMBER: _ClassVar[int]
    step_id: int
    epoch: int
    released_rows: bytes
    swaps_out: bytes
    swaps_in: bytes
    new_sequences: _containers.RepeatedCompositeFieldContainer[NewSequence]
    beam_moves: bytes
    block_updates: bytes
    forks: bytes
    block_copies: bytes
    rows: bytes
    num_tokens: bytes
    start_positions: bytes
    sample_rows: bytes
    sample_indices: bytes
    samples_rows: bool
    def __init__(self, step_id: _Optional[int] = ..., epoch: _Optional[int] = ..., released_rows: _Optional[bytes] = ..., swaps_out: _Optional[bytes] = ..., swaps_in: _Optional[bytes] = ..., new_sequences: _Optional[_Iterable[_Union[NewSequence, _Mapping]]] = ..., beam_moves: _Optional[bytes] = ..., block_updates: _Optional[bytes] = ..., forks: _Optional[bytes] = ..., block_copies: _Optional[bytes] = ..., rows: _Optional[bytes] = ..., num_tokens: _Optional[bytes] = ..., start_positions: _Optional[bytes] = ..., sample_rows: _Optional[bytes] = ..., sample_indices: _Optional[bytes] = ..., samples_rows: _Optional[bool] = ...) -> None: ...

class StepResult(_message.Message):
    __slots__ = ("step_id", "epoch", "token_ids", "logprobs", "row_errors", "step_seconds", "parts_seconds", "prompt_logprobs")
    class PartsSecondsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ROW_ERRORS_FIELD_NUMBER: _ClassVar[int]
    STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PARTS_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    step_id: int
    epoch: int
    token_ids: bytes
    logprobs: _common_pb2.TokenLogprobs
    row_errors: _containers.RepeatedCompositeFieldContainer[RowError]
    step_seconds: float
    parts_seconds: _containers.ScalarMap[str, float]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[RowPrompt]
    def __init__(self, step_id: _Optional[int] = ..., epoch: _Optional[int] = ..., token_ids: _Optional[bytes] = ..., logprobs: _Optional[_Union[_common_pb2.TokenLogprobs, _Mapping]] = ..., row_errors: _Optional[_Iterable[_Union[RowError, _Mapping]]] = ..., step_seconds: _Optional[float] = ..., parts_seconds: _Optional[_Mapping[str, float]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[RowPrompt, _Mapping]]] = ...) -> None: ...

class RowPrompt(_message.Message):
    __slots__ = ("row_index", "logprobs")
    ROW_INDEX_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    row_index: int
    logprobs: _common_pb2.PromptLogprobs
    def __init__(self, row_index: _Optional[int] = ..., logprobs: _Optional[_Union[_common_pb2.PromptLogprobs, _Mapping]] = ...) -> None: ...

class RowError(_message.Message):
    __slots__ = ("sample_index", "message")
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    sample_index: int
    message: str
    def __init__(self, sample_index: _Optional[int] = ..., message: _Optional[str] = ...) -> None: ...
