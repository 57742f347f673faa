"""The rows of the metric table that prefill, decode and drafter export."""

from __future__ import annotations

from libs.common.telemetry.metric_tables.metric import STEP_S, WAIT_S, Metric, counter, gauge, histogram

ENGINE_METRICS: tuple[Metric, ...] = (
    gauge("kv_blocks", "KV blocks: free, cached (evictable) or held.", "state"),
    histogram("pages_wait_seconds", "Time that a sequence waits for KV pages.", WAIT_S),
    histogram("engine_step_seconds", "Duration of an engine step.", STEP_S),
    counter("prefill_tokens_total", "Prompt tokens computed by this worker."),
    counter("prefill_tokens_shared_total", "Prompt tokens taken from concurrent prompts."),
    counter("steps_aborted_total", "Steps ended early because most rows were cancelled."),
    counter("prompts_by_reference_total", "Prompts sent as a prefix reference and a suffix."),
    counter("prompt_prefixes_unknown_total", "Prefix references that a worker did not know."),
    gauge("prompt_memory_bytes", "Prompts kept so that requests can refer to them."),
    histogram("kv_restore_seconds", "Time of restoring a prompt's KV, if a source is asked.", WAIT_S),
    counter("kv_restores_total", "Times a worker asked a source for KV of a prompt."),
    counter("kv_restores_skipped_total", "Sources skipped because they do not answer."),
    counter("kv_restores_given_up_total", "Restores that ran out of time; the worker computed."),
    counter("kv_restore_lost_seconds_total", "Restore time beyond the time of computing."),
    counter("kv_restore_bound_seconds_total", "Upper bound of that time, by the restore budget."),
    gauge("weights_loaded_bytes", "Weights read since the start."),
    gauge("weights_total_bytes", "Weights to read; 0 before their headers are read."),
    gauge("kv_staged_bytes", "Copies that peers may read."),
    gauge("kv_quarantined_pages", "Pages kept from reuse until no late byte can land."),
)
PREFILL_METRICS: tuple[Metric, ...] = (
    histogram("prefill_seconds", "From a prompt's pages to its first token, restore included.", WAIT_S),
    counter("handoffs_total", "Handoffs opened."),
    counter("handoffs_expired_total", "Handoffs whose lease ran out."),
)
DECODE_METRICS: tuple[Metric, ...] = (
    histogram(
        "handoff_transfer_seconds",
        "Time of a handoff's reads, verification included.",
        WAIT_S,
    ),
    histogram("decode_step_seconds", "Duration of an engine step that decodes a sequence.", STEP_S),
    histogram("draft_wait_seconds", "Time that a step waits for drafts.", STEP_S),
    counter("draft_tokens_proposed_total", "Draft tokens verified."),
    counter("draft_tokens_accepted_total", "Draft tokens accepted."),
    counter("drafts_verified_total", "Drafts verified, one a sequence and step."),
    counter(
        "draft_tokens_accepted_by_position_total",
        "Draft tokens accepted, by position from 0.",
        "position",
    ),
    counter("drafts_proposed_by_context_total", "Draft tokens verified, by tokens of context.", "context"),
    counter("drafts_accepted_by_context_total", "Draft tokens accepted, by tokens of context.", "context"),
    counter("draft_feature_bytes_total", "Draft features sent, by transport or message.", "way"),
    counter("draft_waits_missed_total", "Steps that ran without waiting longer for drafts."),
)
DRAFTER_METRICS: tuple[Metric, ...] = (
    counter("drafts_total", "Proposals sent to decode workers."),
    counter("draft_tokens_total", "Tokens of those proposals."),
    counter("draft_rows_unread_total", "Pieces of draft features that could not be read."),
)
