"""The README's examples run unchanged against a real cluster."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.support.clusters.local_cluster import LocalCluster

ROOT = Path(__file__).parents[3]


def test_the_python_example_runs(cluster: LocalCluster) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert "127.0.0.1:7000" in code
    done = subprocess.run(
        [sys.executable, "-c", code.replace("127.0.0.1:7000", cluster.grpc)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"^(stop|length) \d+ prompt tokens, \d+ cached$", done.stdout, re.MULTILINE), done.stdout


def test_the_curl_line_answers(cluster: LocalCluster) -> None:
    import urllib.request

    request = urllib.request.Request(
        f"http://{cluster.http}/v1/chat/completions",
        data=b'{"messages": [{"role": "user", "content": "Hello!"}], "stream": true}',
        headers={"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        lines = answer.read().decode().strip().splitlines()
    assert lines[0].startswith("data: {")
    assert lines[-1] == "data: [DONE]"
