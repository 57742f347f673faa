"""The commands of `slipstream jobs` and their flags."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.cli.client_access import ClientAccess, takes_client
from slipstream.cli.options import AsJson, read_secret
from slipstream.errors import FailedPrecondition, InvalidArgument, SlipstreamError

if TYPE_CHECKING:
    from slipstream.cli.jobs.body_file import BodyFile
    from slipstream.client import Client
    from slipstream.jobs.messages import JobOptions, SubmittedJob

jobs_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Store requests that a cluster runs when it has room, and read their answers.",
)

WEBHOOK_SECRET = "SLIPSTREAM_WEBHOOK_SECRET"
Group = Annotated[str, typer.Option(help="Name that jobs have in common.")]
JobId = Annotated[str, typer.Argument(help="Id of a job.")]


@jobs_app.command()
@takes_client
def submit(
    file: Annotated[
        Path,
        typer.Argument(help="JSON bodies of the endpoint, one a line; lines of OpenAI's batch files also."),
    ],
    path: Annotated[str, typer.Option(help="Endpoint of the bodies.")] = "/v1/chat/completions",
    group: Group = "",
    wait: Annotated[bool, typer.Option(help="Show the progress until all have ended.")] = True,
    output: Annotated[
        Path | None, typer.Option(help="File for the answers, one a line in the order of the bodies.")
    ] = None,
    expires_s: Annotated[float, typer.Option(min=0, help="Give up jobs that take longer; 0 = a day.")] = 0.0,
    retention_s: Annotated[float, typer.Option(min=0, help="Keep ended jobs so long; 0 = a week.")] = 0.0,
    webhook: Annotated[str, typer.Option(help="URL that gets the end of each job.")] = "",
    webhook_secret_file: Annotated[
        Path | None,
        typer.Option(help=f"File with the webhook's whsec_... secret; without it {WEBHOOK_SECRET}."),
    ] = None,
    *,
    access: ClientAccess,
) -> None:
    """Submit the bodies of a file as jobs of one group.

    A file that is submitted again under the same --group continues: bodies that are stored are not doubled.
    The exit code is 1 where a job has failed.
    """
    from slipstream.cli.jobs.body_file import read_bodies
    from slipstream.jobs.messages import JobOptions

    if output is not None and not wait:
        raise InvalidArgument("--output", "needs the end of all jobs: it does not go with --no-wait")
    found = read_bodies(file, path)
    if output is not None:
        check_output(output, file)
    name = group or f"{file.stem[:80]}-{int(time.time())}"
    options = JobOptions(
        path,
        group_id=name,
        idempotency_key=name[:100],
        expires_s=expires_s,
        retention_s=retention_s,
        webhook_url=webhook,
        webhook_secret=_webhook_secret(webhook, webhook_secret_file),
    )
    with access.open() as client:
        jobs = _submit(client, found, options)
        print(f"group {name}: {len(jobs)} jobs")
        if wait:
            _follow(client, name, jobs, output)


@jobs_app.command("ls")
@takes_client
def list_jobs(
    group: Group = "",
    state: Annotated[str, typer.Option(help="queued, running, succeeded, failed, cancelled, expired.")] = "",
    limit: Annotated[int, typer.Option(min=1, help="Show at most so many.")] = 100,
    as_json: AsJson = False,
    *,
    access: ClientAccess,
) -> None:
    """List jobs in the order of their submission."""
    from itertools import islice

    from slipstream.cli.jobs.progress import print_jobs

    with access.open() as client:
        found = list(islice(client.jobs.list_jobs(group_id=group, state=state), limit))
    if as_json:
        print(json.dumps([_as_json(job) for job in found], indent=2))
    else:
        print_jobs(found)


@jobs_app.command()
@takes_client
def show(
    job_id: JobId,
    wait: Annotated[bool, typer.Option(help="Wait until it has ended.")] = False,
    *,
    access: ClientAccess,
) -> None:
    """Print one job with its answer, as JSON."""
    from slipstream.cli.jobs.progress import print_document

    with access.open() as client:
        found = client.jobs.wait(job_id) if wait else client.jobs.get(job_id)
    print_document({**_as_json(found.job), "answer": found.answer})


@jobs_app.command()
@takes_client
def cancel(
    job_id: Annotated[str, typer.Argument(help="Id of a job; or --group.")] = "",
    group: Group = "",
    *,
    access: ClientAccess,
) -> None:
    """End a job, or all of a group. Ended ones stay as they are."""
    if bool(job_id) == bool(group):
        raise InvalidArgument("JOB_ID", "must be given, or --group, and not both")
    with access.open() as client:
        print(f"{client.jobs.cancel(job_id, group_id=group)} cancelled")


def _webhook_secret(webhook: str, file: Path | None) -> str:
    """The secret that signs webhooks. Raises InvalidArgument where one of URL and secret is missing."""
    if not webhook:
        if file is not None:
            raise InvalidArgument("--webhook-secret-file", "goes with --webhook")
        return ""
    secret = read_secret(WEBHOOK_SECRET, file, "--webhook-secret-file")
    if not secret:
        raise InvalidArgument("--webhook", f"needs a secret: --webhook-secret-file, or {WEBHOOK_SECRET}")
    return secret


def _submit(client: Client, found: BodyFile, options: JobOptions) -> list[SubmittedJob]:
    """Submit all bodies. An end amid them says how many are stored, and how to go on."""
    jobs: list[SubmittedJob] = []
    try:
        for stored in client.jobs.submit_parts(found.bodies, references=found.references, options=options):
            jobs += stored
    except (SlipstreamError, KeyboardInterrupt) as error:
        if jobs:
            again = f"the same file with `--group {options.group_id}` submits the others"
            print(f"{len(jobs)} of {len(found.bodies)} jobs are submitted: {again}", file=sys.stderr)
        if isinstance(error, FailedPrecondition) and "idempotency key" in error.message:
            words = (
                f"group {options.group_id} has jobs of other bodies: choose another group for a changed file"
            )
            raise InvalidArgument("--group", words) from None
        raise found.refusal(error) if isinstance(error, InvalidArgument) else error from None
    return jobs


def _follow(client: Client, group: str, jobs: list[SubmittedJob], output: Path | None) -> None:
    """Show the progress, and write the answers at the end. Raises Exit where a job has failed."""
    from slipstream.cli.jobs.progress import follow_group, show_failures

    try:
        counts = follow_group(client.jobs, group)
    except KeyboardInterrupt:
        print(f"the jobs run on: `slipstream jobs cancel --group {group}` ends them", file=sys.stderr)
        raise typer.Exit(130) from None
    if counts.failed:
        show_failures(client.jobs, group)
    if output is not None:
        _write_answers(client, jobs, output)
    if counts.succeeded < counts.total:
        raise typer.Exit(1)


def check_output(output: Path, file: Path) -> None:
    """Raises InvalidArgument where the answers cannot be written to `output`, or would replace the bodies."""
    try:
        if output.is_dir():
            raise InvalidArgument("--output", f"{output} is a folder")
        if not output.exists() and not output.parent.is_dir():
            raise InvalidArgument("--output", f"{output}: there is no folder {output.parent}")
        if not os.access(output if output.exists() else output.parent, os.W_OK):
            raise InvalidArgument("--output", f"{output} cannot be written")
        if output.exists() and output.samefile(file):
            raise InvalidArgument("--output", f"{output} is the file of the bodies")
    except OSError as error:  # such as a name that is too long
        raise InvalidArgument("--output", f"{output}: {error.strerror}") from None


def _write_answers(client: Client, jobs: list[SubmittedJob], output: Path) -> None:
    try:
        with output.open("w", encoding="utf-8") as file:
            for job in jobs:
                found = client.jobs.get(job.id)
                line = {**_as_json(found.job), "answer": found.answer}
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
    except OSError as error:
        again = f"submit the same file with --group {jobs[0].group_id} again"
        raise InvalidArgument("--output", f"{output}: {error.strerror}; for the answers {again}") from None


def _as_json(job: SubmittedJob) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(job)
