"""Jobs: claims a second on SQLite, and what 1,000 queued jobs cost live requests.

    python -m bench.jobs --json
    python -m bench.jobs --only claims

Claims: owners on one file, as many routers would be, claim and end all jobs. Live: streams arrive in a
fixed rhythm at a local cluster; rounds without jobs and with 1,000 queued jobs alternate, so that both
sides see the same machine. Prints TTFT and their ratio at p99 (at most 1.1; claims: at least 1,000).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys

from bench.jobs.claims import measure_claims
from bench.jobs.live import measure_live


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.jobs", description=__doc__)
    parser.add_argument("--only", choices=("claims", "live"))
    parser.add_argument("--jobs", type=int, default=4000, help="to claim")
    parser.add_argument("--owners", type=int, default=4)
    parser.add_argument("--batch", type=int, default=16, help="jobs of one claim")
    parser.add_argument("--queued", type=int, default=1000, help="jobs beside live requests")
    parser.add_argument("--rounds", type=int, default=4, help="of live requests, half with jobs")
    parser.add_argument("--requests", type=int, default=40, help="of one round")
    parser.add_argument("--rate", type=float, default=2.0, help="live requests a second")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    return parser.parse_args()


async def run(options: argparse.Namespace) -> dict[str, object]:
    """Both parts."""
    report: dict[str, object] = {"cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1)}
    if options.only != "live":
        report["claims"] = await measure_claims(options)
    if options.only != "claims":
        report["live"] = await measure_live(options)
    return report


def main() -> int:
    """Measure and print."""
    options = parse_options()
    report = asyncio.run(run(options))
    print(json.dumps(report, indent=None if options.json else 2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
