"""python -m services.kvstore: one node of the block store."""

from __future__ import annotations

from libs.common.runtime.signals import end_at_stop_signals

if __name__ == "__main__":
    end_at_stop_signals()  # The imports take a second, and several on a busy machine.

import asyncio
import logging
import os
import sys
import threading
import time

from libs.common.cluster.worker_record import Role
from libs.common.runtime.loading import load_settings
from libs.common.telemetry.logs import configure_logging
from libs.common.telemetry.tracing import configure_tracing
from services.kvstore.app import serve
from services.kvstore.settings import NodeSettings, options_of
from slipstream.errors import SlipstreamError

log = logging.getLogger(__name__)

PROGRAM = "python -m services.kvstore"
DESCRIPTION = "Keeps KV blocks in memory, on disk, in a pool."
DISK_THREADS = "kv-"
LAST_THREADS_S = 1.0


def main() -> int:
    """Parse the command line and serve; 2 when the configuration cannot work."""
    parsed = load_settings(NodeSettings, section=Role.KVSTORE, program=PROGRAM, description=DESCRIPTION)
    configure_logging(Role.KVSTORE, parsed.instance, level=parsed.log_level, form=parsed.log_format)
    configure_tracing(Role.KVSTORE, parsed.instance)
    parsed.warn_of_exposed_secrets()
    code = 0
    try:
        asyncio.run(serve(options_of(parsed)))
    except SlipstreamError as error:
        log.error("%s cannot start: %s", parsed.instance, parsed.named(error))
        code = 2
    _exit_if_threads_hang(code)
    return code


def _exit_if_threads_hang(code: int) -> None:
    """Exit at once when disk threads hang, since the interpreter would wait for them."""
    deadline_s = time.monotonic() + LAST_THREADS_S
    while left := [thread for thread in threading.enumerate() if thread.name.startswith(DISK_THREADS)]:
        if time.monotonic() > deadline_s:
            log.error("%d threads of a disk do not end", len(left))
            sys.stderr.flush()
            os._exit(code)
        time.sleep(0.01)


if __name__ == "__main__":
    sys.exit(main())
