"""The one exception tree of Slipstream and its table to gRPC status and HTTP codes.

    SlipstreamError
    ├── InvalidArgument        the caller's input is wrong; names the field
    │   ├── BodyTooLarge       the request body exceeds its bound
    │   └── ContextExceeded    prompt and answer exceed the model's context
    ├── NotFound               unknown model, session, handoff, worker
    ├── Unauthenticated        no or wrong credentials
    ├── PermissionDenied       valid credentials of a class that may not do this
    ├── Overloaded             no capacity now; retry after `retry_after_ms`
    │   ├── OutOfPages         no free KV pages on this worker
    │   ├── RateLimited        a limit of the API key or its tenant is reached, for a moment
    │   └── QuotaExceeded      the key or its tenant has spent what it may in a day or a month
    ├── Unavailable            a peer is gone or not ready; safe to retry elsewhere
    │   ├── Draining           this process is about to end; what it ran goes on elsewhere
    │   └── TransferError      KV bytes did not arrive (see its children in libs.common.transport)
    ├── FailedPrecondition     right request, wrong state (draining, stale epoch)
    │   ├── FingerprintMismatch  KV of another model, layout or dtype; never run
    │   ├── Quarantined        this request crashed workers; it is not run again
    │   ├── UnknownAddress     a message names an address that discovery does not announce; not dialled
    │   └── PrefixUnknown      a prompt was named that this worker does not remember; send it whole
    ├── DataCorrupt            a checksum did not match; the data is never used
    ├── DeadlineExceeded       the request's own deadline passed, or comes before an answer could
    ├── Aborted                the caller cancelled or aborted
    ├── AnswerMismatch         an answer is not of the type that the SDK's caller asked for
    └── Internal               a defect here

`code` is the gRPC status name, `http_status` the HTTP code, `openai_type` the `error.type` of
OpenAI's error shape. Both APIs respond with the same `message`.
"""

from __future__ import annotations

from typing import ClassVar

# gRPC carries an error up to four times in 8 KiB of metadata, percent-encoded or in base64.
MAX_MESSAGE_BYTES = 1024
MAX_FIELD_BYTES = 256


def shortened(text: str, max_bytes: int) -> str:
    """The text in at most so many bytes of UTF-8; what UTF-8 cannot hold is escaped."""
    if text.isascii() and len(text) <= max_bytes:
        return text
    data = text[: max_bytes + 1].encode("utf-8", "backslashreplace")
    if len(data) <= max_bytes:
        return data.decode()
    return data[: max_bytes - 3].decode("utf-8", "ignore") + "..."


class SlipstreamError(Exception):
    """Base of all errors that cross a Slipstream interface."""

    code: ClassVar[str] = "INTERNAL"
    http_status: ClassVar[int] = 500
    openai_type: ClassVar[str] = "server_error"
    # The id of the request that a router refused or failed, where it came over gRPC.
    request_id: str = ""

    def __init__(self, message: str) -> None:
        self.message = shortened(message, MAX_MESSAGE_BYTES)
        super().__init__(self.message)


class InvalidArgument(SlipstreamError):
    """The caller's input is wrong. `field` is the path of the offending field, e.g. `messages[1].role`."""

    code = "INVALID_ARGUMENT"
    http_status = 400
    openai_type = "invalid_request_error"

    def __init__(self, field: str, reason: str) -> None:
        self.field = shortened(field, MAX_FIELD_BYTES)
        super().__init__(f"{self.field}: {reason}")
        self.reason = self.message[len(self.field) + 2 :]


class BodyTooLarge(InvalidArgument):
    """The request body exceeds `max_body_bytes`."""

    http_status = 413


class ContextExceeded(InvalidArgument):
    """The prompt, or the prompt with its answer, exceeds the model's context. A shorter one may fit."""


class NotFound(SlipstreamError):
    """The named thing does not exist. `field` is the request field that named it, if any."""

    code = "NOT_FOUND"
    http_status = 404
    openai_type = "invalid_request_error"

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = None if field is None else shortened(field, MAX_FIELD_BYTES)


class Unauthenticated(SlipstreamError):
    """No credentials, or wrong ones."""

    code = "UNAUTHENTICATED"
    http_status = 401
    openai_type = "authentication_error"


class PermissionDenied(SlipstreamError):
    """The credentials are valid, and their class may not do this (docs/security.md)."""

    code = "PERMISSION_DENIED"
    http_status = 403
    openai_type = "permission_error"


class Overloaded(SlipstreamError):
    """No capacity now; the caller may retry after `retry_after_ms`. 0: it never fits, so no time helps."""

    code = "RESOURCE_EXHAUSTED"
    http_status = 429
    openai_type = "rate_limit_error"

    def __init__(self, message: str, *, retry_after_ms: int = 1000) -> None:
        super().__init__(message)
        self.retry_after_ms = retry_after_ms


class OutOfPages(Overloaded):
    """The worker has no free KV pages for this sequence."""


class RateLimited(Overloaded):
    """The API key or its tenant has as many requests or tokens as it may have now."""


class QuotaExceeded(Overloaded):
    """The API key or its tenant has spent what it may in a day or a month. Not worth a quick retry."""


class Unavailable(SlipstreamError):
    """A peer is gone or not ready. Safe to retry elsewhere."""

    code = "UNAVAILABLE"
    http_status = 503


class Draining(Unavailable):
    """This process is about to end and takes nothing new. Not a failure: go on elsewhere at once."""


class TransferError(Unavailable):
    """KV bytes did not arrive; nothing of the destination may be used."""


class FailedPrecondition(SlipstreamError):
    """The request is well formed but the state forbids it (draining, stale epoch, ended lease)."""

    code = "FAILED_PRECONDITION"
    http_status = 409
    openai_type = "invalid_request_error"


class FingerprintMismatch(FailedPrecondition):
    """KV made by another model, tokenizer, dtype, block size or layout; refused, never run."""


class Quarantined(FailedPrecondition):
    """This request crashed its workers: two that ran no other suspect, or up to five beside others. It is
    refused for a while, so clients must not retry it."""

    http_status = 422


class PrefixUnknown(FailedPrecondition):
    """The beginning of a prompt was named, and this worker does not remember it. Send the whole prompt."""


class UnknownAddress(FailedPrecondition):
    """A message names an endpoint or a transport session that discovery does not announce. Not dialled."""


class DataCorrupt(SlipstreamError):
    """A checksum did not match. The data is dropped and never used."""

    code = "DATA_LOSS"
    http_status = 500


class DeadlineExceeded(SlipstreamError):
    """The request's own deadline passed, or comes before an answer could. A longer one may help."""

    code = "DEADLINE_EXCEEDED"
    http_status = 504
    openai_type = "timeout_error"


class Aborted(SlipstreamError):
    """The caller cancelled or aborted the request."""

    code = "CANCELLED"
    http_status = 499


class AnswerMismatch(SlipstreamError):
    """An answer is not of the type that was asked for, such as one that ended at max_tokens. Of the SDK."""


class Internal(SlipstreamError):
    """A defect in this project."""


def error_types() -> dict[str, type[SlipstreamError]]:
    """The classes of this file by name: what can be built again from `google.rpc.ErrorInfo.reason`.

    A narrower class of another module arrives as the nearest class for its code.
    """
    found: dict[str, type[SlipstreamError]] = {}
    queue: list[type[SlipstreamError]] = [SlipstreamError]
    while queue:
        kind = queue.pop()
        if kind.__module__ == __name__:
            found[kind.__name__] = kind
        queue.extend(kind.__subclasses__())
    return found
