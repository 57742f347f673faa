"""The table of all metrics: names, kinds, help texts, buckets."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the table: `kind` is counter, gauge or histogram; a counter's name ends in _total.

    `buckets` are the upper ends of a histogram's buckets but the last, which has none.
    """

    name: str
    kind: str
    help: str
    buckets: tuple[float, ...] = ()


_MS = (0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0, 10.0, 20.0, 50.0, 100.0, 1000.0)

METRICS: tuple[Metric, ...] = (
    Metric("slipstream_requests_total", "counter", "Requests accepted."),
    Metric("slipstream_requests_finished_total", "counter", "Requests that ended with a finish reason."),
    Metric("slipstream_requests_failed_total", "counter", "Requests that ended with a server error."),
    Metric("slipstream_requests_refused_total", "counter", "Requests refused as invalid or over capacity."),
    Metric("slipstream_http_malformed_total", "counter", "HTTP messages that are malformed."),
    Metric("slipstream_http_connections_refused_total", "counter", "HTTP connections closed at the bound."),
    Metric("slipstream_grpc_malformed_total", "counter", "gRPC messages that are malformed."),
    Metric("slipstream_requests_aborted_total", "counter", "Requests that their client ended."),
    Metric("slipstream_requests_suspended_total", "counter", "Times a request waited for a client to read."),
    Metric("slipstream_attempts_total", "counter", "Attempts made for requests, retries included."),
    Metric("slipstream_hedges_total", "counter", "Attempts made because a prefill was slow."),
    Metric("slipstream_quarantined_total", "counter", "Requests refused because they crashed workers."),
    Metric("slipstream_drain_failovers_total", "counter", "Streams moved off a draining decode worker."),
    Metric("slipstream_prompt_tokens_total", "counter", "Prompt tokens, including cached ones."),
    Metric("slipstream_prompt_tokens_encoded_total", "counter", "Prompt tokens that the tokenizer encoded."),
    Metric("slipstream_prompt_tokens_hashed_total", "counter", "Prompt tokens hashed for block hashes."),
    Metric(
        "slipstream_prompts_by_reference_total", "counter", "Prompts sent as a prefix reference and a suffix."
    ),
    Metric(
        "slipstream_prompt_prefixes_unknown_total", "counter", "Prefix references that a worker did not know."
    ),
    Metric("slipstream_prompt_memory_bytes", "gauge", "Prompts kept so that requests can refer to them."),
    Metric("slipstream_cached_tokens_total", "counter", "Prompt tokens whose KV was found in a cache."),
    Metric("slipstream_completion_tokens_total", "counter", "Tokens generated."),
    Metric("slipstream_ttft_ms_total", "counter", "Sum of times to first token, milliseconds."),
    Metric("slipstream_prefill_tokens_total", "counter", "Prompt tokens computed by this worker."),
    Metric(
        "slipstream_prefill_tokens_shared_total", "counter", "Prompt tokens taken from concurrent prompts."
    ),
    Metric("slipstream_decode_steps_total", "counter", "Engine steps that decoded at least one sequence."),
    Metric(
        "slipstream_steps_aborted_total", "counter", "Steps ended early because most rows were cancelled."
    ),
    Metric("slipstream_draft_tokens_proposed_total", "counter", "Draft tokens verified."),
    Metric("slipstream_draft_tokens_accepted_total", "counter", "Draft tokens accepted."),
    Metric(
        "slipstream_draft_waits_missed_total", "counter", "Steps that ran without waiting longer for drafts."
    ),
    Metric("slipstream_handoffs_total", "counter", "Handoffs opened."),
    Metric("slipstream_handoffs_expired_total", "counter", "Handoffs whose lease ran out."),
    Metric("slipstream_kv_bytes_pulled_total", "counter", "KV bytes read from peers."),
    Metric("slipstream_kv_checksum_failures_total", "counter", "KV blocks with a wrong checksum."),
    Metric("slipstream_kvstore_blocks_dram", "gauge", "Blocks held in memory."),
    Metric("slipstream_kvstore_blocks_nvme", "gauge", "Blocks held on disk."),
    Metric("slipstream_kvstore_bytes_dram", "gauge", "Bytes of the blocks held in memory."),
    Metric("slipstream_kvstore_bytes_nvme", "gauge", "Bytes of the blocks held on disk."),
    Metric("slipstream_kvstore_hits_dram_total", "counter", "Blocks served from memory."),
    Metric("slipstream_kvstore_hits_nvme_total", "counter", "Blocks served from disk."),
    Metric("slipstream_kvstore_hit_bytes_dram_total", "counter", "Bytes pinned that were in memory."),
    Metric("slipstream_kvstore_hit_bytes_nvme_total", "counter", "Bytes pinned that were on disk."),
    Metric("slipstream_kvstore_pins_dram_total", "counter", "Pins served from memory alone."),
    Metric("slipstream_kvstore_pins_nvme_total", "counter", "Pins that waited for a disk."),
    Metric("slipstream_kvstore_pin_ms_dram_total", "counter", "Sum of times of pins served from memory."),
    Metric("slipstream_kvstore_pin_ms_nvme_total", "counter", "Sum of times of pins that waited for a disk."),
    Metric("slipstream_kvstore_blocks_pool", "gauge", "Blocks this node put into the pool and knows there."),
    Metric("slipstream_kvstore_bytes_pool", "gauge", "Bytes of the blocks this node knows in the pool."),
    Metric("slipstream_kvstore_hits_pool_total", "counter", "Blocks served from the pool."),
    Metric("slipstream_kvstore_hit_bytes_pool_total", "counter", "Bytes pinned that were in the pool."),
    Metric("slipstream_kvstore_pins_pool_total", "counter", "Pins that waited for the pool."),
    Metric(
        "slipstream_kvstore_pin_ms_pool_total", "counter", "Sum of times of pins that waited for the pool."
    ),
    Metric("slipstream_kvstore_pool_away", "gauge", "1 while the pool does not answer: all misses."),
    Metric("slipstream_kvstore_pool_puts_total", "counter", "Blocks this node put into the pool."),
    Metric("slipstream_kvstore_pool_puts_dropped_total", "counter", "Blocks never put: the pool took none."),
    Metric("slipstream_kvstore_pool_failovers_total", "counter", "Blocks read from a second replica."),
    Metric("slipstream_kvstore_pool_corrupt_blocks_total", "counter", "Values of the pool that were wrong."),
    Metric("slipstream_kvstore_pool_agent_restarts_total", "counter", "Ends of the pool agent's process."),
    Metric("slipstream_kvstore_pool_staged_bytes", "gauge", "Memory that the pool agent may write to."),
    Metric(
        "slipstream_kvstore_inventory_blocks_pool",
        "gauge",
        "Blocks that the pool is known to hold.",
    ),
    Metric(
        "slipstream_kvstore_pool_adopted_blocks_total", "counter", "Pool blocks watched for a lost putter."
    ),
    Metric("slipstream_kvstore_unreachable_blocks_pool", "gauge", "Unreachable blocks that this node put."),
    Metric("slipstream_kvstore_unreachable_dropped_pool_total", "counter", "Unreachable blocks dropped."),
    Metric("slipstream_kvstore_unreachable_blocks_dram", "gauge", "Unreachable blocks in memory."),
    Metric("slipstream_kvstore_unreachable_dropped_dram_total", "counter", "Unreachable blocks dropped."),
    Metric("slipstream_kvstore_unreachable_blocks_nvme", "gauge", "Unreachable blocks on disks."),
    Metric("slipstream_kvstore_unreachable_dropped_nvme_total", "counter", "Unreachable blocks dropped."),
    Metric("slipstream_kvstore_commits_total", "counter", "Commits of puts."),
    Metric("slipstream_kvstore_commit_ms_total", "counter", "Sum of times of commits, their pull included."),
    Metric("slipstream_kvstore_corrupt_blocks_dram_total", "counter", "Blocks found changed in memory."),
    Metric("slipstream_kv_restores_total", "counter", "Times a worker asked a source for KV of a prompt."),
    Metric("slipstream_kv_restores_skipped_total", "counter", "Sources skipped because they do not answer."),
    Metric(
        "slipstream_kv_restores_given_up_total",
        "counter",
        "Restores that ran out of time; the worker computed.",
    ),
    Metric("slipstream_kv_restore_ms_total", "counter", "Time that prompts spent on restores."),
    Metric("slipstream_kv_restore_lost_ms_total", "counter", "Restore time beyond the time of computing."),
    Metric(
        "slipstream_kv_restore_bound_ms_total", "counter", "Upper bound of that time, by the restore budget."
    ),
    Metric("slipstream_kv_quarantined_bytes", "gauge", "Memory that late bytes of failed reads may reach."),
    Metric("slipstream_kvstore_quarantined_bytes_nvme", "gauge", "Memory that hanging disks may write to."),
    Metric("slipstream_kvstore_quarantined_bytes_pool", "gauge", "Memory that late calls of the pool may."),
    Metric("slipstream_kv_staged_bytes", "gauge", "Copies of KV blocks that peers may read."),
    Metric("slipstream_kv_quarantined_pages", "gauge", "Pages kept from reuse until no late byte can land."),
    Metric("slipstream_kvstore_misses_total", "counter", "Blocks asked for and not held."),
    Metric("slipstream_kvstore_evictions_total", "counter", "Blocks evicted from a tier."),
    Metric("slipstream_kvstore_evicted_wanted_total", "counter", "Blocks evicted from memory, then wanted."),
    Metric("slipstream_kvstore_evicted_wanted_gap_ms_total", "counter", "Sum of the times between the two."),
    Metric("slipstream_kvstore_evicted_wanted_nvme_total", "counter", "As above, of disks; an estimate."),
    Metric("slipstream_kvstore_evicted_wanted_nvme_gap_ms_total", "counter", "Times between the two, disks."),
    Metric("slipstream_kvstore_evicted_wanted_pool_total", "counter", "As above, of the pool."),
    Metric("slipstream_kvstore_evicted_wanted_pool_gap_ms_total", "counter", "Times between the two, pool."),
    Metric(
        "slipstream_kvstore_policy_changes_total",
        "counter",
        "Changes of the eviction policy that is followed.",
    ),
    Metric("slipstream_kvstore_disk_refused_total", "counter", "Blocks not worth a write to disk."),
    Metric("slipstream_kvstore_corrupt_blocks_total", "counter", "Blocks dropped for a wrong checksum."),
    Metric("slipstream_kvstore_writes_waiting", "gauge", "Blocks on their way from memory to a disk."),
    Metric("slipstream_kvstore_disk_waits_total", "counter", "Pins that waited for a disk."),
    Metric("slipstream_kvstore_disk_errors_total", "counter", "Reads and writes that the disk failed."),
    Metric("slipstream_kvstore_disk_read_only", "gauge", "Disks that take no blocks now."),
    Metric("slipstream_kvstore_disk_away", "gauge", "Disks that hang or fail reads: all misses."),
    Metric("slipstream_kvstore_index_bytes_nvme", "gauge", "Memory of the disk tier's index."),
    Metric("slipstream_kvstore_scrubbed_blocks_total", "counter", "Blocks on disk that were verified."),
    Metric("slipstream_kvstore_writes_dropped_total", "counter", "Blocks never written: the disk was slow."),
    Metric("slipstream_kv_blocks_leaked", "gauge", "Blocks held whose owner is gone; always 0."),
    Metric("slipstream_prefix_index_bytes", "gauge", "Memory of the prefix index."),
    Metric("slipstream_prefix_index_blocks", "gauge", "Different blocks in the prefix index."),
    Metric(
        "slipstream_prefix_index_evicted_blocks_total",
        "counter",
        "Blocks evicted from the prefix index for room.",
    ),
    Metric("slipstream_token_cache_bytes", "gauge", "Memory of the token cache of conversations."),
    Metric("slipstream_session_writes_total", "counter", "Placements of sessions written to etcd."),
    Metric(
        "slipstream_session_conflicts_total", "counter", "Placements dropped: another router wrote first."
    ),
    Metric(
        "slipstream_session_writes_dropped_total",
        "counter",
        "Placements dropped: too many waited for etcd, or the tenant has too many sessions.",
    ),
    Metric("slipstream_workers", "gauge", "Workers that are ready at this router."),
    Metric("slipstream_event_loop_delay_ms", "gauge", "Delay of event-loop timers, recent mean."),
    Metric("slipstream_event_loop_delay_max_ms", "gauge", "Delay of event-loop timers, recent maximum."),
    Metric("slipstream_event_loop_tasks", "gauge", "Tasks that have not ended, including permanent ones."),
    Metric("slipstream_heap_frozen_objects", "gauge", "Objects frozen out of garbage collection."),
    Metric("slipstream_full_collections_total", "counter", "Garbage collections of the oldest generation."),
    Metric("slipstream_admission_running", "gauge", "Requests admitted and not ended."),
    Metric("slipstream_admission_waiting", "gauge", "Requests that wait for capacity."),
    Metric("slipstream_admission_rejected_total", "counter", "Requests refused for lack of capacity."),
    Metric("slipstream_admission_expired_total", "counter", "Requests that waited too long for capacity."),
    Metric(
        "slipstream_admission_preempted_total",
        "counter",
        "Requests returned to the queue for a higher class.",
    ),
    Metric(
        "slipstream_refusal_ms", "histogram", "Time from a complete request to its refusal for load.", _MS
    ),
)
METRIC_NAMES = frozenset(metric.name for metric in METRICS)
BUCKETS = {metric.name: metric.buckets for metric in METRICS if metric.buckets}
