"""kubectl against the cluster that KUBECONFIG names."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

NAMESPACE = "slipstream"
ENDED = ("Failed", "Succeeded")  # evicted pods stay as Failed
_CALL_S = 120.0


class Kubectl:
    """Runs commands in one namespace. They raise AssertionError with kubectl's words."""

    def __init__(self, path: str, namespace: str = NAMESPACE) -> None:
        self._path, self._namespace = path, namespace

    def __call__(self, *arguments: str, given: str | None = None, timeout_s: float = _CALL_S) -> str:
        """The output of `kubectl ARGUMENTS`, with `given` as its input."""
        done = subprocess.run(
            [self._path, "--namespace", self._namespace, *arguments],
            input=given,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        assert done.returncode == 0, f"kubectl {' '.join(arguments)}: {done.stderr}"
        return done.stdout

    def json(self, *arguments: str) -> Any:
        """The output as JSON."""
        return json.loads(self(*arguments, "-o", "json"))

    def apply(self, *objects: Any) -> None:
        """Apply objects."""
        self("apply", "-f", "-", given=json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}))

    def pods(self, tier: str) -> list[str]:
        """The names of the running pods of a tier, the oldest first."""
        found = self.json("get", "pods", "-l", f"app.kubernetes.io/component={tier}")["items"]
        alive = [
            pod
            for pod in found
            if "deletionTimestamp" not in pod["metadata"] and pod["status"]["phase"] not in ENDED
        ]
        alive.sort(key=lambda pod: str(pod["metadata"]["creationTimestamp"]))
        return [pod["metadata"]["name"] for pod in alive]

    def wait_rolled(self, workload: str, *, timeout_s: float) -> None:
        """Return when the rollout of kind/name is complete."""
        self("rollout", "status", workload, f"--timeout={timeout_s:.0f}s", timeout_s=timeout_s + 10)

    def evict(self, pod: str) -> tuple[int, Any]:
        """The status and answer of the API server to one Eviction. A drain repeats refused ones."""
        path = f"/api/v1/namespaces/{self._namespace}/pods/{pod}/eviction"
        eviction = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": pod, "namespace": self._namespace},
        }
        with self._printing(["proxy", "--port=0"]) as proxy:
            request = urllib.request.Request(
                f"http://{proxy}{path}",
                data=json.dumps(eviction).encode(),
                headers={"Content-Type": "application/json"},
            )
            try:
                with urllib.request.urlopen(request, timeout=_CALL_S) as answer:
                    return answer.status, json.load(answer)
            except urllib.error.HTTPError as refused:
                return refused.code, json.load(refused)

    @contextlib.contextmanager
    def forwarded(self, target: str, port: int) -> Iterator[str]:
        """A local endpoint that leads to a port of `target`, inside the block."""
        with self._printing(["port-forward", target, f":{port}"]) as endpoint:
            yield endpoint

    @contextlib.contextmanager
    def _printing(self, arguments: list[str]) -> Iterator[str]:
        """The local endpoint that a command prints in its first line. It ends with the block."""
        command = [self._path, "--namespace", self._namespace, *arguments]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            try:
                assert process.stdout is not None
                line = process.stdout.readline()
                bound = re.search(r"127\.0\.0\.1:(\d+)", line)
                assert bound is not None, line + process.stdout.read()
                yield f"127.0.0.1:{bound.group(1)}"
            finally:
                process.terminate()
