"""python -m services.prefill: one prefill worker."""

from __future__ import annotations

import sys

from libs.common.cluster.worker_record import Role
from libs.worker.process.options import add_engine_options, worker_parser
from libs.worker.process.process import run_worker
from services.prefill.app import PrefillApp


def main() -> int:
    """Parse the command line and serve."""
    parser = worker_parser("prefill", "Turns prompts into KV blocks and exports them under a lease.")
    add_engine_options(parser)
    options = parser.parse_args()
    return run_worker(Role.PREFILL, options, lambda: PrefillApp(options))


if __name__ == "__main__":
    sys.exit(main())
