"""The command line that all benchmarks have in common."""

from __future__ import annotations

import argparse
import json
from typing import Any


def bench_parser(command: str, text: str | None) -> argparse.ArgumentParser:
    """The parser of `python -m bench.<command>` with `--json`. `text`: the module's, shown by `--help`."""
    parser = argparse.ArgumentParser(
        prog=f"python -m bench.{command}",
        description=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else")
    return parser


def print_report(report: Any, *, as_json: bool) -> None:
    """Print the report as JSON: on one line with `--json`, else indented."""
    print(json.dumps(report, indent=None if as_json else 2))
