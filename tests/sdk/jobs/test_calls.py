"""`client.jobs` and `slipstream jobs` against a whole router before fake workers."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from services.router.server import RouterServer
from slipstream.async_client import AsyncClient
from slipstream.cli.app import build_app
from slipstream.cli.jobs.body_file import read_bodies
from slipstream.client import Client
from slipstream.errors import InvalidArgument, NotFound
from slipstream.jobs.messages import JobOptions, index_in, renumbered, submissions
from tests.router.conftest import HELLO, WAIT_S

BODY = {"messages": HELLO, "max_tokens": 4}


def _slipstream(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(build_app(), ["jobs", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout


async def test_a_client_submits_and_waits(router: RouterServer) -> None:
    async with asyncio.timeout(WAIT_S), AsyncClient(router.host.endpoint) as client:
        jobs = await client.jobs.submit(
            [BODY, BODY], references=["a", "b"], options=JobOptions(group_id="g", idempotency_key="k")
        )
        again = await client.jobs.submit([BODY, BODY], options=JobOptions(idempotency_key="k"))
        assert [job.id for job in again] == [job.id for job in jobs]
        done = await client.jobs.wait(jobs[0].id)
        assert done.job.state == "succeeded"
        assert done.answer["usage"]["completion_tokens"] == 4
        counts = [each async for each in client.jobs.follow_group("g")]
        assert (counts[-1].ended, counts[-1].total) == (2, 2)
        listed = [job async for job in client.jobs.list_jobs(group_id="g", state="succeeded")]
        assert [job.reference for job in listed] == ["a", "b"]
        with pytest.raises(NotFound):
            await client.jobs.get("job-none")


async def test_a_blocking_client_does_the_same(router: RouterServer) -> None:
    def use() -> None:
        with Client(router.host.endpoint) as client:
            [job] = client.jobs.submit([BODY], options=JobOptions(group_id="g"))
            assert client.jobs.wait(job.id).answer["choices"]
            assert [each.id for each in client.jobs.list_jobs(group_id="g")] == [job.id]
            assert client.jobs.cancel(job.id) == client.jobs.cancel(group_id="g") == 0

    async with asyncio.timeout(WAIT_S):
        await asyncio.to_thread(use)


async def test_the_commands_submit_list_show_and_cancel(router: RouterServer, tmp_path: Path) -> None:
    file, output = tmp_path / "bodies.jsonl", tmp_path / "answers.jsonl"
    batch = {"custom_id": "second", "method": "POST", "url": "/v1/chat/completions", "body": BODY}
    file.write_text(json.dumps(BODY) + "\n\n" + json.dumps(batch) + "\n")
    at = ("--endpoint", router.host.endpoint)

    def use() -> None:
        for _ in range(2):  # the second time continues the first
            code, text = _slipstream("submit", str(file), "--group", "g", "--output", str(output), *at)
            assert code == 0 and "2 succeeded" in text
        answers = [json.loads(line) for line in output.read_text().splitlines()]
        assert [answer["reference"] for answer in answers] == ["1", "second"]
        _, text = _slipstream("ls", "--group", "g", "--json", *at)
        listed = json.loads(text)
        assert [job["state"] for job in listed] == ["succeeded"] * 2
        _, text = _slipstream("ls", *at)
        assert listed[0]["id"] in text and "succeeded" in text
        _, text = _slipstream("show", listed[0]["id"], *at)
        assert json.loads(text)["answer"]["choices"]
        assert "is_held" in json.loads(text)
        assert _slipstream("cancel", listed[0]["id"], *at)[1] == "0 cancelled\n"
        wrong = tmp_path / "wrong.jsonl"
        wrong.write_text(json.dumps(BODY) + "\n\n" + json.dumps({**BODY, "temperature": "hot"}) + "\n")
        with pytest.raises(InvalidArgument, match=r"wrong.jsonl: line 3: temperature: must be") as refused:
            _slipstream("submit", str(wrong), *at)
        assert refused.value.field == "FILE"
        wrong.write_text(json.dumps(BODY) + "\n\n" + json.dumps({**BODY, "temperature": 9}) + "\n")
        with pytest.raises(InvalidArgument, match=r"wrong.jsonl: line 3: temperature: must be a number"):
            _slipstream("submit", str(wrong), *at)
        with pytest.raises(InvalidArgument, match=r"--output: /dev/full: No space.* --group g again"):
            _slipstream("submit", str(file), "--group", "g", "--output", "/dev/full", *at)
        with pytest.raises(InvalidArgument):
            _slipstream("cancel", *at)

    async with asyncio.timeout(WAIT_S):
        await asyncio.to_thread(use)


async def test_ctrl_c_leaves_the_jobs_and_says_how_to_end_them(
    router: RouterServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("slipstream.cli.jobs.progress.follow_group", interrupted)
    (tmp_path / "bodies.jsonl").write_text(json.dumps(BODY))
    submit = ["jobs", "submit", str(tmp_path / "bodies.jsonl"), "--endpoint", router.host.endpoint]
    async with asyncio.timeout(WAIT_S):
        answer = await asyncio.to_thread(CliRunner().invoke, build_app(), [*submit, "--group", "night"])
    assert answer.exit_code == 130
    assert "`slipstream jobs cancel --group night`" in answer.stderr


@pytest.mark.parametrize(("text", "reason"), [("", "no bodies"), ("{}\n[1]\n", "line 2")])
def test_a_file_without_bodies_is_refused(text: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "bodies.jsonl").write_text(text)
    with pytest.raises(InvalidArgument, match=reason):
        _slipstream("submit", str(tmp_path / "bodies.jsonl"), "--endpoint", "127.0.0.1:1")


def _lines(*bodies: Any) -> str:
    return "\n".join(json.dumps(body, ensure_ascii=False) for body in bodies)


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("url", "/v1/completions", "line 2: url must be /v1/chat/completions, not '/v1/completions'; --path"),
        ("method", "GET", "line 2: method must be POST, not 'GET'"),
    ],
)
def test_a_line_for_another_endpoint_is_refused(field: str, value: str, reason: str, tmp_path: Path) -> None:
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": BODY}
    (tmp_path / "bodies.jsonl").write_text(_lines(line, {**line, field: value}))
    with pytest.raises(InvalidArgument, match=reason):
        _slipstream("submit", str(tmp_path / "bodies.jsonl"), "--endpoint", "127.0.0.1:1")


def test_a_line_break_of_unicode_ends_no_line(tmp_path: Path) -> None:
    (tmp_path / "bodies.jsonl").write_text(_lines({"prompt": "a\u2028b\x85c"}, BODY))
    found = read_bodies(tmp_path / "bodies.jsonl", "/v1/chat/completions")
    assert found.bodies == [{"prompt": "a\u2028b\x85c"}, BODY]
    assert found.references == ["1", "2"] and found.lines == [1, 2]


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        ("no/folder/answers", "there is no folder"),
        ("bodies.jsonl/answers", "there is no folder"),
        (".", "is a folder"),
        ("bodies.jsonl", "is the file of the bodies"),
        ("a" * 300, "File name too long"),
    ],
)
def test_answers_that_cannot_be_written_are_refused_before_anything_is_sent(
    output: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sent(*_: Any, **__: Any) -> None:
        raise AssertionError("the bodies were sent")

    monkeypatch.setattr("slipstream.jobs.calls.BlockingJobs.submit_parts", sent)
    file = tmp_path / "bodies.jsonl"
    file.write_text(json.dumps(BODY))
    given = ("--output", str(tmp_path / output), "--endpoint", "127.0.0.1:1")
    with pytest.raises(InvalidArgument, match=f"--output: .*{reason}"):
        _slipstream("submit", str(file), *given)


def test_an_error_names_the_body_of_the_whole_submission() -> None:
    error = renumbered(InvalidArgument("jobs[7].body.model", "is not served"), 500)
    assert (error.field, error.reason) == ("jobs[507].body.model", "is not served")
    assert index_in(error.field) == (507, "model", True)
    assert index_in("jobs[3].path") == (3, "path", False)
    assert index_in("group_id") is None


@pytest.mark.parametrize("body", [{"prompt": "hi"}, '{"prompt": "hi"}', b"{}"])
def test_one_body_in_place_of_a_list_is_named(body: Any) -> None:
    with pytest.raises(InvalidArgument) as caught:
        list(submissions(body, (), JobOptions(idempotency_key="k")))
    assert caught.value.field == "bodies"


def test_a_large_submission_is_several_calls_with_one_key() -> None:
    bodies: list[Any] = [{"prompt": "x" * 10_000}] * 1200
    requests = list(submissions(bodies, (), JobOptions(idempotency_key="k")))
    keys = [job.idempotency_key for request in requests for job in request.jobs]
    assert keys == [f"k/{index}" for index in range(1200)]
    assert len(requests) > 2 and all(request.ByteSize() < 5 << 20 for request in requests)
    assert all(len(request.jobs) <= 500 for request in requests)


async def test_an_end_amid_a_submission_says_how_to_go_on(
    router: RouterServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.jobs.messages._MOST_JOBS", 2)
    bodies = [BODY, BODY, BODY, {**BODY, "temperature": 9}]
    options = JobOptions(group_id="g", idempotency_key="k")
    async with asyncio.timeout(WAIT_S), AsyncClient(router.host.endpoint) as client:
        with pytest.raises(InvalidArgument) as refused:
            await client.jobs.submit(bodies, options=options)
        assert refused.value.field == "jobs[3].body.temperature"
        assert refused.value.__notes__ == [
            "2 of 4 jobs are stored: the same call with JobOptions.idempotency_key 'k' stores the others"
        ]
        stored = [job.id async for job in client.jobs.list_jobs(group_id="g")]
        again = await client.jobs.submit([BODY] * 4, options=options)
        assert [job.id for job in again[:2]] == stored and len({job.id for job in again}) == 4
        with pytest.raises(InvalidArgument) as refused:
            await client.jobs.submit(bodies[3:], options=options)
        assert not hasattr(refused.value, "__notes__")


async def test_a_lost_router_is_replaced_by_the_next(router: RouterServer) -> None:
    async with asyncio.timeout(WAIT_S), AsyncClient(f"127.0.0.1:1,{router.host.endpoint}") as client:
        [job] = await client.jobs.submit([BODY])
        assert (await client.jobs.wait(job.id)).job.state == "succeeded"


def test_seconds_become_whole_milliseconds_and_a_part_of_one_is_not_the_default() -> None:
    options = JobOptions(idempotency_key="k", expires_s=1.5, retention_s=0.0001)
    [request] = submissions([BODY], (), options)
    assert (request.jobs[0].expires_ms, request.jobs[0].retention_ms) == (1500, 1)


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("field", ["expires_s", "retention_s"])
def test_a_duration_that_no_message_holds_is_refused_by_its_field(field: str, seconds: float) -> None:
    options = JobOptions(**{"idempotency_key": "k", field: seconds})  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument) as caught:
        list(submissions([BODY], (), options))
    assert caught.value.field == field
