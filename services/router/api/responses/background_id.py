"""Ids of responses in the background: those of their jobs, by another prefix. Pure."""

from __future__ import annotations

import re

_JOB = re.compile(r"job-([0-9a-f]{30})")
_RESPONSE = re.compile(r"resp_([0-9a-f]{30})")  # ids of other responses are longer


def key_of(job_id: str) -> str | None:
    """The part of the response's id that makes it unique; None for what is no job's id."""
    found = _JOB.fullmatch(job_id)
    return found[1] if found else None


def job_of(response_id: str) -> str | None:
    """The id of the job that makes a response; None for a response that no job makes."""
    found = _RESPONSE.fullmatch(response_id)
    return f"job-{found[1]}" if found else None
