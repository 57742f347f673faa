"""A group of jobs, followed to its end, and a job, found again by its key and cancelled.

python examples/python/job_group.py [HOST:PORT]        default: 127.0.0.1:7000
"""

from __future__ import annotations

import sys
import uuid

from slipstream import Client, GroupProgress, JobOptions, SlipstreamError


def main(endpoint: str) -> None:
    """Follow a group to its end, submit one job twice with the same key, and cancel it."""
    bodies = [{"prompt": f"{number} and", "max_tokens": 8} for number in range(4)]
    with Client(endpoint) as client:
        night = JobOptions(path="/v1/completions", group_id=f"night-{uuid.uuid4().hex[:8]}", expires_s=3600)
        client.jobs.submit(bodies, options=night)
        progress: GroupProgress | None = None
        for progress in client.jobs.follow_group(night.group_id):
            print(f"{progress.ended} of {progress.total} have ended", file=sys.stderr)
        assert progress is not None
        print(f"{progress.succeeded} succeeded, {progress.failed} failed")
        # A call that is repeated with the same key finds the jobs of the first one.
        key = JobOptions(path="/v1/completions", idempotency_key=uuid.uuid4().hex)
        first, again = (client.jobs.submit(bodies[:1], options=key) for _ in range(2))
        print("the same job" if first[0].id == again[0].id else "two jobs")
        client.jobs.cancel(first[0].id)


if __name__ == "__main__":
    try:
        main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:7000")
    except SlipstreamError as error:
        sys.exit(f"{sys.argv[0]}: {error.message}")
