"""SlipstreamError <-> gRPC status, so that an error keeps its type across the wire.

Out: status code from the error tree's table, plus google.rpc details: `ErrorInfo` always (reason =
class name), `BadRequest` with the field for InvalidArgument, `RetryInfo` for Overloaded.
In: `from_rpc_error` rebuilds the class named by ErrorInfo, else the nearest class for the code.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from slipstream import bounds, errors
from slipstream.enum_names import FAILURE_CODES
from slipstream.v1 import common_pb2

ResponseT = TypeVar("ResponseT")

DOMAIN = "slipstream"
# Of a call's metadata and of its answer's: the header of the same name over HTTP.
REQUEST_ID = "x-request-id"

# Part of gRPC's words for a message beyond the limit of its sender or its receiver.
_TOO_LARGE = "message larger than max"
# What `Failure` carries: 49 days. A peer may state any duration, which protobuf may not take again.
_LONGEST_RETRY_MS = (1 << 32) - 1

_BY_CODE: dict[str, type[errors.SlipstreamError]] = {
    "INVALID_ARGUMENT": errors.InvalidArgument,
    "NOT_FOUND": errors.NotFound,
    "UNAUTHENTICATED": errors.Unauthenticated,
    "PERMISSION_DENIED": errors.PermissionDenied,
    "RESOURCE_EXHAUSTED": errors.Overloaded,
    "UNAVAILABLE": errors.Unavailable,
    "FAILED_PRECONDITION": errors.FailedPrecondition,
    "DATA_LOSS": errors.DataCorrupt,
    "DEADLINE_EXCEEDED": errors.DeadlineExceeded,
    "CANCELLED": errors.Aborted,
}


def to_failure(error: errors.SlipstreamError) -> common_pb2.Failure:
    """The error as it travels inside a shared stream."""
    return common_pb2.Failure(
        code=FAILURE_CODES.value(error.code),
        reason=type(error).__name__,
        message=error.message,
        field=getattr(error, "field", None) or "",
        retry_after_ms=getattr(error, "retry_after_ms", 0),
    )


def from_failure(failure: common_pb2.Failure) -> errors.SlipstreamError:
    """Inverse of `to_failure`; an unknown reason becomes the nearest class for its code."""
    code = FAILURE_CODES.name(failure.code)
    return _build(failure.reason, code, failure.message, failure.field, failure.retry_after_ms)


def to_status(error: errors.SlipstreamError) -> grpc.Status:
    """The error as a gRPC status with google.rpc details in the trailers."""
    info = error_details_pb2.ErrorInfo(reason=type(error).__name__, domain=DOMAIN)
    details = [_pack(info)]
    field = getattr(error, "field", None)
    if isinstance(error, errors.InvalidArgument):
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=error.reason)
        details.append(_pack(error_details_pb2.BadRequest(field_violations=[violation])))
    elif field:
        info.metadata["field"] = field
        details[0] = _pack(info)
    if isinstance(error, errors.Overloaded) and error.retry_after_ms:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(error.retry_after_ms)
        details.append(_pack(retry))
    code: grpc.StatusCode = getattr(grpc.StatusCode, error.code)
    status = status_pb2.Status(code=code.value[0], message=error.message, details=details)
    converted: grpc.Status = rpc_status.to_status(status)
    return converted


# The status of a call that a servicer does not implement, as gRPC sends it for an unknown service.
UNIMPLEMENTED: grpc.Status = rpc_status.to_status(
    status_pb2.Status(code=grpc.StatusCode.UNIMPLEMENTED.value[0], message="not a call of this service")
)


def from_rpc_error(error: grpc.aio.AioRpcError | grpc.RpcError) -> errors.SlipstreamError:
    """The typed error behind a failed call; a status without our details maps by its code."""
    typed = _typed(error)
    metadata: Any = error.trailing_metadata() or ()
    for name, value in metadata:
        if name == REQUEST_ID:
            typed.request_id = str(value)
    return typed


def names_pause(error: grpc.aio.AioRpcError | grpc.RpcError) -> bool:
    """Whether a router refused the call and said when to return. Such a call ran nothing."""
    status = status_of(error)
    return status is not None and any(
        detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR) for detail in status.details
    )


def received(response: ResponseT | None, *, sender: str) -> ResponseT:
    """The response of a call. Raises Unavailable for None, which gRPC gives for bytes that are no message."""
    if response is None:
        raise errors.Unavailable(f"{sender} sent what is no answer to this call")
    return response


def status_of(error: grpc.aio.AioRpcError | grpc.RpcError) -> status_pb2.Status | None:
    """The details that a process of ours sent with its error; None without any that can be read."""
    try:
        found: status_pb2.Status | None = rpc_status.from_call(error)
    except (ValueError, DecodeError):  # no message, or the status of another call
        return None
    return found


def _typed(error: grpc.aio.AioRpcError | grpc.RpcError) -> errors.SlipstreamError:
    status = status_of(error)
    message = error.details() or error.code().name
    if status is None and _TOO_LARGE in message:
        return bounds.body_too_large()  # gRPC's status for it, RESOURCE_EXHAUSTED, would be tried again
    try:
        reason, field, retry_after_ms = _read_details(status.details if status is not None else ())
    except DecodeError:
        reason, field, retry_after_ms = "", "", 0
    return _build(reason, error.code().name, message, field, retry_after_ms)


def _read_details(details: Iterable[any_pb2.Any]) -> tuple[str, str, int]:
    """(class of the error, field, milliseconds to wait). Raises DecodeError."""
    reason = field = ""
    retry_after_ms = 0
    for detail in details:
        info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
        retry = error_details_pb2.RetryInfo()
        if detail.Unpack(info):
            reason, field = info.reason, info.metadata.get("field", field)
        elif detail.Unpack(bad) and bad.field_violations:
            field = bad.field_violations[0].field
        elif detail.Unpack(retry):
            retry_after_ms = retry.retry_delay.ToMilliseconds()
    return reason, field, retry_after_ms


def _build(reason: str, code: str, message: str, field: str, retry_after_ms: int) -> errors.SlipstreamError:
    retry_after_ms = min(max(retry_after_ms, 0), _LONGEST_RETRY_MS)
    kind = errors.error_types().get(reason) or _BY_CODE.get(code, errors.Internal)
    if issubclass(kind, errors.InvalidArgument):
        return kind(field or "request", message.removeprefix(f"{field}: "))
    if issubclass(kind, errors.NotFound):
        return kind(message, field=field or None)
    if issubclass(kind, errors.Overloaded):
        return kind(message, retry_after_ms=retry_after_ms or (0 if reason else 1000))
    return kind(message)


def _pack(
    message: error_details_pb2.ErrorInfo | error_details_pb2.BadRequest | error_details_pb2.RetryInfo,
) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed
