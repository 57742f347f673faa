"""Write docs/metrics.md from the metric table and the table of aliases.

python scripts/gen_metrics.py
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from libs.common.telemetry.metric_tables.aliases import ALIASES, Alias
from libs.common.telemetry.metric_tables.metric import Metric
from libs.common.telemetry.metric_tables.table import SECTIONS, SERVICES

PAGE = Path(__file__).resolve().parent.parent / "docs" / "metrics.md"
_HEAD = """# Metrics

Made from the metric table by `python scripts/gen_metrics.py`; do not edit.

Every service has an admin port (`--admin-http`, default any free port on loopback) with `GET /metrics`: the
series of that process alone, as Prometheus' text, or as OpenMetrics for a reader whose Accept header asks for
it. The log names the port at the start; `slipstream status --json` and the service's record in etcd have it.

- Names begin with `slipstream_`. Times are seconds, sizes bytes, shares 0 to 1. Totals are exact up to 2^53.
- No series has a label `instance` or `job`: Prometheus adds them. Of several processes of one router
  (`--processes`) each has its own port.
- Counters and histograms without labels are there from the start, at 0. So are the series of usual finish
  reasons, of the ends of jobs, and of deliveries of webhooks.
- `process_*` are those of Prometheus' client libraries: CPU, memory, descriptors, start time.
- Exemplars: with traces on (`docs/tracing.md`), buckets of the request's times and of `prefill_seconds` and
  `handoff_transfer_seconds` name the last span (`trace_id`, `span_id`), in OpenMetrics and by OTLP.
- Off loopback `/metrics` needs an operator, or the scrape token (`docs/security.md`).
- `docs/kvstore-metrics.md` compares the tiers of the kvstore.
"""
_ALIASES = """## Names of vLLM

The same values under the names that vLLM's dashboards and the inference gateway's endpoint pickers read, with
the label `model_name`. A router has all of them but those of drafts (`spec_decode`), which decode workers
have. Prefill and decode workers have those of requests and pages too, with the name of the model's directory.
Do not add a router's and its workers' together. A preemption is a request that went back to a queue.

| Name | Value of | Labels |
|---|---|---|"""


def render() -> str:
    """The page."""
    lines = [_HEAD]
    for section in SECTIONS:
        services = "all" if section.services == SERVICES else ", ".join(section.services)
        lines += [f"## {section.title} ({services})", "", "| Metric | Kind | Labels | Meaning |"]
        lines += ["|---|---|---|---|", *map(_line, section.metrics), ""]
    return "\n".join([*lines, _ALIASES, *_alias_lines()]) + "\n"


def _line(metric: Metric) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    return f"| `{metric.name}` | {metric.kind} | {labels} | {metric.help} |"


def _alias_lines() -> Iterator[str]:
    for alias in ALIASES:
        source = f"`{alias.source}`"
        if alias.only is not None:
            source += f', {alias.only[0]} "{alias.only[1]}"'
        yield f"| `{alias.name}` | {source} | {_labels(alias)} |"


def _labels(alias: Alias) -> str:
    added = [f'{name}="{value}"' for name, value in alias.adds.items()]
    return ", ".join(f"`{name}`" for name in (*alias.labels.values(), *added, "model_name"))


if __name__ == "__main__":
    PAGE.write_text(render())
