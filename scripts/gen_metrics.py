"""Write docs/metrics.md from the metric table and the table of aliases.

python scripts/gen_metrics.py
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from libs.common.telemetry.metric_tables.aliases import ALIASES, Alias
from libs.common.telemetry.metric_tables.kvstore import TIER_METRICS
from libs.common.telemetry.metric_tables.metric import Metric
from libs.common.telemetry.metric_tables.table import SECTIONS, SERVICES

PAGE = Path(__file__).resolve().parent.parent / "docs" / "metrics.md"
_HEAD = """# Metrics

Made from the metric table by `python scripts/gen_metrics.py`; do not edit.

Every process serves its series with `GET /metrics` of its admin port (`--admin-http`), as Prometheus' text or
OpenMetrics. Its log and `slipstream status --json` name the port. Off loopback it needs an operator or the
scrape token (`docs/security.md`).

- Times are seconds, sizes bytes, shares 0 to 1. Names on `_total` are counters; the others are gauges, unless
  the row says histogram. Braces hold labels. Counters and histograms without labels begin at 0.
- `process_*` are those of Prometheus' client libraries: CPU, memory, descriptors, start time.
- With traces on (`docs/tracing.md`), histograms of a request's times have exemplars.
"""
_ALIASES = """## Names of vLLM

The same values under vLLM's names, with the label `model_name`. A router has all but those of drafts
(`spec_decode`), which decode workers have. Prefill and decode workers have those of requests and pages too.
Do not add a router's values to its workers'.

"""


def render() -> str:
    """The page."""
    lines = [_HEAD]
    for section in SECTIONS:
        services = "all" if section.services == SERVICES else ", ".join(section.services)
        lines += [f"## {section.title} ({services})", ""]
        if section.metrics is TIER_METRICS:
            lines += ["`docs/kvstore-metrics.md` has the metrics of each tier.", ""]
        else:
            lines += [*map(_line, section.metrics), ""]
    return "\n".join([*lines, _ALIASES, *map(_alias_line, ALIASES)]) + "\n"


def _line(metric: Metric) -> str:
    kind = " (histogram)" if metric.kind == "histogram" else ""
    return f"- `{metric.name}{_braces(metric.labels)}`{kind}: {metric.help}"


def _alias_line(alias: Alias) -> str:
    source = f"`{alias.source}`"
    if alias.only is not None:
        source += f', {alias.only[0]} "{alias.only[1]}"'
    added = [f'{name}="{value}"' for name, value in alias.adds.items()]
    return f"- `{alias.name}{_braces((*alias.labels.values(), *added))}`: {source}"


def _braces(labels: Sequence[str]) -> str:
    return "{" + ",".join(labels) + "}" if labels else ""


if __name__ == "__main__":
    PAGE.write_text(render())
