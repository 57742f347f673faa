"""The status by which a server ended a call that its client still wrote to."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import grpc

# grpc.aio's text for a write that failed, whose status it puts over the server's (grpc issue 36066).
_WRITE_FAILED = "Internal error from Core"
# How long a write's failure may come before the status of the call, and how often that is looked for.
_STATUS_WITHIN_S = 1.0
_LOOK_EVERY_S = 0.01


class CallStatus:
    """The status that came with the end of one call of grpc.aio."""

    def __init__(self, call: grpc.aio.Call) -> None:
        self._call = call
        self._served: grpc.aio.AioRpcError | None = None
        call.add_done_callback(self._note)

    async def behind(self, error: grpc.aio.AioRpcError) -> grpc.aio.AioRpcError:
        """The server's status where the error is but that of a failed write, and else the error."""
        if not _is_failed_write(error):
            return error
        for _ in range(round(_STATUS_WITHIN_S / _LOOK_EVERY_S)):
            if self._served is not None:
                return self._served
            await asyncio.sleep(_LOOK_EVERY_S)
            self._note(self._call)  # gRPC calls back for the first status alone
        return error

    def _note(self, call: Any) -> None:
        """Note the status that the call has now. gRPC may replace it before a task runs."""
        error = grpc.aio.AioRpcError(
            _value(call.code()),
            _value(call.initial_metadata()),
            _value(call.trailing_metadata()),
            details=_value(call.details()),
            debug_error_string=_value(call.debug_error_string()),
        )
        if self._served is None and not _is_failed_write(error):
            self._served = error


def _is_failed_write(error: grpc.aio.AioRpcError) -> bool:
    return error.code() is grpc.StatusCode.INTERNAL and error.details() == _WRITE_FAILED


def _value(ready: Coroutine[Any, Any, Any]) -> Any:
    """The value of a coroutine that has nothing to wait for, as a part of a finished call."""
    try:
        ready.send(None)
    except StopIteration as returned:
        return returned.value
    ready.close()
    raise RuntimeError("the call has not ended")
