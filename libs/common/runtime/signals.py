"""What SIGTERM and SIGINT do to a service: the first begins its orderly end, the second ends it at once."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable

log = logging.getLogger(__name__)


def stop_on_signals(stop: Callable[[], None], *, before_exit: Callable[[], None] = lambda: None) -> None:
    """Call `stop` at the first SIGTERM or SIGINT that the running loop gets; end the process at the second.

    `before_exit` runs just before that end.
    """
    loop = asyncio.get_running_loop()
    received: list[int] = []

    def on_signal(number: int) -> None:
        received.append(number)
        if len(received) == 1:
            stop()
            return
        log.warning("ends at once: a second signal came while it was stopping")
        before_exit()
        _end_by(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)


def _end_by(number: int) -> None:
    """End this process as the signal does where nothing handles it."""
    sys.stderr.flush()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    os._exit(128 + number)  # the first process of a container outlives the signal
