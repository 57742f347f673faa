"""The benchmarks of the router's caches measure both sides in separate processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]


def bench(name: str, *options: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-m", f"bench.{name}", "--json", *options],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        timeout=200,
        check=True,
    )
    return json.loads(done.stdout)


def test_the_prefix_index_is_measured_on_both_sides_and_right() -> None:
    report = bench(
        "cache.prefix_index", "--sessions", "3", "--tokens", "2000", "--turns", "3", "--against", "HEAD"
    )
    assert set(report) == {"now", "HEAD"}
    for (row,) in report.values():
        assert (row["sessions"], row["tokens"], row["right"]) == (3, 2000, 1.0)
        assert row["blocks"] > 3 * 2000 // 64
        for figure in ("first_turn_us", "request_us", "events_us"):
            assert 0 < row[figure]["p50"] <= row[figure]["p99"]


def test_token_memory_is_measured_on_both_sides() -> None:
    options = ("--rounds", "2", "--turns", "2", "--against", "HEAD")
    rows = bench("cache.token_cache", "--kinds", "chat,agent", "--messages", "6", *options)
    assert [(row["kind"], row["messages"]) for row in rows] == [("chat", 6), ("agent", 6)]
    for row in rows:
        assert set(row["turn_us"]) == {"now", "HEAD"} and min(row["turn_us"].values()) > 0
        assert row["ratio"]["HEAD"] > 0
