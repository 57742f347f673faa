"""Queries of the dashboards that vLLM publishes, as facts: the names, functions and labels that they read.

They stand in examples/observability of github.com/vllm-project/vllm (Apache-2.0) in 2026: prometheus_grafana,
and of dashboards/grafana vllm_overview, vllm_kv_cache and vllm_speculative_decoding. Left out are queries of
what we do not have: an engine's internals, LoRA, offloading, and HTTP statistics by another exporter.
"""

from __future__ import annotations

# Grafana makes `()` of a variable without values, which matches series without the label.
_OF_ALL = 'job=~"$job", model_name=~"$model_name", instance=~"$instance", engine=~"$engine"'
_VARIABLES = {"job": ".*", "model_name": ".*", "instance": ".*", "engine": "()", "__rate_interval": "1m"}
_SECONDS = (
    *("time_to_first_token", "inter_token_latency", "time_per_output_token", "e2e_request_latency"),
    *("request_queue_time", "request_prefill_time", "request_decode_time"),
)


def promql(expression: str, **variables: str) -> str:
    """The expression with values in place of Grafana's variables."""
    for name, value in {**_VARIABLES, **variables}.items():
        expression = expression.replace(f"${name}", value)
    return expression


def _rate(name: str) -> str:
    return f"rate(vllm:{name}{{{_OF_ALL}}}[$__rate_interval])"


def _share(part: str, whole: str, by: str = "") -> str:
    return f"sum{by}({_rate(part)}) / (sum{by}({_rate(whole)}) > 0)"


QUANTILES = [
    f"histogram_quantile({q}, sum by (le) ({_rate(f'{name}_seconds_bucket')}))"
    for name in _SECONDS[:4]
    for q in ("0.99", "0.95", "0.9", "0.5")
]
MEANS = [f"{_rate(f'{name}_seconds_sum')} / {_rate(f'{name}_seconds_count')}" for name in _SECONDS]
RATES = [
    _rate(name)
    for name in (
        *("prompt_tokens_total", "generation_tokens_total", "prefix_cache_queries_total"),
        *("prefix_cache_hits_total", "request_queue_time_seconds_sum", "request_prefill_time_seconds_sum"),
        *("request_decode_time_seconds_sum", "request_max_num_generation_tokens_sum"),
    )
]
HEATMAPS = [
    f"sum by (le) ({_rate(f'{name}_bucket').replace('rate(', 'increase(', 1)})"
    for name in ("request_prompt_tokens", "request_generation_tokens")
]
FINISHES = f"sum by (finished_reason) ({_rate('request_success_total').replace('rate(', 'increase(', 1)})"
CACHE = [
    f"max(vllm:kv_cache_usage_perc{{{_OF_ALL}}})",
    f"avg(vllm:kv_cache_usage_perc{{{_OF_ALL}}})",
    _share("prefix_cache_hits_total", "prefix_cache_queries_total"),
    _share("prompt_tokens_cached_total", "prompt_tokens_total"),
    f"sum({_rate('num_preemptions_total')})",
    f'sum(vllm:num_requests_waiting_by_reason{{{_OF_ALL}, reason="capacity"}})',
    f"sum(vllm:num_requests_running{{{_OF_ALL}}})",
    f"count(vllm:num_requests_running{{{_OF_ALL}}})",
]
OF_ROUTERS = [*QUANTILES, *MEANS, *RATES, *HEATMAPS, FINISHES, *CACHE]

_DRAFTS, _PROPOSED = "spec_decode_num_drafts_total", "spec_decode_num_draft_tokens_total"
_ACCEPTED = "spec_decode_num_accepted_tokens_total"
# With the titles of their panels.
OF_SPECULATION = {
    _share(_ACCEPTED, _PROPOSED): "Draft acceptance rate",
    f"1 + {_share(_ACCEPTED, _DRAFTS)}": "Acceptance length",
    f"sum({_rate(_ACCEPTED)})": "Accepted tokens / s",
    f"sum({_rate(_PROPOSED)})": "Draft tokens / s",
    f"sum({_rate(_DRAFTS)})": "Drafts / s",
    _share(_ACCEPTED, "generation_tokens_total"): "Output from drafts",
    _share(_ACCEPTED, _PROPOSED, " by (model_name) "): "Draft acceptance rate, per model",
    f"1 + {_share(_ACCEPTED, _DRAFTS, ' by (model_name) ')}": "Mean acceptance length",
    f"sum by (position) ({_rate(f'{_ACCEPTED[:-6]}_per_pos_total')}) / on () group_left ()"
    f" (sum({_rate(_DRAFTS)}) > 0)": "Acceptance rate by draft position",
    _share(_ACCEPTED, _PROPOSED, " by (instance, engine) "): "Draft acceptance rate by engine",
    f"sum({_rate(_PROPOSED)}) - sum({_rate(_ACCEPTED)})": "rejected",
}
