"""`slipstream jobs submit`: what it refuses, and what it says of jobs that fail or are not submitted."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from services.router.server import RouterServer
from slipstream.cli.app import build_app
from slipstream.errors import InvalidArgument
from tests.router.conftest import HELLO, MAX_CONTEXT_TOKENS, WAIT_S

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
    ("flag", "value"), [("--path", "/v1/embeddings"), ("--group", "g" * 200), ("--expires-s", "1e9")]
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
