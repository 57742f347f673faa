"""python -m bench.images: size and start time of each image, as one JSON object."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from bench.images.cluster import ContainerCluster
from bench.images.image import TIERS, mounted, why_no_containers
from slipstream import __version__
from slipstream.errors import FailedPrecondition


def report(tag: str, prefix: str) -> dict[str, dict[str, float]]:
    """By tier: the size of the root in MB (10^6 bytes), and the seconds from `runc run` to readiness."""
    with ExitStack() as stack:
        images = {tier: stack.enter_context(mounted(f"{prefix}{tier}:{tag}")) for tier in TIERS}
        work_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slipstream-images-")))
        with ContainerCluster(images, work_dir) as cluster:
            return {
                tier: {
                    "size_mb": round(images[tier].size_bytes() / 1e6),
                    "ready_s": round(cluster.start_s[tier], 1),
                }
                for tier in TIERS
            }


def main() -> int:
    """Print the report."""
    parser = argparse.ArgumentParser(prog="python -m bench.images", description=__doc__)
    parser.add_argument("--tag", default=__version__, help="tag of the images (default: %(default)s)")
    parser.add_argument("--prefix", default="localhost/slipstream-", help="name before the tier")
    arguments = parser.parse_args()
    if reason := why_no_containers():
        print(f"slipstream: {reason}", file=sys.stderr)
        return 1
    try:
        print(json.dumps(report(arguments.tag, arguments.prefix), indent=2))
    except FailedPrecondition as error:
        print(f"slipstream: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
