"""The output of `slipstream jobs`: the progress of a group, a table of jobs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from datetime import datetime
from itertools import islice
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from slipstream.cli.chat.harmless_text import harmless, harmless_line
from slipstream.cli.tables import cell, figures_table, print_table
from slipstream.jobs.calls import BlockingJobs
from slipstream.jobs.messages import FinishedJob, GroupProgress, SubmittedJob

_SHOWN_FAILURES = 3


def follow_group(jobs: BlockingJobs, group_id: str) -> GroupProgress:
    """Show a bar until all jobs of a group have ended; in a pipe, a line for the end. Returns the counts."""
    console = Console(stderr=not sys.stdout.isatty())
    counts = GroupProgress(0, 0, 0, 0, 0, 0)
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)
        for counts in jobs.follow_group(group_id):
            bar.update(task, total=counts.total, completed=counts.ended, description=words(counts))
    if not console.is_terminal:
        print(words(counts))
    return counts


def show_failures(jobs: BlockingJobs, group_id: str) -> None:
    """Say why the first failed jobs of a group failed, and what lists all of them."""
    for job in islice(jobs.list_jobs(group_id=group_id, state="failed"), _SHOWN_FAILURES):
        reason = harmless_line(f"{job.reference}: {reason_of(jobs.get(job.id))}")
        print(f"failed: {reason} (`slipstream jobs show {job.id}`)", file=sys.stderr)
    print(f"`slipstream jobs ls --group {group_id} --state failed` lists all that failed", file=sys.stderr)


def reason_of(failed: FinishedJob) -> str:
    """Why a job failed: the message of its answer, or why it has none."""
    error = failed.answer.get("error") if isinstance(failed.answer, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    return str(message or failed.job.error or f"HTTP {failed.job.http_status}")


def words(counts: GroupProgress) -> str:
    """The counts that are not 0."""
    names = ("running", "queued", "succeeded", "failed", "cancelled", "expired")
    return ", ".join(f"{count} {name}" for name in names if (count := getattr(counts, name))) or "no jobs"


def print_document(document: Mapping[str, Any]) -> None:
    """Print JSON with the characters of texts as they are; a terminal obeys none of them."""
    text = json.dumps(document, indent=2, ensure_ascii=False)
    print(harmless(text) if sys.stdout.isatty() else text)


def print_jobs(jobs: Iterable[SubmittedJob]) -> None:
    """A table of jobs."""
    names = ("job", "group", "reference", "state", "submitted")
    table = figures_table(names, ("http_status", "tokens", "seconds"))
    for job in jobs:
        made = datetime.fromtimestamp(job.created_unix_s).strftime("%m-%d %H:%M:%S")
        took = f"{job.ended_unix_s - job.created_unix_s:.1f}" if job.ended_unix_s else ""
        state = f"{job.state} (held)" if job.is_held else job.state
        texts = (job.id, job.group_id, job.reference, state, made)
        table.add_row(
            *[cell(text) for text in texts], str(job.http_status or ""), str(job.output_tokens), took
        )
    print_table(table)
