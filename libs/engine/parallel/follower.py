"""The process of a rank other than 0: loads its part, then runs the command stream.

Its arguments are the form of its log lines and the process id of rank 0. Its standard input brings one line
of options and then stays open. When it closes, rank 0 has ended, and so does this process, in whatever call
it waits. The kernel ends a rank that is stopped and cannot read.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time

from libs.common.runtime.malloc import STEP_HEAP_BYTES, keep_freed_memory
from libs.common.runtime.parent_death import end_with_parent
from libs.common.telemetry.logs import configure_logging
from libs.engine.parallel.commands import PageCommand, receive
from libs.engine.parallel.links import GroupLinks
from libs.engine.parallel.rank_model import RankModel, RankOptions
from libs.engine.parallel.shared_pages import SharedPageMemory

log = logging.getLogger(__name__)

# The end of rank 0 closes connections and the input at once, and a loaded machine may show that in any order.
_INPUT_S = 2.0


def main() -> int:
    """Returns the exit status: 0 at the end of the command stream, 1 after an error, which it logs.

    An error beside the end of rank 0 is a lost connection, and no line of the log.
    """
    end_with_parent(int(sys.argv[2]))
    keep_freed_memory(STEP_HEAP_BYTES)
    for number in (signal.SIGINT, signal.SIGTERM):  # of a terminal or a container: rank 0 drains and ends
        signal.signal(number, signal.SIG_IGN)
    options = RankOptions.from_json(sys.stdin.readline())
    configure_logging("rank", f"rank-{options.rank}", form=sys.argv[1])
    threading.Thread(target=_end_with_input, name="rank 0", daemon=True).start()
    try:
        follow(options)
    except Exception:
        time.sleep(_INPUT_S)  # the process ends meanwhile where its input closes
        log.exception("rank %d of %s fails", options.rank, options.sizes)
        return 1
    return 0


def follow(options: RankOptions) -> None:
    """Load, then run the commands of rank 0 until its stream ends."""
    memory = SharedPageMemory(options.cache.n_pages * options.cache.page_bytes, options.pages)
    links = GroupLinks(options.place, f"/proc/self/fd/{options.store}", device=options.device)
    model = RankModel.load(options, links, memory)
    while (command := receive(links)) is not None:
        if isinstance(command, PageCommand):
            model.move_pages(command)
        else:
            model.run(command)
    links.close()


def _end_with_input() -> None:
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    status = main()
    logging.shutdown()
    os._exit(status)  # without destructors of the process group, which wait for other ranks
