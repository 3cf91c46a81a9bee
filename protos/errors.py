"""Every error that leaves a part of Octavo, each with its gRPC and HTTP meaning.

    OctavoError
    ├── InvalidRequestError        400  INVALID_ARGUMENT     the call is wrong; names the field (`param`)
    │   └── RequestTooLargeError   400  OUT_OF_RANGE         can never fit; says limit and need
    ├── AuthenticationError        401  UNAUTHENTICATED
    ├── NotFoundError              404  NOT_FOUND            unknown model, request or path
    ├── OverloadedError            429  RESOURCE_EXHAUSTED   full for now; `retry_after_seconds`
    ├── UnavailableError           503  UNAVAILABLE          loading, draining, or a part is lost
    │   └── WorkerLostError        503  UNAVAILABLE
    ├── DeadlineExceededError      504  DEADLINE_EXCEEDED    the call's own timeout has passed
    ├── RequestFailedError         500  INTERNAL             this one request failed, nobody else
    ├── PlanRejectedError          500  FAILED_PRECONDITION  a worker refused a plan (stale epoch, bad block)
    ├── IntegrityError             500  INTERNAL             a broken invariant of ours (rule R2)
    ├── ProtocolError              500  INVALID_ARGUMENT     a peer sent a message that cannot be read
    └── StartupError               –    FAILED_PRECONDITION  before the port opens; the process exits non-zero
        ├── ConfigError                                      an option is wrong; names it
        └── ModelLoadError                                   a checkpoint is wrong; names path or tensor

`assert` is for our own bugs; these types are for the world's. Each edge (gRPC, HTTP, CLI) maps them once.
This module imports nothing, so `grpc_code` is the name of a `grpc.StatusCode`.
"""

from __future__ import annotations


class OctavoError(Exception):
    """Base of all. `message` is one sentence a user can act on."""

    http_status: int = 500
    grpc_code: str = "INTERNAL"
    error_type: str = "server_error"
    """OpenAI's `error.type`."""
    code: str | None = None
    """OpenAI's `error.code`, a stable machine-readable word."""
    param: str | None = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        if param is not None:
            self.param = param
        if code is not None:
            self.code = code


class InvalidRequestError(OctavoError):
    http_status = 400
    grpc_code = "INVALID_ARGUMENT"
    error_type = "invalid_request_error"


class RequestTooLargeError(InvalidRequestError):
    grpc_code = "OUT_OF_RANGE"
    code = "context_length_exceeded"


class AuthenticationError(OctavoError):
    http_status = 401
    grpc_code = "UNAUTHENTICATED"
    error_type = "authentication_error"
    code = "invalid_api_key"


class NotFoundError(OctavoError):
    http_status = 404
    grpc_code = "NOT_FOUND"
    error_type = "invalid_request_error"
    code = "not_found"


class OverloadedError(OctavoError):
    http_status = 429
    grpc_code = "RESOURCE_EXHAUSTED"
    error_type = "rate_limit_error"
    code = "overloaded"

    def __init__(self, message: str, *, retry_after_seconds: float = 1.0, param: str | None = None) -> None:
        super().__init__(message, param=param)
        self.retry_after_seconds = retry_after_seconds


class UnavailableError(OctavoError):
    http_status = 503
    grpc_code = "UNAVAILABLE"
    error_type = "service_unavailable"
    code = "unavailable"


class WorkerLostError(UnavailableError):
    code = "worker_lost"


class DeadlineExceededError(OctavoError):
    http_status = 504
    grpc_code = "DEADLINE_EXCEEDED"
    error_type = "timeout_error"
    code = "deadline_exceeded"


class RequestFailedError(OctavoError):
    code = "request_failed"


class PlanRejectedError(OctavoError):
    grpc_code = "FAILED_PRECONDITION"
    code = "plan_rejected"


class IntegrityError(OctavoError):
    code = "integrity"


class ProtocolError(OctavoError):
    grpc_code = "INVALID_ARGUMENT"
    code = "protocol"


class StartupError(OctavoError):
    grpc_code = "FAILED_PRECONDITION"


class ConfigError(StartupError):
    code = "config"


class ModelLoadError(StartupError):
    code = "model_load"


def _tree(root: type[OctavoError]) -> dict[str, type[OctavoError]]:
    found = {root.__name__: root}
    for child in root.__subclasses__():
        # Only what both ends of a wire know: an edge may have subclasses of its own, which travel as their parents.
        if child.__module__ == __name__:
            found.update(_tree(child))
    return found


def by_name(name: str) -> type[OctavoError]:
    """The class called `name`; `OctavoError` when this build does not know it (a newer peer)."""
    return _tree(OctavoError).get(name, OctavoError)


def revive(name: str, message: str, *, param: str | None = None, code: str | None = None) -> OctavoError:
    """Rebuild an error that crossed a wire as (class name, message, param, code)."""
    error = by_name(name)(message)
    error.param = param or error.param
    error.code = code or error.code
    return error
