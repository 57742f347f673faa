"""python -m services.drafter: one drafter."""

from __future__ import annotations

import sys

from libs.common.cluster.worker_record import Role
from libs.worker.process.options import worker_parser
from libs.worker.process.process import run_worker
from services.drafter.app import DrafterApp


def main() -> int:
    """Parse the command line and serve."""
    parser = worker_parser("drafter", "Proposes tokens with an EAGLE-3 head for many decode workers.")
    parser.add_argument(
        "--threads", type=int, help="CPU threads of the head; default: as OMP_NUM_THREADS says"
    )
    options = parser.parse_args()
    if options.engine == "torch" and (options.model is None or options.draft_model is None):
        parser.error("--model and --draft-model are required")
    return run_worker(Role.DRAFTER, options, lambda: DrafterApp(options))


if __name__ == "__main__":
    sys.exit(main())
