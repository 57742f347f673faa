"""Lines about the progress of a benchmark, beside its result."""

from __future__ import annotations

import sys


def say(line: str) -> None:
    """Print a line to stderr, so that stdout has the result only."""
    print(line, file=sys.stderr, flush=True)
