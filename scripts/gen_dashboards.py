"""Write Grafana's dashboards from deploy/monitoring/panels.yaml and the metric table.

python scripts/gen_dashboards.py

A panel names metrics; the kind and name of each decide its queries, unit and description. In a
dashboard `$namespace` chooses a cluster and `$instance` processes; both match series without such a label.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from libs.common.telemetry.metric_tables.metric import Metric
from libs.common.telemetry.metric_tables.table import METRICS

MONITORING = Path(__file__).resolve().parent.parent / "deploy" / "monitoring"
FOLDER = MONITORING / "dashboards"
_SELECTOR = '{namespace=~"$namespace",instance=~"$instance"}'
_QUANTILES = (0.5, 0.95, 0.99)
_TIERS = {"dram": "memory", "nvme": "disks", "pool": "pool"}
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_COLUMNS, _WIDTH, _HEIGHT = 24, 8, 8
# All routers report the same workers, so these are not added up.
_OF_ALL_ROUTERS = "slipstream_workers"

Spec = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Query:
    """An expression of PromQL, and the legend of its series; "" = their labels."""

    expression: str
    legend: str = ""


def dashboards() -> dict[str, dict[str, Any]]:
    """Each dashboard by name, as Grafana imports it."""
    specs = yaml.safe_load((MONITORING / "panels.yaml").read_text())
    return {name: _dashboard(name, spec) for name, spec in specs.items()}


def text_of(dashboard: Spec) -> str:
    """A dashboard's file."""
    return json.dumps(dashboard, indent=1) + "\n"


def _dashboard(name: str, spec: Spec) -> dict[str, Any]:
    return {
        "uid": f"slipstream-{name}",
        "title": spec["title"],
        "tags": ["slipstream"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": list(_variables())},
        "panels": list(_layout(spec["rows"])),
    }


def _variables() -> Iterator[dict[str, Any]]:
    yield {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"}
    for name, chosen in (("namespace", ""), ("instance", '{namespace=~"$namespace"}')):
        yield {
            "name": name,
            "type": "query",
            "datasource": _SOURCE,
            "query": {"query": f"label_values(slipstream_build_info{chosen}, {name})", "refId": name},
            "refresh": 2,
            "includeAll": True,
            "multi": True,
            "allValue": ".*",
            "current": {"text": "All", "value": "$__all"},
        }


def _layout(rows: Mapping[str, list[Spec]]) -> Iterator[dict[str, Any]]:
    """Rows from top to bottom, with three panels side by side."""
    number = y = 0
    for title, panels in rows.items():
        number += 1
        position = {"x": 0, "y": y, "w": _COLUMNS, "h": 1}
        yield {"id": number, "type": "row", "title": title, "gridPos": position, "panels": []}
        y += 1
        for at, panel in enumerate(panels):
            number += 1
            line, column = divmod(at, _COLUMNS // _WIDTH)
            position = {"x": column * _WIDTH, "y": y + line * _HEIGHT, "w": _WIDTH, "h": _HEIGHT}
            yield _graph(panel, number, position)
        y += -(-len(panels) * _WIDTH // _COLUMNS) * _HEIGHT


def _graph(panel: Spec, number: int, position: Mapping[str, int]) -> dict[str, Any]:
    """Raises KeyError for a metric that does not exist, ValueError for metrics of several units."""
    if "tiers" in panel:
        names = [panel["tiers"].format(tier=tier) for tier in _TIERS]
    else:
        names = panel.get("metrics") or [panel["share"], *panel["of"]]
    metrics = [METRICS[f"slipstream_{name}"] for name in dict.fromkeys(names)]
    units = {"percentunit"} if "share" in panel else {_unit(metric) for metric in metrics}
    if len(units) != 1:
        raise ValueError(f"{panel['title']}: metrics of several units: {units}")
    return {
        "id": number,
        "type": "timeseries",
        "title": panel["title"],
        "description": "\n".join(f"{metric.name}: {metric.help}" for metric in metrics),
        "datasource": _SOURCE,
        "gridPos": position,
        "fieldConfig": {"defaults": {"unit": units.pop(), "min": 0}, "overrides": []},
        "options": {"tooltip": {"mode": "multi"}, "legend": {"displayMode": "list", "placement": "bottom"}},
        "targets": [
            {"refId": chr(ord("A") + at), "expr": query.expression, "legendFormat": query.legend}
            for at, query in enumerate(_queries(panel, metrics))
        ],
    }


def _queries(panel: Spec, metrics: list[Metric]) -> Iterator[Query]:
    if "share" in panel:
        whole = " + ".join(_summed_rate(METRICS[f"slipstream_{name}"]) for name in panel["of"])
        part = _summed_rate(METRICS[f"slipstream_{panel['share']}"])
        yield Query(f"{part} / ({whole})", panel["title"])
        return
    if "tiers" in panel:
        for metric, tier in zip(metrics, _TIERS.values(), strict=True):
            yield Query(_summed_rate(metric), tier)
        return
    by = panel.get("by", "")
    for metric in metrics:
        if metric.kind == "histogram":
            yield from _quantiles(metric, by)
        elif metric.kind == "counter":
            yield Query(_summed_rate(metric, by), f"{{{{{by}}}}}" if by else _short(metric))
        else:
            legend = f"{_short(metric)} {{{{instance}}}}" if len(metrics) > 1 else ""
            yield Query(_gauge(metric, by, at_routers=panel.get("at_routers", False)), legend)


def _quantiles(metric: Metric, by: str) -> Iterator[Query]:
    labels = f"le, {by}" if by else "le"
    rate = f"sum by ({labels}) (rate({metric.name}_bucket{_SELECTOR}[$__rate_interval]))"
    for quantile in _QUANTILES:
        legend = f"p{quantile * 100:g}"
        yield Query(f"histogram_quantile({quantile}, {rate})", f"{legend} {{{{{by}}}}}" if by else legend)


def _summed_rate(metric: Metric, by: str = "") -> str:
    fold = f"sum by ({by})" if by else "sum"
    return f"{fold} (rate({metric.name}{_SELECTOR}[$__rate_interval]))"


def _gauge(metric: Metric, by: str, *, at_routers: bool) -> str:
    series = metric.name + _SELECTOR
    if metric.name == _OF_ALL_ROUTERS:
        return f"max by ({by}) ({series})"
    if at_routers:  # a router is what has a prefix index
        series += f" and on (namespace, instance) slipstream_prefix_index_blocks{_SELECTOR}"
    return f"sum by (instance{', ' + by if by else ''}) ({series})"


def _short(metric: Metric) -> str:
    return metric.name.removeprefix("slipstream_").removesuffix("_total")


def _unit(metric: Metric) -> str:
    """Grafana's unit of what the queries give: of a counter its rate in a second."""
    stem = metric.name.removesuffix("_total")
    if metric.kind == "counter":
        return "Bps" if "_bytes" in stem else "percentunit" if stem.endswith("_seconds") else "ops"
    if stem.endswith("_seconds"):
        return "s"
    if stem.endswith("_ratio"):
        return "percentunit"
    return "bytes" if "_bytes" in stem else "short"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for each, content in dashboards().items():
        (FOLDER / f"{each}.json").write_text(text_of(content))
