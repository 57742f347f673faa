"""Jobs: claims a second on SQLite, and what 1,000 queued jobs cost live requests.

    python -m bench.jobs --json
    python -m bench.jobs --only claims
    python -m bench.jobs --only kills --jobs 20000 --database postgresql

Claims: owners on one file, as many routers would be, claim and end all jobs. Live: streams arrive in a
fixed rhythm at a local cluster; rounds without jobs and with 1,000 queued jobs alternate, so that both
sides see the same machine. Prints TTFT and their ratio at p99 (at most 1.1; claims: at least 1,000).
Kills, only by name: `--jobs` jobs on a cluster of two routers, two prefill and two decode workers, of which
one is killed every few seconds, and with it SQLite's writer; PostgreSQL is restarted as well.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys

from bench.command_line import bench_parser, print_report
from bench.jobs.claims import measure_claims
from bench.jobs.kills import measure_kills
from bench.jobs.live import measure_live


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = bench_parser("jobs", __doc__)
    parser.add_argument("--only", choices=("claims", "live", "kills"))
    parser.add_argument("--jobs", type=int, default=4000, help="to claim, or to kill through")
    parser.add_argument("--owners", type=int, default=4)
    parser.add_argument("--batch", type=int, default=16, help="jobs of one claim")
    parser.add_argument("--queued", type=int, default=1000, help="jobs beside live requests")
    parser.add_argument("--rounds", type=int, default=4, help="of live requests, half with jobs")
    parser.add_argument("--requests", type=int, default=40, help="of one round")
    parser.add_argument("--rate", type=float, default=2.0, help="live requests a second")
    parser.add_argument("--database", choices=("sqlite", "postgresql"), default="sqlite", help="of kills")
    parser.add_argument("--kill-every-s", type=float, default=6.0)
    parser.add_argument("--minutes", type=float, default=15.0, help="that kills may take")
    parser.add_argument("--seed", type=int, default=1, help="of kills and their jobs")
    return parser.parse_args()


async def run(options: argparse.Namespace) -> dict[str, object]:
    """Both parts."""
    report: dict[str, object] = {"cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1)}
    if options.only == "kills":
        return {**report, "kills": await measure_kills(options)}
    if options.only != "live":
        report["claims"] = await measure_claims(options)
    if options.only != "claims":
        report["live"] = await measure_live(options)
    return report


def main() -> int:
    """Measure and print."""
    options = parse_options()
    report = asyncio.run(run(options))
    print_report(report, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
