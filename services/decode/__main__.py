"""python -m services.decode: one decode worker."""

from __future__ import annotations

import sys

from libs.common.cluster.worker_record import Role
from libs.worker.process.options import add_engine_options, worker_parser
from libs.worker.process.process import run_worker
from services.decode.app import DecodeApp


def main() -> int:
    """Parse the command line and serve."""
    parser = worker_parser("decode", "Pulls KV, runs sequences to their end, streams their tokens.")
    add_engine_options(parser)
    parser.add_argument(
        "--draft-tokens", type=int, default=3, help="drafts for each sequence and step; 0 = none"
    )
    parser.add_argument(
        "--drafts",
        choices=("auto", "on", "off"),
        default="auto",
        help="auto: use drafts where they are measured to save time (text is the same either way)",
    )
    parser.add_argument(
        "--draft-budget-ms",
        type=float,
        default=25.0,
        help="longest wait of a step for the drafter, milliseconds",
    )
    parser.add_argument(
        "--draft-max-sequences", type=int, default=16, help="with more sequences running, no drafts are used"
    )
    parser.add_argument("--drafter", default="", help="HOST:PORT of the drafter; default: by discovery")
    options = parser.parse_args()
    return run_worker(Role.DECODE, options, lambda: DecodeApp(options))


if __name__ == "__main__":
    sys.exit(main())
