"""A pod that sends requests while a test disturbs the cluster."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.k8s.cluster.kubectl import Kubectl

NAMESPACE = "slipstream-load"
ROUTER = "slipstream-router.slipstream.svc"
WAIT_S = 420.0
_SCRIPT = Path(__file__).with_name("load_client.py")


class Load:
    """`with`: requests run inside the block. Its end waits for the answers that run."""

    def __init__(
        self,
        kubectl: Kubectl,
        image: str,
        api_key: str,
        *,
        name: str = "load",
        each: int = 2,
        pollers: int = 0,
        pause_s: float = 0.0,
    ) -> None:
        """`each`: requests of a kind at a time, `pause_s` apart. `pollers`: clients that only ask routers."""
        self._kubectl, self._image, self._api_key = kubectl, image, api_key
        self._name = name
        self._arguments = [ROUTER, "7000", "8000", str(each), str(pollers), str(pause_s)]

    def __enter__(self) -> Load:
        confined = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True}
        container = {
            "name": "load",
            "image": self._image,
            "command": ["python", "/script/load_client.py", *self._arguments],
            "env": [{"name": "API_KEY", "value": self._api_key}],
            "securityContext": {**confined, "capabilities": {"drop": ["ALL"]}},
            "volumeMounts": [{"name": "script", "mountPath": "/script"}],
            "resources": {"requests": {"cpu": "50m", "memory": "128Mi"}},
        }
        spec = {
            "restartPolicy": "Never",
            "priorityClassName": "slipstream-control",  # a full node keeps it
            "terminationGracePeriodSeconds": 300,
            "automountServiceAccountToken": False,
            "securityContext": {"runAsNonRoot": True, "runAsUser": 65532},
            "containers": [container],
            "volumes": [{"name": "script", "configMap": {"name": "load"}}],
        }
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": self._name}, "spec": spec}
        script = {"load_client.py": _SCRIPT.read_text()}
        self._kubectl("delete", "pod", self._name, "--ignore-not-found", "--wait", timeout_s=WAIT_S)
        self._kubectl.apply(
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "load"}, "data": script}, pod
        )
        self.wait_done(4)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._kubectl("delete", "pod", self._name, "--now", "--ignore-not-found", timeout_s=WAIT_S)

    def counts(self) -> dict[str, Any]:
        """The last line of the pod's log; no requests before the first one."""
        lines = [line for line in self._logs().splitlines() if line.startswith("{")]
        nothing = {"done": 0, "failed": 0, "errors": []}
        return json.loads(lines[-1]) if lines else {"sdk": nothing, "http": nothing, "ended": False}

    def _logs(self) -> str:
        try:
            return self._kubectl("logs", self._name, "--tail=20")
        except AssertionError:  # it is not started yet
            return ""

    def wait_done(self, more: int) -> None:
        """Return when so many more requests of each kind ended. Raises AssertionError at the deadline."""
        first = self.counts()
        deadline_s = time.monotonic() + WAIT_S
        while any(
            now[kind]["done"] + now[kind]["failed"] < first[kind]["done"] + first[kind]["failed"] + more
            for now in (self.counts(),)
            for kind in ("sdk", "http")
        ):
            assert time.monotonic() < deadline_s, f"no answers: {self.counts()}"
            time.sleep(0.5)

    def reaches(self, host: str, port: int) -> bool:
        """Whether the pod can connect there within a few seconds."""
        program = (
            "import socket, sys\n"
            "try: socket.create_connection((sys.argv[1], int(sys.argv[2])), 5).close()\n"
            "except OSError: print('closed')\n"
            "else: print('open')"
        )
        said = self._kubectl("exec", self._name, "--", "python", "-c", program, host, str(port))
        return said.strip() == "open"

    def finish(self) -> dict[str, Any]:
        """Stop the load; the counts when the last answer is there."""
        self._kubectl("exec", self._name, "--", "python", "-c", "import os; os.kill(1, 15)")
        deadline_s = time.monotonic() + WAIT_S
        while not (counts := self.counts())["ended"]:
            assert time.monotonic() < deadline_s, f"answers do not end: {counts}"
            time.sleep(0.5)
        return counts
