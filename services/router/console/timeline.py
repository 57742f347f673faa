"""A request as JSON: its summary, its timeline in sentences, its tokens over time. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from services.router.console.placement_table import placement_json
from services.router.recording.timeline import RequestTimeline, TimelineEntry

# Sentences by the kind of an entry. A kind that is not here shows its text.
_SENTENCES: Mapping[str, str] = {
    "received": "The request arrived.",
    "admitted": "Admission let the request run.",
    "encoded": "The prompt is encoded; {tokens} of its tokens were new to this router.",
    "placed": "Attempt {attempt} begins on {worker}.",
    "hedged": "The first token takes long: attempt {attempt} begins on {worker} beside it.",
    "prefill_started": "{worker} has pages for the prompt and holds {tokens} of its tokens.",
    "restored": "{worker} read the KV of {tokens} tokens from {text}.",
    "first_token": "{worker} sent the first token{after}.",
    "handoff": "{worker} may read the KV.",
    "tokens": "{worker} sends tokens.",
    "moved": "Attempt {attempt} left {worker} after {tokens} tokens{because}.",
    "dropped": "Attempt {attempt} ends, and the other one goes on{because}.",
    "preempted": "Another request took the place; this one waits again and restarts.",
    "suspended": "The client reads nothing: the workers hold nothing of the request after {tokens} tokens.",
    "resumed": "The client reads again.",
    "finished": "The answer is complete after {tokens} tokens: {text}.",
    "failed": "The request ended after {tokens} tokens: {text}",
}
_SOURCES: Mapping[str, str] = {
    "dram": "the memory of a kvstore",
    "nvme": "the disk of a kvstore",
    "pool": "the pool of the kvstores",
    "peer": "another prefill worker",
}


def summary_json(timeline: RequestTimeline, *, now_s: float) -> dict[str, Any]:
    """One line of the list of requests. Durations count from the arrival."""
    until_s = now_s if timeline.ended_s is None else timeline.ended_s
    first_s = timeline.first_token_s
    return {
        "seq": timeline.seq,
        "id": timeline.request_id,
        "started_ms": round(timeline.began_unix_ms, 1),
        "tenant": timeline.tenant,
        "session": timeline.session,
        "model": timeline.model,
        "endpoint": timeline.endpoint,
        "status": timeline.status,
        "code": timeline.code or None,
        "error": timeline.error or None,
        "finish_reason": timeline.finish_reason or None,
        "streamed": timeline.is_streamed,
        "prompt_tokens": timeline.prompt_tokens,
        "cached_tokens": timeline.cached_tokens,
        "output_tokens": timeline.curve.count,
        "ttft_ms": None if first_s is None else _ms(first_s - timeline.began_s),
        "duration_ms": _ms(until_s - timeline.began_s),
        "prefill": timeline.prefill,
        "decode": timeline.decode,
        "attempts": timeline.attempts,
        "drafted_tokens": timeline.drafted_tokens,
        "accepted_tokens": timeline.accepted_tokens,
    }


def request_json(timeline: RequestTimeline, *, now_s: float) -> dict[str, Any]:
    """All that is kept of one request."""
    at_s, counts = timeline.curve.points()
    return {
        "summary": summary_json(timeline, now_s=now_s),
        "timeline": [_entry_json(entry, timeline.began_s) for entry in timeline.entries],
        "dropped_entries": timeline.dropped_entries,
        "placements": [placement_json(kept, began_s=timeline.began_s) for kept in timeline.placements],
        "tokens": {"at_ms": [_ms(at - timeline.began_s) for at in at_s], "count": list(counts)},
    }


def summaries_json(timelines: Sequence[RequestTimeline], *, now_s: float) -> list[dict[str, Any]]:
    """The lines of several requests."""
    return [summary_json(timeline, now_s=now_s) for timeline in timelines]


def sentence(entry: TimelineEntry) -> str:
    """The sentence of an entry."""
    text = _SOURCES.get(entry.text, entry.text) if entry.kind == "restored" else entry.text
    return _SENTENCES.get(entry.kind, "{text}").format(
        attempt=entry.attempt,
        worker=entry.worker,
        tokens=entry.tokens,
        text=text,
        after=f" after {text}" if text else "",
        because=f": {text}" if text else "",
    )


def _entry_json(entry: TimelineEntry, began_s: float) -> dict[str, Any]:
    return {
        "at_ms": _ms(entry.at_s - began_s),
        "kind": entry.kind,
        "worker": entry.worker,
        "text": sentence(entry),
        "tokens": entry.tokens,
        "attempt": entry.attempt,
    }


def _ms(elapsed_s: float) -> float:
    return round(elapsed_s * 1e3, 3)
