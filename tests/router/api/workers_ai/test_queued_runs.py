"""Answers of queued runs: each in the form of its body, failures with their codes."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from services.router.api.workers_ai.queued_runs import RunUsage, reference_of, response_item
from services.router.api.workers_ai.run_body import RunBody
from services.router.jobs.types import Job, JobResult, JobState
from slipstream.errors import InvalidArgument

CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}}


def item_of(run: RunBody, result: JobResult | None, state: JobState = JobState.SUCCEEDED) -> Any:
    job = Job("job", "alice", state, "/v1/chat/completions", reference_of(run), "g", 1, 0, "", 0, 0, 0, 0, 0)
    return json.loads(msgspec.json.encode(response_item(3, job, result, RunUsage())))


def answer(content: str | None, *, finish_reason: str = "length", **message: Any) -> JobResult:
    choice = {
        "message": {"content": content, **message},
        "logprobs": {"content": [{"token": "a"}]},
        "finish_reason": finish_reason,
    }
    body = {"choices": [choice], "usage": {"prompt_tokens": 2, "total_tokens": 2}}
    return JobResult(200, json.dumps(body).encode())


def test_a_native_run_has_the_older_fields_beside_the_whole_answer() -> None:
    item = item_of(RunBody(b"", is_native=True, reference="a=b"), answer(None, tool_calls=[CALL]))
    assert (item["id"], item["success"], item["external_reference"]) == (3, True, "a=b")
    assert item["result"]["response"] == ""
    assert item["result"]["tool_calls"] == [{"id": "c", "name": "look", "arguments": {"a": 1}}]
    assert item["result"]["choices"][0]["logprobs"]["content"] == [{"token": "a"}]


def test_json_is_parsed_where_it_was_asked_for() -> None:
    native = RunBody(b"", is_native=True)
    asked = RunBody(b"", is_native=True, is_json=True)
    assert item_of(native, answer('{"a": 1}'))["result"]["response"] == '{"a": 1}'
    assert item_of(asked, answer('{"a": 1}'))["result"]["response"] == {"a": 1}


@pytest.mark.parametrize("is_native", [True, False])
def test_json_that_was_cut_fails_its_run(is_native: bool) -> None:
    asked = RunBody(b"", is_native=is_native, is_json=True)
    item = item_of(asked, answer('{"a": '))
    assert (item["success"], item["errors"][0]["code"]) == (False, 5001)
    unmet = "JSON Mode couldn't be met: "
    assert item["errors"][0]["message"] == f"{unmet}the answer ended at its limit of tokens"
    stopped = item_of(asked, answer('{"a": ', finish_reason="stop"))
    assert stopped["errors"][0]["message"] == f"{unmet}a stop ended the answer"
    assert item_of(asked, answer('{"a": ' + "1" * 5000 + "}"))["success"]
    assert item_of(asked, answer('{"a": 1}'))["success"]
    assert item_of(asked, answer(None, tool_calls=[CALL]))["success"]
    plain = RunBody(b"", is_native=is_native)
    assert item_of(plain, answer('{"a": '))["success"]


@pytest.mark.parametrize(
    ("status", "code"), [(400, 5006), (413, 3006), (429, 3040), (504, 3007), (500, 5001)]
)
def test_a_failed_run_has_the_code_of_its_status(status: int, code: int) -> None:
    body = json.dumps({"error": {"message": "top_p: is wrong"}}).encode()
    item = item_of(RunBody(b""), JobResult(status, body), JobState.FAILED)
    assert (item["success"], item["errors"]) == (False, [{"code": code, "message": "top_p: is wrong"}])


@pytest.mark.parametrize("state", [JobState.CANCELLED, JobState.EXPIRED])
def test_a_run_without_an_answer_says_why(state: JobState) -> None:
    item = item_of(RunBody(b"", reference=""), None, state)
    assert item["errors"][0]["message"] and item["external_reference"] == ""


@pytest.mark.parametrize(
    ("status", "body"), [(200, b'{"content": []}'), (200, b'{"choices": [], "usage": {}}'), (400, b"{}")]
)
def test_an_answer_of_another_api_is_a_failed_run(status: int, body: bytes) -> None:
    item = item_of(RunBody(b"", is_native=True), JobResult(status, body))
    assert not item["success"] and item["errors"][0]["code"] == 5001


def test_a_reference_is_bounded() -> None:
    with pytest.raises(InvalidArgument):
        reference_of(RunBody(b"", reference="x" * 501))
