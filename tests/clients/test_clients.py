"""Unmodified client libraries against a real cluster with the shipped model (make test-clients).

With SLIPSTREAM_WRITE_RESULTS=1 a run stores what it found in results.json and in the table of docs/api.md.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from supervisor.configuration.plan import ClusterConfig
from tests.clients.client_scripts import HERE, NODE_MODULES, RESULTS, ROOT, SCENARIOS, SCRIPTS, ClientScript
from tests.clients.results_table import PAGE, render
from tests.support.clusters.local_cluster import LocalCluster
from tests.support.fixture_dirs import lasting_dir

pytestmark = [pytest.mark.clients, pytest.mark.timeout(600)]

BODIES = sorted((HERE / "bodies").glob("*.json"))


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
    with (
        lasting_dir(request, "clients") as run_dir,
        LocalCluster(ClusterConfig(run_dir=run_dir, prefill=1, decode=1, drafts="off")) as running,
    ):
        yield running


@pytest.fixture(scope="module")
def reports() -> Iterator[list[dict[str, Any]]]:
    """The reports of this run, stored at its end where that is asked for and all clients ran."""
    found: list[dict[str, Any]] = []
    yield found
    if os.environ.get("SLIPSTREAM_WRITE_RESULTS") and len(found) == len(SCRIPTS):
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")
        PAGE.write_text(render(PAGE.read_text(), found))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_a_client_passes_its_scenarios(
    cluster: LocalCluster, script: ClientScript, reports: list[dict[str, Any]]
) -> None:
    if not script.is_set_up:
        pytest.skip(f"the environment {script.environment} is missing: make test-clients sets it up")
    assert script.command(), f"the environment {script.environment} is there, and nothing runs its scripts"
    report = script.run(cluster.http)
    reports.append(report)
    results = report["results"]
    assert tuple(results) == SCENARIOS
    faults = ("fails", "not served")
    assert {name: found for name, found in results.items() if found["status"] in faults} == {}
    cluster.assert_idle()


@pytest.mark.parametrize("path", BODIES, ids=lambda path: path.stem)
def test_the_recorded_requests_of_a_load_generator_are_answered(cluster: LocalCluster, path: Path) -> None:
    """The bodies are what guidellm and aiperf sent, with their headers; only the model's name is ours."""
    recorded = json.loads(path.read_text())
    assert recorded["requests"]
    for request in recorded["requests"]:
        with _send(cluster.http, request) as answer:
            text = answer.read().decode()
        assert answer.status == 200
        if request["body"].get("stream"):
            events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
            assert events[-1] == "[DONE]"
            chunks = [json.loads(event) for event in events[:-1]]
            assert any(chunk.get("usage", {}).get("completion_tokens") for chunk in map(_full, chunks))
        else:
            assert json.loads(text)["usage"]["completion_tokens"] > 0


def test_the_node_example_runs(cluster: LocalCluster) -> None:
    if not NODE_MODULES.is_dir():
        pytest.skip("the packages of node are missing: make test-clients sets them up")
    node = shutil.which("node")
    assert node, "the packages of node are there, and node is not"
    done = subprocess.run(
        [node, str(ROOT / "examples" / "node" / "chat.cjs"), cluster.grpc],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "NODE_PATH": str(NODE_MODULES)},
    )
    assert done.returncode == 0, done.stderr
    assert "12 months" in done.stdout
    assert "stop" in done.stdout.splitlines()[-1]


def _full(chunk: dict[str, Any]) -> dict[str, Any]:
    """The chunk without null fields."""
    return {name: value for name, value in chunk.items() if value is not None}


def _send(http: str, recorded: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        f"http://{http}{recorded['path']}",
        data=json.dumps(recorded["body"]).encode(),
        headers=recorded["headers"],
    )
    return urllib.request.urlopen(request, timeout=200)
