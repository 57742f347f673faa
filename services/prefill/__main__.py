"""python -m services.prefill: one prefill worker."""

from __future__ import annotations

from libs.common.runtime.signals import end_at_stop_signals

if __name__ == "__main__":
    end_at_stop_signals()  # The imports take a second, and several on a busy machine.

import sys

from libs.common.cluster.worker_record import Role
from libs.common.runtime.loading import load_settings
from libs.worker.process.process import run_worker
from libs.worker.process.settings import EngineSettings
from services.prefill.app import PrefillApp

PROGRAM = "python -m services.prefill"
DESCRIPTION = "Turns prompts into KV blocks and exports them under a lease."


def main() -> int:
    """Read the settings and serve."""
    options = load_settings(EngineSettings, section=Role.PREFILL, program=PROGRAM, description=DESCRIPTION)
    return run_worker(Role.PREFILL, options, lambda: PrefillApp(options))


if __name__ == "__main__":
    sys.exit(main())
