"""The states of a supervised process, and its end in words."""

from __future__ import annotations

import signal
from enum import StrEnum

from libs.common.runtime.exit_codes import HUNG, MODEL_UNUSABLE


class ProcessState(StrEnum):
    """Where a process is in its life."""

    STARTING = "starting"
    READY = "ready"
    BACKING_OFF = "backing off"
    HELD = "held"
    DRAINED = "drained"
    STOPPED = "stopped"


def how_ended(code: int) -> str:
    """An exit code in words; negative ones are signals."""
    if code < 0:
        named = -code in signal.Signals.__members__.values()  # most real-time signals have no name
        return f"was ended by {signal.Signals(-code).name if named else f'signal {-code}'}"
    if code == MODEL_UNUSABLE:
        return f"cannot use its model (exit code {code})"
    if code == HUNG:
        return f"ended while a part of it hung (exit code {code})"
    return f"ended with exit code {code}"
