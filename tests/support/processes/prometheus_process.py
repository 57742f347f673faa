"""A real Prometheus and Alertmanager that watch a local cluster by the shipped files, fast.

with Watched(tmp_path, cluster.run_dir) as watched:
    until(lambda: watched.firing("SlipstreamDiskUnavailable"), what="the alert")
"""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
import yaml

from tests.support.network.http_collector import HttpCollector
from tests.support.network.ports import own_ports

MONITORING = Path(__file__).resolve().parents[3] / "deploy" / "monitoring"
# In place of the shipped 15 s and of minutes: only times differ from the files in use.
_EVERY, _FOR = "1s", "2s"
_START_S = 100.0


def needs(*programs: str) -> None:
    """Skip the test where a program is missing."""
    for program in programs:
        if shutil.which(program) is None:
            pytest.skip(f"needs {program} (Debian: prometheus, prometheus-alertmanager)")


class Watched:
    """Both processes, and a webhook that Alertmanager calls."""

    def __init__(self, directory: Path, run_dir: Path) -> None:
        """Files go to `directory`; `run_dir` is that of the cluster."""
        needs("prometheus", "prometheus-alertmanager")
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self._hook = HttpCollector()
        self._ports = own_ports(2)
        self._running: list[subprocess.Popen[bytes]] = []
        self._write_files(run_dir)

    def __enter__(self) -> Watched:
        self._hook.__enter__()
        prometheus, alertmanager = self._ports
        self._start(
            *("prometheus-alertmanager", f"--config.file={self._directory}/alertmanager.yaml"),
            *(f"--storage.path={self._directory}/alertmanager", "--cluster.listen-address="),
            f"--web.listen-address=127.0.0.1:{alertmanager}",
        )
        self._start(
            *("prometheus", f"--config.file={self._directory}/prometheus.yaml"),
            *(f"--storage.tsdb.path={self._directory}/tsdb", f"--web.listen-address=127.0.0.1:{prometheus}"),
        )
        try:
            self._wait_ready()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in reversed(self._running):
            process.kill()
            process.wait()
        self._hook.__exit__(None, None, None)

    def told(self) -> list[dict[str, Any]]:
        """Each alert of each call of the webhook, in order: `status`, `labels`, `annotations`."""
        return [alert for body in self._hook.bodies.get("/hook", ()) for alert in json.loads(body)["alerts"]]

    def firing(self, name: str, **labels: str) -> bool:
        """Whether the webhook last heard that an alert with these labels fires."""
        states = [alert["status"] for alert in self.told() if self._is(alert, name, labels)]
        return bool(states) and states[-1] == "firing"

    def resolved(self, name: str, **labels: str) -> bool:
        """Whether the webhook last heard that such an alert ended."""
        states = [alert["status"] for alert in self.told() if self._is(alert, name, labels)]
        return bool(states) and states[-1] == "resolved"

    def names(self) -> set[str]:
        """The names of all alerts that the webhook heard of."""
        return {alert["labels"]["alertname"] for alert in self.told()}

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """Labels and value of each series now."""
        url = f"http://127.0.0.1:{self._ports[0]}/api/v1/query?" + urllib.parse.urlencode(
            {"query": expression}
        )
        with urllib.request.urlopen(url, timeout=30) as answer:
            result = json.load(answer)["data"]["result"]
        return [(series["metric"], float(series["value"][1])) for series in result]

    @staticmethod
    def _is(alert: dict[str, Any], name: str, labels: dict[str, str]) -> bool:
        wanted = {"alertname": name, **labels}
        return all(alert["labels"].get(label) == value for label, value in wanted.items())

    def _write_files(self, run_dir: Path) -> None:
        rules = yaml.safe_load((MONITORING / "alerts.yaml").read_text())
        for rule in (rule for group in rules["groups"] for rule in group["rules"]):
            if "for" in rule:
                rule["for"] = _FOR
        config = yaml.safe_load((MONITORING / "prometheus.yaml").read_text())
        config["global"] = {"scrape_interval": _EVERY, "evaluation_interval": _EVERY}
        (job,) = config["scrape_configs"]
        (discovery,) = job["file_sd_configs"]
        (path,) = discovery["files"]
        discovery["files"] = [str(run_dir.resolve() / Path(path).name)]
        discovery["refresh_interval"] = _EVERY
        (manager,) = config["alerting"]["alertmanagers"]
        manager["static_configs"] = [{"targets": [f"127.0.0.1:{self._ports[1]}"]}]
        receiver = {"name": "hook", "webhook_configs": [{"url": f"{self._hook.endpoint}/hook"}]}
        route = {"receiver": "hook", "group_by": ["..."], "group_wait": "1s", "group_interval": "1s"}
        for name, content in {
            "alerts": rules,
            "prometheus": config,
            "alertmanager": {"route": route, "receivers": [receiver]},
        }.items():
            (self._directory / f"{name}.yaml").write_text(yaml.safe_dump(content))

    def _start(self, *command: str) -> None:
        with (self._directory / f"{command[0]}.log").open("ab") as log:
            self._running.append(subprocess.Popen(command, stdout=log, stderr=log))

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + _START_S
        for port in self._ports:
            while not _answers(f"http://127.0.0.1:{port}/-/ready"):
                if time.monotonic() > deadline or any(each.poll() is not None for each in self._running):
                    logs = [file.read_text()[-2000:] for file in self._directory.glob("*.log")]
                    raise RuntimeError(f"Prometheus did not start: {logs}")
                time.sleep(0.1)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=1) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
