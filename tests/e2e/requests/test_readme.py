"""The examples of the README, of docs/jobs.md and of examples/python run unchanged on a real cluster."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.clusters.local_cluster import LocalCluster
from tests.support.processes.command_forks import CommandForks

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples" / "python"
PRINTED = {
    "batch": r"[1-9]\d* tokens to read\nreturn -> .+\ngreeting -> Hello.+\nnone: 400 .*messages.*\n",
    "cached_session": r"0 of \d+ prompt tokens cached\n[1-9]\d* of \d+ prompt tokens cached\n",
    "completion": (
        r"\S+: [1-9]\d* tokens of context, no price\n"
        r"[1-9]\d* tokens: The warranty of a lamp lasts\nthe same answer\naborted\n"
    ),
    "job_group": r"4 succeeded, 0 failed\nthe same job\n",
    "jobs": r"Where is my order 482135\? -> .+\nHello! -> Hello.+\nCan I return a lamp\? -> .+\n",
    "choices": r"1\. .+ \((stop|length)\)\n2\. .+\n3\. .+\n",
    "stored_response": r"completed, [1-9]\d* tokens: .*12 months.*\nsystem: .+\nuser: .+\ndeleted\n",
    "stored_session": r".*12 months.*\n[1-9]\d* tokens more in the second prompt\n",
    "stream": r"Hello.+\n\d+ tokens, stop\n",
    "usage": r"(\S+ \S+: [1-9]\d* requests, [1-9]\d* tokens, no price\n)+",
    "tool_loop": r".*2026-12-04.*\n5 messages\n",
    "typed_answer": r"(order|refund|warranty), (not )?urgent\n",
}


@pytest.fixture(scope="module")
def forks() -> Iterator[CommandForks]:
    """Processes that have imported the SDK. The snippets of the pages run in new interpreters."""
    forks = CommandForks()
    yield forks
    forks.close()


def output_of_snippet(page: Path, cluster: LocalCluster) -> str:
    """What the one Python snippet of a page prints, at the cluster."""
    (code,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    assert "127.0.0.1:7000" in code
    done = subprocess.run(
        [sys.executable, "-c", code.replace("127.0.0.1:7000", cluster.grpc)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_python_example_runs(cluster: LocalCluster) -> None:
    said = output_of_snippet(ROOT / "README.md", cluster)
    cached = re.findall(r"^\d+ prompt tokens, (\d+) cached$", said, re.MULTILINE)
    assert cached[1:] == ["64"], said


def test_the_snippet_of_the_page_of_jobs_runs(cluster: LocalCluster) -> None:
    assert output_of_snippet(ROOT / "docs" / "jobs.md", cluster).strip()


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


def test_the_curl_line_reads_well_at_the_models_default_temperature(cluster: LocalCluster) -> None:
    messages = [{"role": "user", "content": "Hello!"}]
    for choice in cluster.client.chat(messages, n=32).choices:
        assert choice.text == "Hello. How can I help?"


def test_every_example_of_the_sdk_is_tested() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(PRINTED)


@pytest.mark.parametrize("name", PRINTED)
def test_an_example_of_the_sdk_prints_what_it_promises(
    cluster: LocalCluster, forks: CommandForks, name: str
) -> None:
    done = asyncio.run(forks.run_file(EXAMPLES / f"{name}.py", cluster.grpc))
    assert done.exit_code == 0, done.errors
    assert re.fullmatch(PRINTED[name], done.output), done.output
