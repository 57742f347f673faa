"""python -m services.decode: one decode worker."""

from __future__ import annotations

from libs.common.runtime.signals import end_at_stop_signals

if __name__ == "__main__":
    end_at_stop_signals()  # The imports take a second, and several on a busy machine.

import sys

from libs.common.cluster.worker_record import Role
from libs.common.runtime.loading import load_settings
from libs.worker.process.process import run_worker
from services.decode.app import DecodeApp
from services.decode.settings import DecodeSettings

PROGRAM = "python -m services.decode"
DESCRIPTION = "Pulls KV, runs sequences to their end, streams their tokens."


def main() -> int:
    """Read the settings and serve."""
    options = load_settings(DecodeSettings, section=Role.DECODE, program=PROGRAM, description=DESCRIPTION)
    return run_worker(Role.DECODE, options, lambda: DecodeApp(options))


if __name__ == "__main__":
    sys.exit(main())
