"""The benchmarks of the router's caches."""

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


def test_the_prefix_index_is_measured_and_right() -> None:
    (row,) = bench("cache.prefix_index", "--sessions", "3", "--tokens", "2000", "--turns", "3")
    assert (row["sessions"], row["tokens"], row["right"]) == (3, 2000, 1.0)
    assert row["blocks"] > 3 * 2000 // 64
    for figure in ("first_turn_us", "request_us", "events_us"):
        assert 0 < row[figure]["p50"] <= row[figure]["p99"]


def test_the_token_cache_is_measured() -> None:
    options = ("--rounds", "2", "--turns", "2")
    rows = bench("cache.token_cache", "--kinds", "chat,agent", "--messages", "6", *options)
    assert [(row["kind"], row["messages"]) for row in rows] == [("chat", 6), ("agent", 6)]
    assert all(row["turn_us"] > 0 for row in rows)
