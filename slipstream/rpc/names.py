"""Waits for host names that do not resolve yet, as where a process starts before the peer that has the name.

gRPC asks again too, but its pauses grow to two minutes. So a caller waits here, and dials afterwards.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import socket
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from slipstream.rpc.backoff import Backoff

log = logging.getLogger(__name__)

Dialled = TypeVar("Dialled")

_REPEAT_LOG_S = 30.0
# Questions to a dead name server block for many seconds: they must not fill the loop's threads.
_threads = ThreadPoolExecutor(4, thread_name_prefix="resolve")


def is_name(endpoint: str) -> bool:
    """Whether the host of HOST:PORT is a name, not an address."""
    try:
        ipaddress.ip_address(endpoint.rpartition(":")[0].strip("[]"))
        return False
    except ValueError:
        return True


async def wait_resolved(
    endpoint: str,
    *,
    what: str,
    resolve: Callable[[str], Awaitable[object]] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> bool:
    """Return once the host of HOST:PORT resolves: False when it did at once, True when that took a wait.

    Asks until it resolves or the caller cancels. Log lines begin with `what`. `resolve` raises OSError.
    """
    if not is_name(endpoint):
        return False
    host, backoff, began_s = endpoint.rpartition(":")[0], Backoff(), clock()
    logged_s: float | None = None
    while True:
        try:
            await (resolve or _resolve)(host)
        except OSError as error:
            if logged_s is None or clock() - logged_s >= _REPEAT_LOG_S:
                log.warning(
                    "%s: the name %s does not resolve (%s) since %.0f s; it is asked again until it does",
                    what,
                    host,
                    error.strerror,
                    clock() - began_s,
                )
                logged_s = clock()
            await asyncio.sleep(backoff.pause_s())
            continue
        if logged_s is not None:
            log.info("%s: the name %s resolves after %.1f s", what, host, clock() - began_s)
        return logged_s is not None


async def once_resolved(endpoint: str, dial: Callable[[], Awaitable[Dialled]], *, what: str) -> Dialled:
    """What `dial` returns. Where the name of HOST:PORT does not resolve, wait for it and dial once more.

    The caller bounds the wait. Raises OSError for what is no host name.
    """
    try:
        return await dial()
    except UnicodeError:  # an empty label, or one of more than 63 characters
        raise OSError(errno.EINVAL, f"{endpoint} has no host name") from None
    except socket.gaierror:
        await wait_resolved(endpoint, what=what)
        return await dial()


async def _resolve(host: str) -> object:
    try:
        return await asyncio.get_running_loop().run_in_executor(_threads, socket.getaddrinfo, host, None)
    except UnicodeError:  # an empty label, or one of more than 63 characters
        raise OSError(errno.EINVAL, "no host name") from None
