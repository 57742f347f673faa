"""Stored jobs of a fake router as the console's JSON. Deterministic."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from tests.support.console.fleet_source import HOSTILE, Json

_ENDED = ("succeeded",) * 7 + ("failed", "cancelled", "expired")
_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")


class JobSource:
    """`jobs` jobs, the newest of them queued. `has_database` False: the router keeps none."""

    def __init__(self, now_ms: float, *, jobs: int = 250, has_database: bool = True) -> None:
        self.has_database = has_database
        self._now_ms = now_ms
        self._jobs = [self._job(number) for number in range(jobs if has_database else 0)]

    def _job(self, number: int) -> Json:
        age = 250 - number
        state = "queued" if age <= 40 else "running" if age <= 44 else _ENDED[number % len(_ENDED)]
        created_ms = self._now_ms - age * 7_000.0
        is_live = state in ("queued", "running")
        is_begun = state not in ("queued", "expired")
        return {
            "id": f"job-{number:014x}{number:04x}0badcafe0000",
            "tenant": HOSTILE[1] if number == 240 else ("acme", "globex", "initech")[number % 3],
            "state": state,
            "path": _PATHS[number % len(_PATHS)],
            "group": "night" if number % 2 else "",
            "reference": HOSTILE[number % len(HOSTILE)] if number % 30 == 0 else f"row-{number}",
            "attempts": 2 if number % 9 == 0 and is_begun else int(is_begun),
            "status": None
            if is_live
            else 200
            if state == "succeeded"
            else 400
            if state == "failed"
            else None,
            "error": "each router that ran the job was lost" if state == "failed" else None,
            "output_tokens": 120 if is_begun else 0,
            "created_ms": created_ms,
            "started_ms": created_ms + 2_000 if is_begun else None,
            "ended_ms": None if is_live else created_ms + 6_500,
            "expires_ms": created_ms + 86_400_000,
        }

    def summary(self) -> Json:
        """The event of the queue."""
        if not self.has_database:
            return {"has_database": False}
        counts = Counter(job["state"] for job in self._jobs)
        states = ("queued", "running", "succeeded", "failed", "cancelled", "expired")
        waiting = [self._now_ms - job["created_ms"] for job in self._jobs if job["state"] == "queued"]
        return {
            "has_database": True,
            "unavailable": None,
            "counts": {state: counts[state] for state in states},
            "ended_per_min": 8.5,
            "oldest_waiting_ms": max(waiting, default=None),
            "running_tokens": 480,
        }

    def page(self, query: Mapping[str, str]) -> Json:
        """A page of the list."""
        limit, before = int(query.get("limit", "100")), query.get("before", "")
        found = [
            job
            for job in reversed(self._jobs)
            if all(not query.get(name) or job[name] == query[name] for name in ("state", "tenant"))
            and (not before or job["id"] < before)
        ]
        jobs = found[:limit]
        return {
            "has_database": self.has_database,
            "jobs": jobs,
            "next_before": jobs[-1]["id"] if len(found) > limit else None,
        }

    def detail(self, job_id: str) -> Json | None:
        """One job."""
        found = next((job for job in self._jobs if job["id"] == job_id), None)
        if found is None:
            return None
        return {
            **found,
            "router": "router-0" if found["state"] == "running" else None,
            "failures": 0,
            "not_before_ms": found["created_ms"],
            "stored_bytes": 2_345,
            "webhook": {"host": "hooks.example.com", "is_due": True, "tries": 2},
        }

    def cancel(self, job_id: str) -> Json | None:
        """End one job."""
        for job in self._jobs:
            if job["id"] == job_id and job["state"] in ("queued", "running"):
                job.update(state="cancelled", ended_ms=self._now_ms)
        return self.detail(job_id)
