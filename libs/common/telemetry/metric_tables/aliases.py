"""Names of vLLM's metrics, exported beside ours, for dashboards and gateways that read those.

The inference gateway picks endpoints by num_requests_waiting, num_requests_running and kv_cache_usage_perc.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

MODEL_LABEL = "model_name"


@dataclass(frozen=True, slots=True)
class Alias:
    """Another name for a metric.

    `labels`: their names for our labels; `only`: a label's one value; `adds`: labels that ours does not need.
    """

    name: str
    source: str
    labels: Mapping[str, str] = field(default_factory=dict)
    only: tuple[str, str] | None = None
    adds: Mapping[str, str] = field(default_factory=dict)


def _of_request(name: str, source: str) -> Alias:
    return Alias(f"vllm:{name}", f"slipstream_{source}")


ALIASES: tuple[Alias, ...] = (
    _of_request("num_requests_running", "requests_running"),
    _of_request("num_requests_waiting", "requests_waiting"),
    Alias("vllm:num_requests_waiting_by_reason", "slipstream_requests_waiting", adds={"reason": "capacity"}),
    _of_request("num_preemptions_total", "admission_preempted_total"),
    _of_request("kv_cache_usage_perc", "decode_kv_occupancy_ratio"),
    Alias("vllm:kv_cache_usage_perc", "slipstream_kv_occupancy_ratio", only=("tier", "worker")),
    Alias(
        "vllm:cache_config_info",
        "slipstream_kv_cache_info",
        {"block_tokens": "block_size", "blocks": "num_gpu_blocks"},
    ),
    _of_request("time_to_first_token_seconds", "time_to_first_token_seconds"),
    _of_request("inter_token_latency_seconds", "inter_token_latency_seconds"),
    _of_request("time_per_output_token_seconds", "inter_token_latency_seconds"),
    _of_request("e2e_request_latency_seconds", "request_duration_seconds"),
    _of_request("request_queue_time_seconds", "request_queue_seconds"),
    _of_request("request_prefill_time_seconds", "request_prefill_seconds"),
    _of_request("request_decode_time_seconds", "request_decode_seconds"),
    _of_request("request_prompt_tokens", "request_prompt_tokens"),
    _of_request("request_generation_tokens", "request_completion_tokens"),
    _of_request("request_max_num_generation_tokens", "request_completion_tokens"),
    _of_request("prompt_tokens_total", "prompt_tokens_total"),
    _of_request("generation_tokens_total", "completion_tokens_total"),
    _of_request("prefix_cache_queries_total", "prompt_tokens_total"),
    _of_request("prefix_cache_hits_total", "cached_tokens_total"),
    _of_request("prompt_tokens_cached_total", "cached_tokens_total"),
    _of_request("spec_decode_num_drafts_total", "drafts_verified_total"),
    _of_request("spec_decode_num_draft_tokens_total", "draft_tokens_proposed_total"),
    _of_request("spec_decode_num_accepted_tokens_total", "draft_tokens_accepted_total"),
    Alias(
        "vllm:spec_decode_num_accepted_tokens_per_pos_total",
        "slipstream_draft_tokens_accepted_by_position_total",
        {"position": "position"},
    ),
    Alias(
        "vllm:request_success_total",
        "slipstream_requests_finished_total",
        {"finish_reason": "finished_reason"},
    ),
)
