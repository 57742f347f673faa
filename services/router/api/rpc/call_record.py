"""A call's request id, and what the access log says of its end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from libs.common.http.http_errors import new_request_id
from libs.common.rpc.access import Metadata
from services.router.api.access_log import AccessRecord
from services.router.api.rpc.callers import Context
from services.router.request.validation import is_request_id
from slipstream import errors
from slipstream.rpc.rpc_errors import REQUEST_ID


def note_failure(record: AccessRecord, error: BaseException) -> None:
    """Note the error that ends a call, and the status that its client gets. The first error counts."""
    record.fail(error)
    if not record.status:
        is_gone = isinstance(error, asyncio.CancelledError)
        code = "CANCELLED" if is_gone else errors.Internal.code
        record.status = error.code if isinstance(error, errors.SlipstreamError) else code


def trailing_id(request_id: str) -> Metadata:
    """The metadata that names a call's request."""
    return ((REQUEST_ID, request_id),)


def given_id(metadata: Iterable[tuple[str, Any]]) -> str:
    """The request id that a client gave, if it is valid, else a new one."""
    given = next((value for name, value in metadata if name == REQUEST_ID), "")
    return given if is_request_id(given) else new_request_id()


def request_id_of(context: Context) -> str:
    """The id that ``name_call` gave the call."""
    return str(dict(context.trailing_metadata())[REQUEST_ID])
