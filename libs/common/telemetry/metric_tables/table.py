"""The table of all metrics, by the services that export them. `docs/metrics.md` is made from it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from libs.common.telemetry.metric_tables.kvstore import KVSTORE_METRICS, TIER_METRICS
from libs.common.telemetry.metric_tables.metric import Metric, counter, gauge
from libs.common.telemetry.metric_tables.router import (
    ADMISSION_METRICS,
    JOB_METRICS,
    METERING_METRICS,
    REQUEST_METRICS,
    ROUTER_METRICS,
)
from libs.common.telemetry.metric_tables.worker import (
    DECODE_METRICS,
    DRAFTER_METRICS,
    ENGINE_METRICS,
    PREFILL_METRICS,
)

SERVICES = ("router", "prefill", "decode", "drafter", "kvstore")
_ENGINES = ("prefill", "decode")


@dataclass(frozen=True, slots=True)
class MetricSection:
    """Metrics of one subject, and the services that export them."""

    title: str
    services: tuple[str, ...]
    metrics: tuple[Metric, ...]


_EVERY = (
    gauge("build_info", "1; the running version.", "version", "python"),
    gauge("requests_running", "Requests (sequences, pins, streams) that run here."),
    gauge("requests_waiting", "Requests that wait here for capacity or a worker."),
    gauge("draining", "1 while the process drains."),
    gauge("etcd_unavailable", "1 while etcd lacks this process's record."),
    gauge("event_loop_tasks", "Tasks that have not ended."),
    gauge("certificate_expires_unix_seconds", "End of the certificate; with TLS only."),
    counter("full_collections_total", "Garbage collections of the oldest generation."),
    counter("grpc_malformed_total", "Malformed gRPC messages."),
    counter("http_malformed_total", "Malformed HTTP messages."),
    counter("http_connections_refused_total", "HTTP connections closed at the bound."),
)
_ACCEPTED = (counter("requests_total", "Requests accepted."),)
_KV_CACHE = (gauge("kv_cache_info", "1; the KV cache of the decode tier.", "block_tokens", "blocks"),)
_READERS = (
    counter("feature_bytes_pulled_total", "Draft features read from workers."),
    counter("kv_checksum_failures_total", "KV and draft features with a wrong checksum."),
)
_KV_HOLDERS = (
    gauge("kv_occupancy_ratio", "Share of a KV tier in use.", "tier"),
    counter("kv_bytes_pulled_total", "KV bytes read from peers."),
    gauge("kv_quarantined_bytes", "Memory that late bytes of failed reads may reach."),
    gauge("kv_blocks_leaked", "Blocks held whose owner is gone; always 0."),
)

SECTIONS: tuple[MetricSection, ...] = (
    MetricSection("All services", SERVICES, _EVERY),
    MetricSection("Requests accepted", ("router", *_ENGINES), _ACCEPTED),
    MetricSection("Requests", ("router",), REQUEST_METRICS),
    MetricSection("Admission", ("router",), ADMISSION_METRICS),
    MetricSection("Metering", ("router",), METERING_METRICS),
    MetricSection("Router", ("router",), ROUTER_METRICS),
    MetricSection("Jobs", ("router",), JOB_METRICS),
    MetricSection("KV cache", ("router", *_ENGINES), _KV_CACHE),
    MetricSection("KV", (*_ENGINES, "kvstore"), _KV_HOLDERS),
    MetricSection("Reads by the KV transport", (*_ENGINES, "drafter", "kvstore"), _READERS),
    MetricSection("Engine", _ENGINES, ENGINE_METRICS),
    MetricSection("Prefill", ("prefill",), PREFILL_METRICS),
    MetricSection("Decode", ("decode",), DECODE_METRICS),
    MetricSection("Drafter", ("drafter",), DRAFTER_METRICS),
    MetricSection("Tiers of the kvstore", ("kvstore",), TIER_METRICS),
    MetricSection("Kvstore", ("kvstore",), KVSTORE_METRICS),
)
METRICS: Mapping[str, Metric] = {metric.name: metric for section in SECTIONS for metric in section.metrics}


def metrics_of(service: str) -> tuple[Metric, ...]:
    """The metrics that a service exports, in the order of the table."""
    return tuple(metric for section in SECTIONS if service in section.services for metric in section.metrics)


def zero_metrics(service: str, known: Collection[str]) -> tuple[Metric, ...]:
    """The metrics that are exported as 0 until they have a value: counters and histograms without labels.

    `known`: names of the metrics that have one.
    """
    return tuple(
        metric
        for metric in metrics_of(service)
        if metric.kind != "gauge" and not metric.labels and metric.name not in known
    )
