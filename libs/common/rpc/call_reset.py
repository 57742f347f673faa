"""Ends a gRPC call from the server's side, where its client reads nothing.

gRPC for asyncio has no method for it. A status waits behind the data that the client does not read, and a
cancelled handler leaves the call open. A call has two tasks, its handler and one that waits for the client's
end. With both cancelled nothing refers to the call, and gRPC resets its stream. The loop of a server keeps
two calls, its first one for ever and the last one until the next arrives. These end without a task, and are
not reset.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import weakref
from collections.abc import Iterator
from typing import Any

import grpc

from libs.common.rpc.deadline_queue import HandlerDeadlines

log = logging.getLogger(__name__)

# The coroutine of gRPC's second task of a call, which refers to the handler's task.
_CALL_COROUTINE = "_schedule_rpc_coro"
# By the handler of a call.
_call_tasks: weakref.WeakKeyDictionary[asyncio.Task[Any], weakref.ref[asyncio.Task[Any]]] = (
    weakref.WeakKeyDictionary()
)


def reset_call(handler: asyncio.Task[Any]) -> None:
    """Cancel the handler's task and reset its call: other calls of the connection go on."""
    if handler.done():
        return
    call_task = _find_call_task(handler)
    if call_task is None:
        log.error("this version of gRPC keeps a call open whose client reads nothing")
    else:
        call_task.cancel()
    handler.cancel()


def reset_unless_read(unread: HandlerDeadlines) -> None:
    """Give the client time to read the last response of the call that this task handles.

    `unread` resets the calls that are not over by then.
    """
    handler = asyncio.current_task()
    assert handler is not None
    unread.add(handler)
    handler.add_done_callback(unread.remove)


@contextlib.contextmanager
def resetting_after(delay_s: float) -> Iterator[None]:
    """Reset the call that this task handles unless what runs inside ends by then."""
    handler = asyncio.current_task()
    assert handler is not None
    timer = asyncio.get_running_loop().call_later(delay_s, reset_call, handler)
    try:
        yield
    finally:
        timer.cancel()


@contextlib.contextmanager
def ending_with_call() -> Iterator[None]:
    """Turn an error of gRPC into a cancellation: the call is over, and this task is about to be cancelled."""
    try:
        yield
    except grpc.aio.BaseError:
        raise asyncio.CancelledError from None


def _find_call_task(handler: asyncio.Task[Any]) -> asyncio.Task[Any] | None:
    """gRPC's task that waits for the end of the handler's call."""
    if handler not in _call_tasks:
        _note_call_tasks(handler.get_loop())
    call_task = _call_tasks.get(handler)
    return None if call_task is None else call_task()


def _note_call_tasks(loop: asyncio.AbstractEventLoop) -> None:
    """Note the tasks of all calls that run: a look through all tasks serves many resets."""
    for task in asyncio.all_tasks(loop):
        coroutine = task.get_coro()
        if getattr(coroutine, "__name__", "") == _CALL_COROUTINE:
            for scope in gc.get_referents(coroutine):
                for handler in gc.get_referents(scope):
                    if isinstance(handler, asyncio.Task):
                        _call_tasks[handler] = weakref.ref(task)
