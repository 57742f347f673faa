"""`slipstream jobs submit`: what it refuses, and what it says of jobs that fail or are not submitted."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from libs.database.database import Database
from services.router.jobs.webhooks.policy import parse_webhook_hosts
from services.router.request.model_card import ModelCard
from services.router.server import RouterServer
from slipstream.cli.app import build_app
from slipstream.cli.jobs.body_file import read_bodies
from slipstream.errors import InvalidArgument
from tests.router.conftest import HELLO, MAX_CONTEXT_TOKENS, WAIT_S, open_router
from tests.router.support.fake_cluster import FakeCluster

BODY = {"messages": HELLO, "max_tokens": 4}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "bodies.jsonl"


def _submit(file: Path, *arguments: str, endpoint: str = "127.0.0.1:1") -> Result:
    given = ["jobs", "submit", str(file), "--endpoint", endpoint, *arguments]
    return CliRunner().invoke(build_app(), given)


async def _submitted(router: RouterServer, file: Path, *arguments: str) -> Result:
    async with asyncio.timeout(WAIT_S):
        return await asyncio.to_thread(_submit, file, *arguments, endpoint=router.host.endpoint)


def _write(file: Path, *bodies: Any) -> None:
    file.write_text("\n".join(json.dumps(body) for body in bodies))


def _batch_line(custom_id: str) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": BODY}


def test_two_lines_with_one_custom_id_are_refused_by_both_lines(file: Path) -> None:
    _write(file, _batch_line("a"), _batch_line("b"), BODY, _batch_line("a"))
    error = _submit(file).exception
    assert isinstance(error, InvalidArgument) and error.field == "FILE"
    assert error.reason == f"{file}: lines 1 and 4 have the same custom_id 'a'"


def test_a_file_may_begin_with_a_mark_of_utf8(tmp_path: Path) -> None:
    marked = tmp_path / "bodies.jsonl"
    marked.write_text('{"prompt": "a"}\n\n{"prompt": "b"}\n', encoding="utf-8-sig")
    found = read_bodies(marked, "/v1/completions")
    assert (found.bodies, found.lines) == ([{"prompt": "a"}, {"prompt": "b"}], [1, 3])


def test_answers_are_refused_where_nothing_waits_for_them(file: Path) -> None:
    _write(file, BODY)
    error = _submit(file, "--no-wait", "--output", str(file.with_name("answers.jsonl"))).exception
    assert isinstance(error, InvalidArgument) and error.field == "--output"
    assert "--no-wait" in error.reason


async def test_an_unknown_model_is_named_once(router: RouterServer, file: Path) -> None:
    _write(file, BODY, {**BODY, "model": "none"})
    error = (await _submitted(router, file)).exception
    assert isinstance(error, InvalidArgument) and error.field == "FILE"
    assert error.reason.startswith(f"{file}: line 2: model: 'none' is not served")


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--path", "/v1/embeddings"),
        ("--group", "g" * 200),
        ("--expires-s", "1e9"),
        ("--retention-s", "1e9"),
        ("--webhook", "https://elsewhere.example.com/"),
    ],
)
async def test_what_a_flag_states_for_all_lines_is_refused_by_the_flag(
    router: RouterServer, file: Path, flag: str, value: str
) -> None:
    _write(file, BODY)
    error = (await _submitted(router, file, flag, value)).exception
    assert isinstance(error, InvalidArgument) and error.field == flag


async def test_an_end_amid_many_jobs_says_how_many_are_submitted(
    router: RouterServer, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.jobs.messages._MOST_JOBS", 2)
    _write(file, BODY, BODY, BODY, {**BODY, "temperature": 9})
    result = await _submitted(router, file, "--group", "night")
    assert isinstance(result.exception, InvalidArgument) and "line 4: temperature" in str(result.exception)
    again = "the same file with `--group night` submits the others"
    assert result.stderr == f"2 of 4 jobs are submitted: {again}\n"
    _write(file, BODY, BODY, BODY, BODY)
    result = await _submitted(router, file, "--group", "night")
    assert result.exit_code == 0 and "4 succeeded" in result.stdout


async def test_the_reasons_of_failed_jobs_are_shown(router: RouterServer, file: Path) -> None:
    long = {**BODY, "max_tokens": MAX_CONTEXT_TOKENS}  # only the run shows it
    _write(file, BODY, *[long] * 4)
    result = await _submitted(router, file, "--group", "night")
    assert result.exit_code == 1 and "1 succeeded, 4 failed" in result.stdout
    *reasons, last = result.stderr.splitlines()
    assert [reason.split(":")[:2] for reason in reasons] == [["failed", f" {line}"] for line in (2, 3, 4)]
    assert all("context" in reason and "`slipstream jobs show job-" in reason for reason in reasons)
    assert "`slipstream jobs ls --group night --state failed`" in last


BOTH = ["--webhook", "x", "--webhook-secret-file"]
SECRET = "whsec_" + "c2VjcmV0c2VjcmV0c2VjcmV0c2VjcmV0"


@pytest.fixture
async def hooked(cluster: FakeCluster, card: ModelCard, database: Database) -> AsyncIterator[RouterServer]:
    """A router that may send to one host."""
    hosts = parse_webhook_hosts("hooks.example.com")
    async with open_router(cluster, card, database=database, webhook_hosts=hosts) as server:
        yield server


@pytest.mark.parametrize("source", ["file", "environment"])
async def test_a_webhook_and_a_retention_are_stored_with_the_jobs(
    hooked: RouterServer, database: Database, file: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    _write(file, BODY)
    flags = ["--webhook", "https://hooks.example.com/end", "--retention-s", "7200", "--no-wait"]
    if source == "file":
        (file.parent / "secret").write_text(f"{SECRET}\n")
        flags += ["--webhook-secret-file", str(file.parent / "secret")]
    else:
        monkeypatch.setenv("SLIPSTREAM_WEBHOOK_SECRET", SECRET)
    result = await _submitted(hooked, file, *flags)
    assert result.exit_code == 0, result.output
    stored = "SELECT webhook_url, webhook_secret, retention_s FROM jobs"
    (row,) = await database.read(lambda tx: tx.execute(stored))
    assert row == ("https://hooks.example.com/end", SECRET, 7200.0)


@pytest.mark.parametrize(
    ("flags", "content", "field", "words"),
    [
        (["--webhook", "https://hooks.example.com/"], None, "--webhook", "needs a secret"),
        (["--webhook-secret-file", "{file}"], SECRET, "--webhook-secret-file", "goes with --webhook"),
        (
            ["--webhook", "x", "--webhook-secret-file", "{file}"],
            None,
            "--webhook-secret-file",
            "cannot be read",
        ),
        (
            ["--webhook", "x", "--webhook-secret-file", "{file}"],
            "a b",
            "--webhook-secret-file",
            "must hold one",
        ),
    ],
)
def test_a_secret_that_is_missing_or_unreadable_is_refused_by_its_flag(
    file: Path, flags: list[str], content: str | None, field: str, words: str
) -> None:
    _write(file, BODY)
    secret = file.with_name("secret")
    if content is not None:
        secret.write_text(content)
    error = _submit(file, *[flag.replace("{file}", str(secret)) for flag in flags]).exception
    assert isinstance(error, InvalidArgument) and error.field == field
    assert words in error.reason


async def test_a_changed_file_needs_another_group(router: RouterServer, file: Path) -> None:
    """The command makes the idempotency keys, and so does not speak of them."""
    _write(file, BODY)
    assert (await _submitted(router, file, "--group", "night")).exit_code == 0
    _write(file, {**BODY, "max_tokens": 5})
    error = (await _submitted(router, file, "--group", "night")).exception
    assert isinstance(error, InvalidArgument) and error.field == "--group"
    assert "night" in error.reason and "another group" in error.reason
