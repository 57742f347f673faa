"""The alerts of deploy/monitoring, and promtool where it is installed."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from libs.common.telemetry.metric_tables.table import METRICS

ROOT = Path(__file__).resolve().parents[2]
MONITORING = ROOT / "deploy" / "monitoring"
CASES = Path(__file__).with_name("alerts_test.yaml")

Rule = Mapping[str, Any]
# libyaml's, where PyYAML has it: each process of the tests reads these files.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_PARTS = {"histogram": ("_bucket", "_count", "_sum"), "counter": ("",), "gauge": ("",)}


def load_yaml(path: Path) -> Any:
    """What a file holds."""
    return _LOADER(path.read_text()).get_single_data()


@functools.cache
def rules() -> tuple[Rule, ...]:
    """Every rule of the file, in order."""
    groups = load_yaml(MONITORING / "alerts.yaml")["groups"]
    return tuple(rule for group in groups for rule in group["rules"])


def alerts() -> list[Rule]:
    """The rules that alert."""
    return [rule for rule in rules() if "alert" in rule]


@functools.cache
def exported_names() -> frozenset[str]:
    """The series of the metric table, as Prometheus names them."""
    return frozenset(metric.name + part for metric in METRICS.values() for part in _PARTS[metric.kind])


def unknown_names(expression: str) -> Iterator[str]:
    """What an expression reads that no service exports and no rule records."""
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    for name in re.findall(r"(?:slipstream|vllm)[:_][a-z0-9_:]+", re.sub(r'"[^"]*"', '""', expression)):
        if name not in exported_names() | recorded:
            yield name


def needs_promtool() -> str:
    """promtool's path; skips the test where it is absent."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("needs promtool (Debian: prometheus) to evaluate alerts and dashboards")
    return promtool


def run_promtool(*arguments: str) -> str:
    """Its output. Raises AssertionError with it when it finds a fault."""
    done = subprocess.run([needs_promtool(), *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout
