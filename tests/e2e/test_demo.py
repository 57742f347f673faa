"""`make demo` as a script runs it: exit status 0, and one JSON object on its last line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
KEYS = {
    "ok", "turns", "prompt_tokens", "cached_tokens", "completion_tokens", "ttft_ms_p50", "tokens_per_s",
    "acceptance_length", "kv_bytes_pulled", "transport", "kvstore_blocks", "orphaned_blocks", "ready_s",
    "rss_mb",
}  # fmt: skip


def test_the_demo_succeeds_and_reports() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench.demo"],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=400,
    )
    report = json.loads(done.stdout.splitlines()[-1])
    assert set(report) == KEYS
    assert done.returncode == 0, done.stdout
    assert report["ok"] is True
    assert report["turns"] >= 4
    assert report["orphaned_blocks"] == 0
    assert report["acceptance_length"] > 1
    assert 0 < report["cached_tokens"] < report["prompt_tokens"]
    assert report["kv_bytes_pulled"] > 0
    assert report["kvstore_blocks"]["dram"] > 0
    assert report["rss_mb"] < 6000


def test_a_demo_that_cannot_start_says_why_on_its_last_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = subprocess.run(
        [sys.executable, "-m", "bench.demo", "--run-dir", str(tmp_path / "file")],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 1
    report = json.loads(done.stdout.splitlines()[-1])
    assert report == {"ok": False, "error": f"{tmp_path / 'file'} cannot be the run directory: File exists"}
