"""python -m services.drafter: one drafter."""

from __future__ import annotations

from libs.common.runtime.signals import end_at_stop_signals

if __name__ == "__main__":
    end_at_stop_signals()  # The imports take a second, and several on a busy machine.

import sys

from libs.common.cluster.worker_record import Role
from libs.common.runtime.loading import load_settings
from libs.worker.process.process import run_worker
from libs.worker.process.settings import WorkerSettings
from services.drafter.app import DrafterApp

PROGRAM = "python -m services.drafter"
DESCRIPTION = "Proposes tokens with an EAGLE-3 head for many decode workers."


def main() -> int:
    """Read the settings and serve."""
    options = load_settings(WorkerSettings, section=Role.DRAFTER, program=PROGRAM, description=DESCRIPTION)
    return run_worker(Role.DRAFTER, options, lambda: DrafterApp(options))


if __name__ == "__main__":
    sys.exit(main())
