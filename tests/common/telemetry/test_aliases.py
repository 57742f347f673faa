"""vLLM's published dashboards and the inference gateway's picker work on our scrapes.

The gateway's gauges are of a router. An evaluator of our own runs the dashboards' expressions; promtool
checks the text.
"""

from __future__ import annotations

import functools
import math
import shutil
import subprocess

import pytest

from libs.common.telemetry.counters import Counters
from libs.common.telemetry.exposition import render_metrics
from libs.common.telemetry.metric_tables.aliases import ALIASES
from libs.common.telemetry.metric_tables.table import METRICS
from libs.engine.step.types import StepOutput
from libs.worker.engine.step_stats import StepStats
from tests.support.promql.evaluation import Vector, evaluate
from tests.support.promql.series import Series
from tests.support.vllm_dashboards import (
    FINISHES,
    MEANS,
    OF_ROUTERS,
    OF_SPECULATION,
    QUANTILES,
    RATES,
    promql,
)

MODEL = "kimi"
GATEWAY = ("vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc")
SCRAPES_S = (0, 15, 30, 45, 60)  # one request a second
BEFORE = 10  # requests that were answered before the first scrape


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
        counters.add("slipstream_admission_preempted_total")
        counters.observe("slipstream_request_duration_seconds", 0.9)
    counters.add("slipstream_requests_finished_total", 0, ("length",))
    return counters


def decode_worker(n_steps: int) -> Counters:
    """A decode worker that has verified so many drafts of three tokens, and accepted two, none, two, .."""
    counters = Counters()
    stats = StepStats(counters)
    stats.open("a", computed_tokens=10, prefilling=False)
    for number in range(n_steps):
        accepted = 2 * (number % 2 == 0)
        output = StepOutput(
            "a",
            tokens=(1,) * (accepted + 1),
            computed_tokens=11 + number,
            accepted_drafts=accepted,
            proposed_drafts=3,
        )
        stats.record([output], 1.0)
    return counters


@functools.cache
def scraped() -> Series:
    """A router and a decode worker, scraped for a minute."""
    series = Series()
    for at_s in SCRAPES_S:
        for service, counters in (
            ("router", router(BEFORE + at_s)),
            ("decode", decode_worker(2 * (BEFORE + at_s))),
        ):
            text = render_metrics(counters, service=service, model=MODEL)[0].decode()
            series.add_scrape(text, {"instance": f"{service}:9090", "job": "slipstream"}, at_s)
    return series


def ask(expression: str, **variables: str) -> Vector:
    """The value after the last scrape."""
    return evaluate(promql(expression, **variables), scraped(), SCRAPES_S[-1])


@pytest.mark.parametrize("expression", OF_ROUTERS)
def test_every_panel_of_vllms_dashboards_has_a_value(expression: str) -> None:
    values = ask(expression, instance="router.*")
    assert values and all(math.isfinite(value) for value in values.values())
    assert any(value > 0 for value in values.values())


@pytest.mark.parametrize("expression", OF_SPECULATION)
def test_every_panel_of_speculative_decoding_has_a_value(expression: str) -> None:
    values = ask(expression)
    assert values and all(math.isfinite(value) and value >= 0 for value in values.values())


def test_the_panels_have_the_values_of_our_metrics() -> None:
    def one(expression: str) -> float:
        (value,) = ask(expression, instance="router.*").values()
        return value

    assert one(RATES[0]) == pytest.approx(1000.0) and one(RATES[1]) == pytest.approx(50.0)
    assert one(MEANS[0]) == pytest.approx(0.3) and one(MEANS[1]) == pytest.approx(0.012)
    assert 0.25 < one(QUANTILES[0]) <= 0.5
    finishes = ask(FINISHES)
    assert finishes[frozenset({("finished_reason", "stop")})] == pytest.approx(60.0)
    assert finishes[frozenset({("finished_reason", "length")})] == 0.0


def test_the_panels_of_speculation_have_the_values_of_the_steps() -> None:
    """Two drafts a second of three tokens each, of which every other one has two tokens accepted."""
    by_title = {title: ask(expression) for expression, title in OF_SPECULATION.items()}
    assert by_title["Draft tokens / s"] == {frozenset(): pytest.approx(6.0)}
    assert by_title["Drafts / s"] == {frozenset(): pytest.approx(2.0)}
    assert by_title["Draft acceptance rate"] == {frozenset(): pytest.approx(1 / 3)}
    assert by_title["Acceptance length"] == {frozenset(): pytest.approx(2.0)}
    assert by_title["Acceptance rate by draft position"] == {
        frozenset({("position", "0")}): pytest.approx(0.5),
        frozenset({("position", "1")}): pytest.approx(0.5),
    }


def test_the_gateways_three_gauges_are_there() -> None:
    gauges = {name: list(ask(f'{name}{{instance=~"router.*"}}').values()) for name in GATEWAY}
    assert gauges == dict(zip(GATEWAY, ([2.0], [7.0], [0.25]), strict=True))
    (labels,) = ask("vllm:cache_config_info")
    wanted = {"block_size": "64", "num_gpu_blocks": "1024", "model_name": MODEL}
    assert dict(labels) == {**wanted, "instance": "router:9090", "job": "slipstream"}


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
