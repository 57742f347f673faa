"""The figures in a worker's stream messages that the router may count with. Pure.

The router adds them to its metrics, fits its models to times and bytes, and bills cached tokens. As a load
report (load_report.py) they are another process's word, and change in place.
"""

from __future__ import annotations

from google.protobuf.internal.containers import RepeatedCompositeFieldContainer
from google.protobuf.message import Message

from libs.common.cluster.load_report import MAX_AMOUNT
from slipstream.v1 import common_pb2, decode_pb2, prefill_pb2

# No sequence has more steps or drafts. The sum over all choices and attempts of a request fits 32 bits.
MAX_STEPS = 1 << 24
# No engine verifies more drafts in one step.
MAX_STEP_DRAFTS = 256
# No wait or work of one request takes more than a day.
MAX_TIME_MS = 86_400_000.0
# More entries than there are tiers and than any worker sends.
MAX_CACHED_ENTRIES = 16

_Cached = RepeatedCompositeFieldContainer[common_pb2.CachedTokens]


def keep_plausible_event(event: prefill_pb2.PrefillEvent, *, prompt_tokens: int) -> None:
    """Bound the figures of a prefill event of a prompt with so many tokens."""
    kind = event.WhichOneof("kind")
    if kind == "opened":
        _bound_cached(event.opened.cached, prompt_tokens)
    elif kind == "progress":
        event.progress.computed_tokens = min(event.progress.computed_tokens, prompt_tokens)
    elif kind == "first_token":
        _bound_cached(event.first_token.cached, prompt_tokens)
        _bound_time(event.first_token, "queue_ms")
        _bound_time(event.first_token, "compute_ms")


def keep_plausible_delta(delta: decode_pb2.SequenceDelta, *, prompt_tokens: int) -> None:
    """Bound the figures of a delta of a sequence that began with so many prompt tokens."""
    if delta.HasField("prompt_start"):
        _bound_cached(delta.prompt_start.cached, prompt_tokens)
        _bound_time(delta.prompt_start, "restore_ms")
    if not delta.HasField("stats"):
        return
    if not delta.finish_reason:  # they come with the end alone: joined ones would add up
        delta.ClearField("stats")
        return
    stats = delta.stats
    _bound_cached(stats.cached, prompt_tokens)
    _bound_time(stats, "transfer_ms")
    _lower(stats, "kv_bytes_pulled", MAX_AMOUNT)
    _lower(stats, "generated_tokens", MAX_STEPS)
    _lower(stats, "decode_steps", MAX_STEPS)
    _lower(stats, "draft_waits_missed", MAX_STEPS)
    _lower(stats, "drafted_steps", stats.decode_steps)
    _lower(stats, "proposed_drafts", min(stats.drafted_steps * MAX_STEP_DRAFTS, MAX_STEPS))
    _lower(stats, "accepted_drafts", stats.proposed_drafts)


def _lower(message: Message, name: str, most: int) -> None:
    if getattr(message, name) > most:
        setattr(message, name, most)


def _bound_time(message: Message, name: str) -> None:
    value_ms = getattr(message, name)
    if not 0.0 <= value_ms <= MAX_TIME_MS:
        setattr(message, name, MAX_TIME_MS if value_ms > MAX_TIME_MS else 0.0)  # 0 for NaN, too


def _bound_cached(cached: _Cached, prompt_tokens: int) -> None:
    """Keep the first tokens, up to the prompt's length in all."""
    del cached[MAX_CACHED_ENTRIES:]
    left_tokens = prompt_tokens
    for item in cached:
        _lower(item, "tokens", left_tokens)
        left_tokens -= item.tokens
