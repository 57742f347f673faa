from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from supervisor.configuration.plan import ClusterConfig
from tests.support.clusters.fake_cluster import fake_config


@dataclass(frozen=True, slots=True)
class FakeCluster:
    """A run directory and a configuration whose services are fakes."""

    config: ClusterConfig

    def behave(self, **behaviours: str) -> None:
        """Make instances misbehave; names with '_' for '-'."""
        named = {name.replace("_", "-"): behaviour for name, behaviour in behaviours.items()}
        (self.config.run_dir / "behaviour.json").write_text(json.dumps(named))

    def events(self, event: str) -> list[dict[str, Any]]:
        """What the fakes noted, in order."""
        path = self.config.run_dir / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [record for record in map(json.loads, lines) if record["event"] == event]

    def but(self, **changes: Any) -> ClusterConfig:
        """The configuration with changes."""
        return replace(self.config, **changes)


@pytest.fixture
def fake(tmp_path: Path) -> FakeCluster:
    run_dir = tmp_path / "run"
    model = tmp_path / "model"
    for folder in (run_dir, model):
        folder.mkdir()
    (model / "config.json").write_text("{}")
    return FakeCluster(fake_config(run_dir, model))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[ClusterConfig]:
    """The configurations of clusters that would have been started, on a machine with CUDA devices."""
    found: list[ClusterConfig] = []

    async def note(config: ClusterConfig) -> int:
        found.append(config)
        return 0

    monkeypatch.setattr("supervisor.commands.up.run_cluster", note)
    monkeypatch.setattr("supervisor.commands.up.has_cuda_driver", lambda: True)
    return found
