"""Requests that run when the cluster has room: a group of jobs, its progress, and the answers.

python examples/python/jobs.py [HOST:PORT]        default: 127.0.0.1:7000
"""

from __future__ import annotations

import sys

from slipstream import Client, FinishedJob, JobOptions, SlipstreamError, SubmittedJob

QUESTIONS = ("Where is my order 482135?", "Hello!", "Can I return a lamp?")


def main(endpoint: str) -> None:
    """Submit a group, follow it, and read each answer."""
    bodies = [
        {"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 40}
        for question in QUESTIONS
    ]
    with Client(endpoint) as client:
        # The cluster stores the jobs before this call returns; they survive this program.
        jobs: list[SubmittedJob] = client.jobs.submit(bodies, references=QUESTIONS, options=JobOptions())
        for job in jobs:
            done: FinishedJob = client.jobs.wait(job.id)
            if done.answer is None:
                sys.exit(f"{job.reference}: {done.job.state}: {done.job.error}")
            message = done.answer["choices"][0]["message"]
            print(f"{job.reference} -> {message['content'] or 'a tool call'}")


if __name__ == "__main__":
    try:
        main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:7000")
    except SlipstreamError as error:
        sys.exit(f"{sys.argv[0]}: {error.message}")
