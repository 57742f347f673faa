"""The rows of the metric table that a router exports."""

from __future__ import annotations

from libs.common.telemetry.metric_tables.metric import (
    N_TOKENS,
    REFUSAL_S,
    REQUEST_S,
    STEP_S,
    WAIT_S,
    Metric,
    counter,
    gauge,
    histogram,
)

REQUEST_METRICS: tuple[Metric, ...] = (
    counter(
        "api_requests_total",
        "Calls of clients, refused ones too.",
        *("api", "endpoint", "status"),
    ),
    counter("requests_finished_total", "Requests that ended with a finish reason.", "finish_reason"),
    counter(
        "requests_failed_total", "Requests that ended with a server error, or were cut by a stopping router."
    ),
    counter("requests_refused_total", "Requests refused as invalid or over capacity."),
    counter("grpc_connections_refused_total", "gRPC connections without a key closed at the bound."),
    counter("ignored_fields_total", "Fields over HTTP without effect."),
    counter("requests_aborted_total", "Requests that their client ended or took to another router."),
    counter("requests_suspended_total", "Times a request waited for a client to read."),
    histogram("time_to_first_token_seconds", "From a live request's arrival to its first token.", WAIT_S),
    histogram(
        "inter_token_latency_seconds",
        "Time between tokens; those of one frame share the time since the last.",
        STEP_S,
    ),
    histogram("request_duration_seconds", "From a request's arrival to its last token.", REQUEST_S),
    histogram(
        "request_queue_seconds",
        "From a live request's arrival to its admission or earlier end.",
        WAIT_S,
    ),
    histogram("request_prefill_seconds", "From a live request's admission to its first token.", WAIT_S),
    histogram("request_decode_seconds", "From a request's first token to its last.", REQUEST_S),
    histogram("request_prompt_tokens", "Prompt tokens of a finished request.", N_TOKENS),
    histogram("request_completion_tokens", "Tokens generated for a finished request.", N_TOKENS),
    counter("prompt_tokens_total", "Prompt tokens of requests that got a token, cached ones too."),
    counter("cached_tokens_total", "Prompt tokens whose KV was found in a cache."),
    counter("completion_tokens_total", "Tokens generated, also for requests that end early."),
    histogram("refusal_seconds", "From a complete request to its refusal for load.", REFUSAL_S),
    counter("attempts_total", "Attempts made for requests, retries included."),
    counter("hedges_total", "Attempts made because a prefill was slow."),
    counter("quarantined_total", "Requests refused because they crashed workers."),
    counter("drain_failovers_total", "Streams moved off a draining decode worker."),
    counter("prompt_tokens_encoded_total", "Prompt tokens that the tokenizer encoded."),
    counter("prompt_tokens_hashed_total", "Prompt tokens hashed for block hashes."),
)
ADMISSION_METRICS: tuple[Metric, ...] = (
    counter("admission_rejected_total", "Requests refused for lack of capacity."),
    counter("admission_expired_total", "Requests that waited too long for capacity."),
    counter("admission_preempted_total", "Requests returned to the queue for a higher class."),
)
METERING_METRICS: tuple[Metric, ...] = (
    counter("cost_total", "Cost of answers, in the currency of the price file.", "model", "currency"),
    counter("limited_total", "Requests refused by a limit of their API key or tenant.", "limit"),
    gauge(
        "spend_limit_used_ratio",
        "Used share of the limit of spend nearest to its end.",
        "limit",
    ),
    gauge("usage_unwritten_requests", "Requests whose usage waits for the database."),
    counter("usage_write_failures_total", "Times the database did not take usage."),
)
ROUTER_METRICS: tuple[Metric, ...] = (
    gauge("workers", "Workers that are ready at this router.", "worker_role"),
    gauge(
        "decode_kv_occupancy_ratio",
        "Share of the ready decode workers' KV blocks that requests hold.",
    ),
    gauge("prefix_index_bytes", "Memory of the prefix index."),
    gauge("prefix_index_blocks", "Different blocks in the prefix index."),
    counter("prefix_index_evicted_blocks_total", "Blocks evicted from the prefix index for room."),
    counter(
        "block_event_pauses_total",
        "Times a worker's block events exceeded their share of the router's time.",
    ),
    gauge("token_cache_bytes", "Memory of the token cache of conversations."),
    counter("session_writes_total", "Placements of sessions written to etcd."),
    counter("session_conflicts_total", "Placements dropped: another router wrote first."),
    counter(
        "session_writes_dropped_total",
        "Placements dropped: too many waited, or sessions of the tenant.",
    ),
    gauge("event_loop_delay_seconds", "Delay of event-loop timers, recent mean."),
    gauge("event_loop_delay_max_seconds", "Delay of event-loop timers, recent maximum."),
)
JOB_METRICS: tuple[Metric, ...] = (
    gauge("jobs_waiting", "Stored jobs that no router runs yet, of all routers."),
    gauge("jobs_running", "Stored jobs that routers run, of all routers."),
    counter("jobs_claimed_total", "Jobs that this router took from the database."),
    counter("jobs_ended_total", "Jobs that this router ended.", "state"),
    counter("jobs_preempted_total", "Running jobs returned to the queue for live requests."),
    gauge("jobs_held", "Jobs held for live requests."),
    counter("job_holds_total", "Times a job left its workers for live requests."),
    gauge("jobs_overdue", "Jobs that go on beside live requests: they waited too long."),
    gauge("jobs_beside_live", "Jobs that may run beside live requests."),
    gauge("jobs_quiet_seconds", "Pause after live requests before jobs run."),
    counter(
        "job_leases_lost_total",
        "Jobs whose router was silent too long, and late results.",
    ),
    gauge("database_unavailable", "1 while the database of jobs and usage does not answer."),
    counter("webhooks_total", "Deliveries of webhooks.", "outcome"),
)
