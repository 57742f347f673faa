"""The decisions about jobs: what follows an attempt, what to claim, how many to run. Pure."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from services.router.jobs.pacing import LONGEST_QUIET_S
from services.router.jobs.types import JobOutcome, JobState

# Attempts that ended with a server error or with the loss of their router.
MAX_FAILURES = 5
FIRST_RETRY_S, LONGEST_RETRY_S = 1.0, 300.0
# The least pause of a job that only routers of another release run: one of them may claim it then.
OTHER_RELEASE_S = 60.0
# Jobs leave a part of the decode workers' places to live requests, which then begin at once.
JOB_SHARE = 0.75
# A job that live requests hold for longer goes to another router, without the tokens that it has.
LONGEST_HOLD_S = 30.0
# Overdue jobs that each router runs beside live requests at a time.
MOST_OVERDUE = 2
# Characters of a prompt without a system message that stand for its common prefix.
_PREFIX_CHARS = 1024


Receiver = tuple[str, str]  # of webhooks: a tenant and a host


@dataclass(frozen=True, slots=True)
class NextState:
    """The state of a job after an attempt. QUEUED comes with the pause before the next attempt.

    `error`: what the job waits for, the reason where it expires.
    """

    state: JobState
    delay_s: float = 0.0
    is_failure: bool = False
    error: str = ""


def after_attempt(outcome: JobOutcome, *, attempt: int, failures: int, jitter: float) -> NextState:
    """The next state after an attempt's outcome; `failures` counts those before it, `jitter` is in [0, 1].

    A server error counts; a lack of capacity (429), of workers (503) or of another release does not.
    """
    if 200 <= outcome.status < 300:
        return NextState(JobState.SUCCEEDED)
    if outcome.is_late:
        return NextState(JobState.EXPIRED)
    if outcome.is_final:
        return NextState(JobState.FAILED)
    if outcome.refusal:
        delay_s = max(OTHER_RELEASE_S, retry_delay_s(attempt, jitter))
        return NextState(JobState.QUEUED, delay_s, error=outcome.refusal)
    is_failure = outcome.status not in (429, 503)
    if is_failure and failures + 1 >= MAX_FAILURES:
        return NextState(JobState.FAILED, is_failure=True)
    delay_s = max(outcome.retry_after_s, retry_delay_s(failures, jitter))
    return NextState(JobState.QUEUED, min(delay_s, LONGEST_RETRY_S), is_failure)


def after_loss(failures: int, jitter: float) -> NextState:
    """The next state when the router that ran the job is gone: the job itself may have ended it."""
    if failures + 1 >= MAX_FAILURES:
        return NextState(JobState.FAILED, is_failure=True)
    return NextState(JobState.QUEUED, 0.0 if not failures else retry_delay_s(failures, jitter), True)


def retry_delay_s(failures: int, jitter: float) -> float:
    """The pause before the next attempt: doubled by each failure, scaled to between a half and the whole."""
    longest_s: float = min(FIRST_RETRY_S * 2.0 ** min(failures, 16), LONGEST_RETRY_S)
    return longest_s * (0.5 + jitter / 2)


def share_claims(waiting: Mapping[str, float], running: Mapping[str, int], n: int) -> dict[str, int]:
    """How many of `n` jobs to claim of each tenant, by the time since when its oldest job waits.

    Each goes to the tenant with the fewest running, so that a tenant with many jobs delays no other one.
    Among equals the oldest is first: a job waits for older jobs only, however many come after it.
    """
    counts = {tenant: running.get(tenant, 0) for tenant in waiting}
    shares: dict[str, int] = {}
    for _ in range(n if counts else 0):
        tenant = min(counts, key=lambda name: (counts[name], waiting[name], name))
        counts[tenant] += 1
        shares[tenant] = shares.get(tenant, 0) + 1
    return shares


def share_deliveries(
    due: Sequence[Receiver], in_flight: Mapping[Receiver, int], n: int, *, most_each: int
) -> dict[Receiver, int]:
    """How many of `n` webhooks to send to each receiver that has some due: a tenant and a host.

    Each goes to the tenant with the fewest on the way, and there to the host with the fewest. A receiver has
    at most `most_each`, so that a slow one delays no other.
    """
    counts = {receiver: in_flight.get(receiver, 0) for receiver in due}
    of_tenant: dict[str, int] = {}
    for (tenant, _), count in {**in_flight, **counts}.items():
        of_tenant[tenant] = of_tenant.get(tenant, 0) + count
    shares: dict[Receiver, int] = {}
    for _ in range(n):
        free = [receiver for receiver in counts if counts[receiver] < most_each]
        if not free:
            break
        receiver = min(free, key=lambda each: (of_tenant[each[0]], counts[each], each))
        counts[receiver] += 1
        of_tenant[receiver[0]] += 1
        shares[receiver] = shares.get(receiver, 0) + 1
    return shares


def in_claim_order(oldest: Sequence[tuple[str, str]], alike: Sequence[str]) -> list[str]:
    """The ids in which jobs are claimed, each once: `alike`, then the other `oldest` prefix by prefix.

    `oldest` are ids with their prefixes; `alike` has the prefix of the first one, which is among them.
    """
    by_prefix: dict[str, list[str]] = {}
    for job_id, prefix in oldest:
        by_prefix.setdefault(prefix, []).append(job_id)
    ordered = [oldest[0][0], *alike, *[job_id for ids in by_prefix.values() for job_id in ids]]
    return list(dict.fromkeys(ordered))


@dataclass(frozen=True, slots=True)
class Headroom:
    """The cluster's room, as admission knows it. `places` is 0 where a worker does not report it."""

    is_ready: bool
    live_running: int  # requests that are no jobs
    live_waiting: int
    places: int  # of sequences on the decode workers, for this router
    idle_prefills: int  # prefill workers without a prompt of this router
    live_ended_s: float = math.inf  # since the last live request ended
    beside_live: int = 0  # jobs that may run beside live requests; see pacing.py
    quiet_s: float = LONGEST_QUIET_S  # how long after live requests only these run
    is_draining: bool = False
    overdue: int = 0  # jobs that have waited for too long; see overdue_jobs


def overdue_jobs(submitted_unix_s: Iterable[float], *, now_unix_s: float, longest_wait_s: float) -> int:
    """How many jobs run beside live requests: those that waited for so long, MOST_OVERDUE at most."""
    return min(MOST_OVERDUE, sum(now_unix_s - each >= longest_wait_s for each in submitted_unix_s))


def jobs_allowed(room: Headroom, *, max_running: int) -> int:
    """How many jobs the router would run at once if there were workers enough.

    More workers serve no job that waits for live requests to end, so autoscaling does not count it.
    """
    if room.is_draining:
        return 0
    overdue = min(max_running, room.overdue)
    if room.live_waiting:
        return overdue
    if room.live_running or room.live_ended_s < room.quiet_s:
        return min(max_running, max(room.beside_live, overdue))
    return max_running


def jobs_on_workers(room: Headroom, *, running: int, max_running: int) -> int:
    """How many jobs may be on workers now, of which `running` are; the router holds the others.

    None while a live request waits; one more for each idle prefill worker. At least a quarter of the decode
    workers' places is left to live requests. Overdue jobs wait for none of these.
    """
    allowed = jobs_allowed(room, max_running=max_running)
    most = min(allowed, running + room.idle_prefills)
    if room.places:
        most = min(most, int(JOB_SHARE * room.places) - room.live_running)
    most = max(0, most, min(allowed, room.overdue))
    return most if room.is_ready else min(most, running)


def jobs_to_release(room: Headroom, *, claimed: int, held: int, held_s: float) -> int:
    """How many jobs go back to the queue: all of a router that drains, and those held for long.

    Another router may have room for them.
    """
    if room.is_draining:
        return claimed
    return held if held_s >= LONGEST_HOLD_S else 0


def prefix_key(path: str, body: bytes) -> str:
    """Equal for bodies whose prompts begin alike, so that they are claimed together and share their KV."""
    try:
        parsed = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        parsed = None
    head: object = None
    if isinstance(parsed, dict):
        system = parsed.get("system") or parsed.get("instructions")
        messages = parsed.get("messages")
        first = messages[0] if isinstance(messages, list) and messages else None
        if system is None and isinstance(first, dict):
            is_system = first.get("role") in ("system", "developer")
            system = first.get("content") if is_system else None
        text = system or first or parsed.get("prompt") or parsed.get("input")
        head = [parsed.get("model"), parsed.get("tools"), text if system else str(text)[:_PREFIX_CHARS]]
    try:
        encoded = msgspec.json.encode([path, head], order="deterministic")
    except (UnicodeEncodeError, RecursionError):
        encoded = body[:_PREFIX_CHARS]
    return hashlib.blake2b(encoded, digest_size=12).hexdigest()
