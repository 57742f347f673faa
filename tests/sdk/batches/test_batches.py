"""`client.batches` against a whole router before fake workers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from services.router.server import RouterServer
from slipstream import AsyncClient, Client
from slipstream.batches.calls import Polls
from slipstream.batches.messages import AnswerLines, submitted_batch
from slipstream.errors import DataCorrupt, DeadlineExceeded, FailedPrecondition, InvalidArgument, NotFound
from slipstream.v1 import batches_pb2
from tests.router.api.batches.conftest import line
from tests.router.support.fake_cluster import FakeCluster
from tests.sdk.calls.either_client import KINDS, EitherClient


async def test_a_batch_goes_from_end_to_end(client: EitherClient, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(line("a") + line("b") + line("bad", body={"messages": []}))
    file = await client("files.upload", tmp_path / "in.jsonl")
    created = await client("batches.create", file.id, metadata={"for": "a test"}, output_ttl_s=3600)
    assert (created.endpoint, created.input_file_id) == ("/v1/chat/completions", file.id)
    assert not created.ended
    batch = await client("batches.wait", created.id)
    assert (batch.state, batch.ended, batch.metadata) == ("completed", True, {"for": "a test"})
    assert (batch.counts.total, batch.counts.completed, batch.counts.failed) == (3, 2, 1)
    assert batch.usage.completion_tokens > 0 and batch.ended_unix_s >= batch.created_unix_s
    assert await client("batches.get", batch.id) == batch
    for given in (batch, batch.id, created):
        answers = {answer.custom_id: answer for answer in await client("batches.answers", given)}
        assert set(answers) == {"a", "b"}
        assert {answer.http_status for answer in answers.values()} == {200}
        assert answers["a"].body["choices"][0]["message"]["content"]
    [failure] = await client("batches.failures", batch)
    assert (failure.custom_id, failure.http_status, failure.error) == ("bad", 400, "")
    assert "messages" in failure.body["error"]["message"]
    output = await client("files.get", batch.output_file_id)
    assert output.purpose == "batch_output"
    assert round(output.expires_unix_s - output.created_unix_s) == 3600


@KINDS
async def test_a_router_that_is_unavailable_is_replaced_by_the_next(
    kind: type[Client | AsyncClient], router: RouterServer
) -> None:
    for method, given in (
        ("files.upload", line("a")),
        ("files.list_files", None),
        ("batches.create", "file-1"),
    ):
        client = EitherClient(kind(f"127.0.0.1:1,{router.host.endpoint}"))
        if method == "batches.create":
            with pytest.raises(NotFound):  # the word of the router that answers
                await client(method, given)
        else:
            assert await client(method, *filter(None, [given]))
        await client.close()


async def test_a_failed_batch_names_its_lines_and_has_no_answers(client: EitherClient) -> None:
    file = await client("files.upload", line("a") + line("a"))
    batch = await client("batches.wait", (await client("batches.create", file.id)).id)
    assert batch.state == "failed"
    assert [(fault.code, fault.line, fault.field) for fault in batch.errors] == [
        ("duplicate_custom_id", 2, "custom_id")
    ]
    assert await client("batches.answers", batch) == await client("batches.failures", batch) == []


async def test_a_wait_ends_with_its_time_out_and_a_cancel_ends_the_batch(
    client: EitherClient, cluster: FakeCluster
) -> None:
    for decode in cluster.decodes:
        decode.gate.clear()  # nothing ends
    created = await client("batches.create", (await client("files.upload", line("a"))).id)
    for timeout_s in (0.0, 0.3):
        with pytest.raises(DeadlineExceeded, match=rf"^{created.id} is \w+ after {timeout_s:g} s$"):
            await client("batches.wait", created.id, timeout_s=timeout_s)
    for method in ("answers", "failures"):
        with pytest.raises(FailedPrecondition, match="its answers come at its end"):
            await client(f"batches.{method}", created)
    assert (await client("batches.cancel", created.id)).state == "cancelling"
    batch = await client("batches.wait", created.id, timeout_s=100.0)
    assert batch.state == "cancelled" and batch.cancelling_unix_s > 0
    [failure] = await client("batches.failures", batch)
    assert (failure.custom_id, failure.http_status, failure.body) == ("a", 0, None)
    assert failure.error_code == "batch_cancelled" and failure.error
    with pytest.raises(FailedPrecondition):
        await client("batches.cancel", batch.id)
    for decode in cluster.decodes:
        decode.gate.set()


async def test_batches_are_listed_page_by_page(client: EitherClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.batches.calls._PAGE", 2)
    file = await client("files.upload", line("a"))
    made = [(await client("batches.create", file.id)).id for _ in range(5)]
    assert [batch.id for batch in await client("batches.list_batches")] == made[::-1]


async def test_what_does_not_fit_is_refused_by_field(client: EitherClient) -> None:
    file = await client("files.upload", line("a"))
    for options, field in (
        ({"endpoint": "/v1/embeddings"}, "endpoint"),
        ({"metadata": {"a": "v" * 513}}, "metadata.a"),
        ({"output_ttl_s": 0.001}, "output_ttl_ms"),
        ({"output_ttl_s": -1}, "output_ttl_s"),
    ):
        with pytest.raises(InvalidArgument) as refused:
            await client("batches.create", file.id, **options)
        assert refused.value.field == field
    for method in ("get", "wait", "cancel", "answers"):
        with pytest.raises(NotFound):
            await client(f"batches.{method}", "batch_000000000000")


def test_the_pauses_of_a_wait_grow_up_to_a_bound() -> None:
    polls = Polls("batch_1", None)
    batch = submitted_batch(batches_pb2.Batch(id="batch_1", state=batches_pb2.BATCH_STATE_IN_PROGRESS))
    pauses = [polls.pause_s(batch) for _ in range(40)]
    assert pauses == sorted(pauses)
    assert pauses[0] < 0.5 and pauses[1] > pauses[0] and pauses[-1] == 5.0
    bounded = Polls("batch_1", 1e-3)
    assert bounded.timeout_s == 1.0 and Polls("batch_1", 1e6).timeout_s == 60.0


@pytest.mark.parametrize("n_bytes", [1, 7, 1 << 20])
def test_lines_are_put_together_from_pieces(n_bytes: int) -> None:
    body = {"text": "ä\u2028b" * 50}
    rows = [
        {"custom_id": name, "response": {"status_code": 200, "body": body}, "error": None} for name in "abc"
    ]
    content = b"\n".join([json.dumps(row, ensure_ascii=False).encode() for row in rows])
    for whole in (content, content + b"\n"):
        lines = AnswerLines()
        pieces = [whole[begin : begin + n_bytes] for begin in range(0, len(whole), n_bytes)]
        found = [answer for piece in pieces for answer in lines.add(piece)]
        found += lines.end()
        assert [answer.custom_id for answer in found] == ["a", "b", "c"]
        assert all(answer.body == body for answer in found)


@pytest.mark.parametrize("content", [b"{\n", b"[]\n", b"[" * 50_000 + b"\n", b'{"custom_id": "a"}\n'])
def test_a_line_that_is_no_answer_is_named(content: bytes) -> None:
    with pytest.raises(DataCorrupt):
        list(AnswerLines().add(content))
