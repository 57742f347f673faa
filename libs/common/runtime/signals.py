"""Effects of SIGTERM and SIGINT on a service: end it before it serves, drain it after, then end it.

As process 1 of a container a service has to end itself, because the kernel gives process 1 no default action.
A service imports this module before any other, so the module imports little.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def end_at_stop_signals() -> None:
    """Make a stop signal end the process at once. For the start, which may load a model for minutes."""
    for number in _STOP_SIGNALS:
        signal.signal(number, lambda received, _frame: _end_by(received))


def stop_on_signals(stop: Callable[[], None], *, before_exit: Callable[[], None] = lambda: None) -> None:
    """Call `stop` at the first SIGTERM or SIGINT of the running loop; the same one again ends the process.

    Only the same one: at Ctrl-C a child gets SIGINT from the terminal and SIGTERM from its parent.
    `before_exit` runs just before that end.
    """
    import asyncio
    import logging

    loop = asyncio.get_running_loop()
    log = logging.getLogger(__name__)
    received: set[int] = set()

    def on_signal(number: int) -> None:
        if number in received:
            log.warning("ends at once: a second signal came while it was stopping")
            before_exit()
            _end_by(number)
        if not received:
            stop()
        received.add(number)

    for number in _STOP_SIGNALS:
        loop.add_signal_handler(number, on_signal, number)


def _end_by(number: int) -> None:
    """Die of the signal, so that the parent sees which; process 1 exits with the shell's status for it."""
    sys.stderr.flush()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    os._exit(128 + number)
