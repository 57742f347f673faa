"""The commands of `slipstream jobs` and their flags."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.bound import shown
from slipstream.cli.client_access import ClientAccess, takes_client
from slipstream.cli.options import AsJson
from slipstream.errors import InvalidArgument

if TYPE_CHECKING:
    from slipstream.client import Client
    from slipstream.jobs.messages import SubmittedJob

jobs_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Store requests that a cluster runs when it has room, and read their answers.",
)

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
    *,
    access: ClientAccess,
) -> None:
    """Submit the bodies of a file as jobs of one group.

    A file that is submitted again under the same --group continues: bodies that are stored are not doubled.
    The exit code is 1 where a job has failed.
    """
    from slipstream.cli.jobs.progress import follow_group
    from slipstream.jobs.messages import JobOptions

    bodies, references, lines = read_bodies(file, path)
    if output is not None:
        check_output(output, file)
    name = group or f"{file.stem[:80]}-{int(time.time())}"
    options = JobOptions(path, group_id=name, idempotency_key=name[:100], expires_s=expires_s)
    with access.open() as client:
        try:
            jobs = client.jobs.submit(bodies, references=references, options=options)
        except InvalidArgument as error:
            raise _of_line(error, file, lines) from None
        print(f"group {name}: {len(jobs)} jobs")
        if not (wait or output):
            return
        try:
            counts = follow_group(client.jobs, name)
        except KeyboardInterrupt:
            print(f"the jobs run on: `slipstream jobs cancel --group {name}` ends them", file=sys.stderr)
            raise typer.Exit(130) from None
        if output is not None:
            _write_answers(client, jobs, output)
    if counts.succeeded < counts.total:
        raise typer.Exit(1)


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
    with access.open() as client:
        found = client.jobs.wait(job_id) if wait else client.jobs.get(job_id)
    print(json.dumps({**_as_json(found.job), "answer": found.answer}, indent=2, ensure_ascii=False))


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


def read_bodies(file: Path, path: str) -> tuple[list[dict[str, Any]], list[str], list[int]]:
    """The bodies, their references and their lines. A reference is `custom_id`, or the number of the line.

    Raises InvalidArgument for a file that cannot be read, and a line of OpenAI's that is not for `path`.
    """
    bodies, references, numbers = [], [], []
    try:
        lines = file.read_text(encoding="utf-8").split("\n")  # a JSON text may have other line breaks
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "is not UTF-8"
        raise InvalidArgument("FILE", f"{file}: {why}") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            parsed = json.loads(line)
        except (ValueError, RecursionError):
            parsed = None
        if not isinstance(parsed, dict):
            raise InvalidArgument("FILE", f"{file}: line {number} is no JSON object")
        is_batch = "custom_id" in parsed and isinstance(parsed.get("body"), dict)
        for name, wanted in (("method", "POST"), ("url", path)) if is_batch else ():
            if parsed.get(name, wanted) != wanted:
                reason = f"{name} must be {wanted}, not {shown(parsed[name])}"
                hint = "; --path names the endpoint of all lines" if name == "url" else ""
                raise InvalidArgument("FILE", f"{file}: line {number}: {reason}{hint}")
        bodies.append(parsed["body"] if is_batch else parsed)
        references.append(str(parsed["custom_id"]) if is_batch else str(number))
        numbers.append(number)
    if not bodies:
        raise InvalidArgument("FILE", f"{file}: has no bodies")
    return bodies, references, numbers


def _of_line(error: InvalidArgument, file: Path, lines: Sequence[int]) -> InvalidArgument:
    """The error by the line of its body."""
    from slipstream.jobs.messages import index_in

    if (place := index_in(error.field)) is None:
        return error
    index, field = place
    return InvalidArgument("FILE", f"{file}: line {lines[index]}: {field}: {error.reason}")


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
