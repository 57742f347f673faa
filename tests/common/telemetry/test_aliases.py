"""vLLM's published dashboard and the inference gateway's picker work on a router's scrape.

The expressions below are facts of vLLM's Grafana dashboard: names, functions and labels that it reads.
A small evaluator of just these functions runs them over two scrapes; promtool checks the text.
"""

from __future__ import annotations

import math
import re
import shutil
import subprocess

import pytest
from prometheus_client.parser import text_string_to_metric_families

from libs.common.telemetry.aliases import ALIASES
from libs.common.telemetry.counters import Counters
from libs.common.telemetry.exposition import render_metrics
from libs.common.telemetry.metric_table import METRICS

MODEL = "kimi"
WINDOW_S = 60.0
_SECONDS = (
    *("time_to_first_token", "inter_token_latency", "time_per_output_token", "e2e_request_latency"),
    *("request_queue_time", "request_prefill_time", "request_decode_time"),
)
QUANTILES = [
    f"histogram_quantile({q}, sum by(le) (rate(vllm:{name}_seconds_bucket{{model_name=MODEL}}[WINDOW])))"
    for name in _SECONDS[:4]
    for q in ("0.99", "0.95", "0.9", "0.5")
]
MEANS = [
    f"rate(vllm:{name}_seconds_sum{{model_name=MODEL}}[WINDOW])"
    f" / rate(vllm:{name}_seconds_count{{model_name=MODEL}}[WINDOW])"
    for name in _SECONDS
]
RATES = [
    f"rate(vllm:{name}{{model_name=MODEL}}[WINDOW])"
    for name in (
        *("prompt_tokens_total", "generation_tokens_total", "prefix_cache_queries_total"),
        *("prefix_cache_hits_total", "request_queue_time_seconds_sum", "request_prefill_time_seconds_sum"),
        *("request_decode_time_seconds_sum", "request_max_num_generation_tokens_sum"),
    )
]
HEATMAPS = [
    f"sum by(le) (increase(vllm:{name}_bucket{{model_name=MODEL}}[WINDOW]))"
    for name in ("request_prompt_tokens", "request_generation_tokens")
]
FINISHES = "sum by(finished_reason) (increase(vllm:request_success_total{model_name=MODEL}[WINDOW]))"
GATEWAY = ("vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc")

Vector = dict[frozenset[tuple[str, str]], float]
Scrape = dict[str, Vector]


def scrape(counters: Counters) -> Scrape:
    """What Prometheus keeps of one scrape: samples by name and labels."""
    found: Scrape = {}
    text = render_metrics(counters, service="router", model=MODEL)[0].decode()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[frozenset(sample.labels.items())] = sample.value
    return found


def evaluate(expression: str, before: Scrape, after: Scrape) -> Vector:
    """The value of an expression of the forms above."""
    if match := re.fullmatch(r"(.*\S) / (.*)", expression):
        left, right = (evaluate(part, before, after) for part in match.groups())
        return {labels: value / right[labels] for labels, value in left.items()}
    if match := re.fullmatch(r"histogram_quantile\(([\d.]+), (.*)\)", expression):
        return {frozenset(): quantile(float(match[1]), evaluate(match[2], before, after))}
    if match := re.fullmatch(r"sum by\((\w+)\) \((.*)\)", expression):
        sums: Vector = {}
        for labels, value in evaluate(match[2], before, after).items():
            kept = frozenset(pair for pair in labels if pair[0] == match[1])
            sums[kept] = sums.get(kept, 0.0) + value
        return sums
    if match := re.fullmatch(r"(rate|increase)\((.*)\[WINDOW\]\)", expression):
        early, late = (evaluate(match[2], side, side) for side in (before, after))
        per = WINDOW_S if match[1] == "rate" else 1.0
        return {labels: (value - early[labels]) / per for labels, value in late.items()}
    match = re.fullmatch(r"([\w:]+)(\{model_name=MODEL\})?", expression)
    assert match is not None, expression
    return {labels: value for labels, value in after[match[1]].items() if ("model_name", MODEL) in labels}


def quantile(q: float, buckets: Vector) -> float:
    """histogram_quantile of cumulative buckets by `le`."""
    rows = sorted((float(dict(labels)["le"]), count) for labels, count in buckets.items())
    rank, low, below = q * rows[-1][1], 0.0, 0.0
    for end, count in rows:
        if count >= rank and count > below:
            return low if math.isinf(end) else low + (end - low) * (rank - below) / (count - below)
        low, below = end, count
    return math.nan


def router(n_requests: int) -> Counters:
    """A router that has answered so many equal requests, and serves more."""
    counters = Counters()
    counters.set("slipstream_requests_running", 7)
    counters.set("slipstream_requests_waiting", 2)
    counters.set("slipstream_decode_kv_occupancy_ratio", 0.25)
    counters.replace("slipstream_kv_cache_info", {("64", "1024"): 1})
    for _ in range(n_requests):
        counters.add("slipstream_requests_finished_total", 1, ("stop",))
        counters.add("slipstream_prompt_tokens_total", 1000)
        counters.add("slipstream_cached_tokens_total", 600)
        counters.add("slipstream_completion_tokens_total", 50)
        counters.observe("slipstream_request_prompt_tokens", 1000)
        counters.observe("slipstream_request_completion_tokens", 50)
        counters.observe("slipstream_inter_token_latency_seconds", 0.012, count=49)
        for name in ("time_to_first_token", "request_queue", "request_prefill", "request_decode"):
            counters.observe(f"slipstream_{name}_seconds", 0.3)
        counters.observe("slipstream_request_duration_seconds", 0.9)
    counters.add("slipstream_requests_finished_total", 0, ("length",))
    return counters


BEFORE, AFTER = scrape(router(10)), scrape(router(70))


@pytest.mark.parametrize("expression", [*QUANTILES, *MEANS, *RATES, *HEATMAPS, FINISHES])
def test_every_panel_of_vllms_dashboard_has_a_value(expression: str) -> None:
    values = evaluate(expression, BEFORE, AFTER)
    assert values and all(math.isfinite(value) for value in values.values())
    assert any(value > 0 for value in values.values())


def test_the_panels_have_the_values_of_our_metrics() -> None:
    def one(expression: str) -> float:
        (value,) = evaluate(expression, BEFORE, AFTER).values()
        return value

    assert one(RATES[0]) == 1000.0 and one(RATES[1]) == 50.0
    assert one(MEANS[0]) == pytest.approx(0.3) and one(MEANS[1]) == pytest.approx(0.012)
    assert 0.25 < one(QUANTILES[0]) <= 0.5
    finishes = evaluate(FINISHES, BEFORE, AFTER)
    assert finishes == {
        frozenset({("finished_reason", "stop")}): 60.0,
        frozenset({("finished_reason", "length")}): 0.0,
    }


def test_the_gateways_three_gauges_are_there() -> None:
    gauges = {name: list(evaluate(name, BEFORE, AFTER).values()) for name in GATEWAY}
    assert gauges == dict(zip(GATEWAY, ([2.0], [7.0], [0.25]), strict=True))
    (labels,) = AFTER["vllm:cache_config_info"]
    assert dict(labels) == {"block_size": "64", "num_gpu_blocks": "1024", "model_name": MODEL}


def test_a_worker_has_the_gauges_of_its_own_pages() -> None:
    counters = Counters()
    counters.set("slipstream_kv_occupancy_ratio", 0.5, ("worker",))
    text = render_metrics(counters, service="decode", model=MODEL)[0].decode()
    assert f'vllm:kv_cache_usage_perc{{model_name="{MODEL}"}} 0.5\n' in text
    assert "vllm:" not in render_metrics(counters, service="decode")[0].decode()


def test_every_alias_is_of_a_metric_and_keeps_its_kind() -> None:
    for alias in ALIASES:
        source = METRICS[alias.source]
        assert alias.name.endswith("_total") == (source.kind == "counter")
        assert set(alias.labels) <= set(source.labels)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_finds_nothing_wrong_with_the_text() -> None:
    text = render_metrics(router(3), service="router")[0]
    found = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, timeout=60)
    assert (found.returncode, found.stdout + found.stderr) == (0, b"")
