"""JobService of a whole router before fake workers."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from libs.common import api_bounds, job_bounds
from libs.database.database import open_database
from services.router.api.jobs import service as service_module
from services.router.api.responses.stored.store import ResponseStore, StoredResponse
from services.router.jobs.store import JobStore
from services.router.jobs.types import Job
from services.router.jobs.webhooks.policy import parse_webhook_hosts
from services.router.request.model_card import ModelCard
from services.router.server import RouterServer
from slipstream import bounds, errors
from slipstream.async_client import AsyncClient
from slipstream.client import Client
from slipstream.rpc.dial import MAX_MESSAGE_BYTES, dial
from slipstream.rpc.rpc_errors import from_rpc_error
from slipstream.v1 import jobs_pb2
from slipstream.v1.jobs_pb2_grpc import JobServiceStub
from tests.router.conftest import HELLO, MAX_CONTEXT_TOKENS, WAIT_S, open_router
from tests.router.support.fake_cluster import FakeCluster
from tests.support.api_keys import tenant_keys

CHAT = "/v1/chat/completions"


def new_job(path: str = CHAT, **body: Any) -> jobs_pb2.NewJob:
    return jobs_pb2.NewJob(path=path, body=json.dumps({"messages": HELLO, **body}).encode())


def in_group(group_id: str) -> jobs_pb2.NewJob:
    job = new_job()
    job.group_id = group_id
    return job


@pytest.fixture
async def router(cluster: FakeCluster, card: ModelCard, tmp_path: Path) -> AsyncIterator[RouterServer]:
    database = open_database(f"sqlite:{tmp_path}/jobs.db")
    hosts = parse_webhook_hosts("hooks.example.com")
    async with open_router(cluster, card, database=database, webhook_hosts=hosts) as server:
        yield server
    await database.close()


@pytest.fixture
async def stub(router: RouterServer) -> AsyncIterator[Any]:
    async with dial(router.host.endpoint) as channel:
        yield JobServiceStub(channel)


async def _run(stub: Any, *jobs: jobs_pb2.NewJob) -> list[jobs_pb2.GetJobResponse]:
    submitted = await stub.SubmitJobs(jobs_pb2.SubmitJobsRequest(jobs=jobs))
    ended = []
    async with asyncio.timeout(WAIT_S):
        for job in submitted.jobs:
            async for _ in stub.FollowJobs(jobs_pb2.FollowJobsRequest(id=job.id)):
                pass
            ended.append(await stub.GetJob(jobs_pb2.GetJobRequest(id=job.id)))
    return ended


async def _refusal(call: Any) -> errors.SlipstreamError:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call
    return from_rpc_error(refused.value)


async def test_a_job_has_the_answer_of_its_endpoint(stub: Any, router: RouterServer) -> None:
    [chat, plain, several, response, message] = await _run(
        stub,
        new_job(max_tokens=5),
        jobs_pb2.NewJob(path="/v1/completions", body=b'{"prompt": "Where", "max_tokens": 3}'),
        new_job(max_tokens=4, n=2),
        jobs_pb2.NewJob(path="/v1/responses", body=b'{"input": "Where", "max_output_tokens": 3}'),
        new_job("/v1/messages", max_tokens=4),
    )
    answer = json.loads(chat.result)
    assert (chat.job.state, chat.job.http_status) == (jobs_pb2.JOB_STATE_SUCCEEDED, 200)
    assert answer["choices"][0]["message"]["content"]
    assert answer["usage"]["completion_tokens"] == chat.job.output_tokens == 5
    assert json.loads(plain.result)["object"] == "text_completion"
    assert len(json.loads(several.result)["choices"]) == 2
    assert json.loads(response.result)["usage"]["output_tokens"] == 3
    answer = json.loads(message.result)
    assert (answer["type"], answer["stop_reason"]) == ("message", "max_tokens")
    assert answer["usage"]["output_tokens"] == message.job.output_tokens == 4
    assert router.manager.held == 0


async def test_an_answer_is_the_same_in_each_attempt(stub: Any, router: RouterServer) -> None:
    """The second attempt comes after the first one ended, and its commit was undone."""
    [first] = await _run(stub, new_job(max_tokens=8, temperature=1.0))
    store = router.jobs.store
    assert store is not None

    def undo(tx: Any) -> None:
        tx.execute("DELETE FROM job_results")
        tx.execute(
            "UPDATE jobs SET state = 'queued', ended_unix_s = 0, created_unix_s = created_unix_s - 1000"
        )
        tx.execute("UPDATE job_tenants SET live = 1")

    await store._database.run(undo)
    async with asyncio.timeout(WAIT_S):
        async for _ in stub.FollowJobs(jobs_pb2.FollowJobsRequest(id=first.job.id)):
            pass
    second = await stub.GetJob(jobs_pb2.GetJobRequest(id=first.job.id))
    assert second.job.attempt == first.job.attempt + 1

    assert json.loads(second.result)["created"] == int(second.job.created_unix_s)
    assert second.job.created_unix_s == first.job.created_unix_s - 1000

    def comparable(data: bytes) -> Any:
        answer = json.loads(data)
        answer.pop("created")
        answer["usage"].pop("prompt_tokens_details", None)  # what the cache held
        return answer

    assert comparable(second.result) == comparable(first.result)


async def test_a_result_larger_than_a_message_is_read_in_parts(stub: Any, router: RouterServer) -> None:
    [ended] = await _run(stub, new_job(max_tokens=1))
    large = json.dumps({"text": "x" * (34 << 20)}).encode()
    assert len(large) > MAX_MESSAGE_BYTES
    store, job_id = router.jobs.store, ended.job.id
    assert store is not None
    await store._database.run(lambda tx: tx.execute("UPDATE job_results SET body = ?", (large,)))
    async with AsyncClient(router.host.endpoint) as client:
        assert (await client.jobs.get(job_id)).answer == json.loads(large)
    with Client(router.host.endpoint) as blocking:
        assert (await asyncio.to_thread(blocking.jobs.get, job_id)).answer == json.loads(large)
    whole = await _refusal(stub.GetJob(jobs_pb2.GetJobRequest(id=job_id)))
    assert isinstance(whole, errors.InvalidArgument) and whole.field == "result_limit"
    offset = len(large) - job_bounds.MAX_RESULT_PART_BYTES
    tail = await stub.GetJob(jobs_pb2.GetJobRequest(id=job_id, result_offset=offset))
    assert (tail.result, tail.result_bytes) == (large[offset:], len(large))
    part = await stub.GetJob(jobs_pb2.GetJobRequest(id=job_id, result_offset=3, result_limit=5))
    assert (part.result, part.result_bytes) == (large[3:8], len(large))
    for field, given in (("result_limit", (8 << 20) + 1), ("result_offset", (1 << 30) + 1)):
        request = jobs_pb2.GetJobRequest(id=job_id, **{field: given})
        refusal = await _refusal(stub.GetJob(request))
        assert isinstance(refusal, errors.InvalidArgument) and refusal.field == field


async def test_an_endpoint_that_refuses_fails_the_job_with_its_answer(stub: Any) -> None:
    [response] = await _run(stub, new_job(max_tokens=MAX_CONTEXT_TOKENS))  # and the prompt exceeds them
    assert (response.job.state, response.job.http_status) == (jobs_pb2.JOB_STATE_FAILED, 400)
    assert json.loads(response.result)["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("job", "field"),
    [
        (new_job(path="/v1/embeddings"), "jobs[1].path"),
        (jobs_pb2.NewJob(path=CHAT, body=b"{"), "jobs[1].body"),
        (new_job(temperature="warm"), "jobs[1].body.temperature"),
        (new_job(temperature=9), "jobs[1].body.temperature"),
        (new_job(model="no-such-model"), "jobs[1].body.model"),
        (new_job(stream=True), "jobs[1].body.stream"),
        (
            jobs_pb2.NewJob(path="/v1/responses", body=b'{"input": "a", "background": true}'),
            "jobs[1].body.background",
        ),
        (
            jobs_pb2.NewJob(path="/v1/responses", body=b'{"input": "a", "stream": true}'),
            "jobs[1].body.stream",
        ),
        (jobs_pb2.NewJob(path="/v1/responses", body=b'{"input": "a", "top_p": 7}'), "jobs[1].body.top_p"),
        (new_job("/v1/messages"), "jobs[1].body.max_tokens"),
        (new_job("/v1/messages", max_tokens=4, stop_sequences=["a"] * 99), "jobs[1].body.stop_sequences"),
        (
            jobs_pb2.NewJob(path="/v1/completions", body=b'{"prompt": ["a", ""], "n": 2}'),
            "jobs[1].body.prompt",
        ),
        (jobs_pb2.NewJob(path=CHAT, body=new_job().body, expires_ms=10**12), "jobs[1].expires_ms"),
        (
            jobs_pb2.NewJob(
                path=CHAT, body=new_job().body, webhook=jobs_pb2.Webhook(url="http://127.0.0.1/", secret="x")
            ),
            "jobs[1].webhook",
        ),
    ],
)
async def test_a_submission_with_a_bad_job_is_refused_whole(
    job: jobs_pb2.NewJob, field: str, stub: Any
) -> None:
    error = await _refusal(stub.SubmitJobs(jobs_pb2.SubmitJobsRequest(jobs=[new_job(), job])))
    assert isinstance(error, errors.InvalidArgument) and error.field == field
    assert not (await stub.ListJobs(jobs_pb2.ListJobsRequest())).jobs


async def test_calls_about_no_job_are_refused(stub: Any) -> None:
    unknown = await _refusal(stub.GetJob(jobs_pb2.GetJobRequest(id="job-none")))
    assert isinstance(unknown, errors.NotFound)
    for call in (
        stub.CancelJobs(jobs_pb2.CancelJobsRequest()),
        stub.ListJobs(jobs_pb2.ListJobsRequest(limit=1_000_000)),
        stub.SubmitJobs(jobs_pb2.SubmitJobsRequest()),
    ):
        assert isinstance(await _refusal(call), errors.InvalidArgument)


async def test_groups_are_listed_followed_and_cancelled(stub: Any, router: RouterServer) -> None:
    router.manager.drain()  # nothing is pulled
    jobs = [jobs_pb2.NewJob(path=CHAT, body=new_job().body, group_id="g", reference=str(i)) for i in range(3)]
    await stub.SubmitJobs(jobs_pb2.SubmitJobsRequest(jobs=jobs))
    listed = (await stub.ListJobs(jobs_pb2.ListJobsRequest(group_id="g", limit=2))).jobs
    rest = (await stub.ListJobs(jobs_pb2.ListJobsRequest(group_id="g", after_id=listed[-1].id))).jobs
    assert [job.reference for job in (*listed, *rest)] == ["0", "1", "2"]
    follow = aiter(stub.FollowJobs(jobs_pb2.FollowJobsRequest(group_id="g")))
    async with asyncio.timeout(WAIT_S):
        while (await anext(follow)).counts.queued < 3:  # a pull that had begun gives its jobs back
            pass
        one = await stub.CancelJobs(jobs_pb2.CancelJobsRequest(id=listed[0].id))
        group = await stub.CancelJobs(jobs_pb2.CancelJobsRequest(group_id="g"))
        assert (one.cancelled, group.cancelled) == (1, 2)
        last = [message async for message in follow][-1]
    assert last.counts.cancelled == 3


async def test_a_router_without_a_database_refuses_by_the_name_of_the_flag(
    cluster: FakeCluster, card: ModelCard
) -> None:
    async with open_router(cluster, card) as server, dial(server.host.endpoint) as channel:
        call = JobServiceStub(channel).SubmitJobs(jobs_pb2.SubmitJobsRequest(jobs=[new_job()]))
        error = await _refusal(call)
    assert isinstance(error, errors.FailedPrecondition) and "--database" in error.message


async def test_many_short_bodies_leave_the_event_loop(
    stub: Any, router: RouterServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[int] = []
    run = router.manager.context.threads.run

    async def counted(tenant: str, piece: Any, **options: Any) -> Any:
        checked.append(1)
        return await run(tenant, piece, **options)

    monkeypatch.setattr(router.manager.context.threads, "run", counted)
    content = "a" * 1000
    jobs = [new_job(messages=[{"role": "user", "content": content}], max_tokens=1) for _ in range(100)]
    await stub.SubmitJobs(jobs_pb2.SubmitJobsRequest(jobs=jobs))
    assert len(checked) > len(jobs)  # the message, and each body


async def test_a_message_of_empty_jobs_is_refused_by_its_structure(router: RouterServer) -> None:
    async with dial(router.host.endpoint) as channel:
        call: Any = channel.unary_unary("/slipstream.v1.JobService/SubmitJobs")
        refused = await _refusal(call(b"\x0a\x00" * (bounds.MAX_STRUCTURE_BYTES // 2 + 1)))
    assert isinstance(refused, errors.InvalidArgument)
    assert "outside of texts" in str(refused)


async def test_a_revoked_key_follows_no_job(cluster: FakeCluster, card: ModelCard, tmp_path: Path) -> None:
    database, keys = open_database(f"sqlite:{tmp_path}/jobs.db"), tenant_keys({"sesame": "ali"})
    metadata = [("authorization", "Bearer sesame")]
    async with (
        open_router(cluster, card, database=database, keys=keys) as router,
        dial(router.host.endpoint) as channel,
    ):
        router.manager.drain()  # nothing is pulled
        stub: Any = JobServiceStub(channel)
        request = jobs_pb2.SubmitJobsRequest(jobs=[new_job()])
        [job] = (await stub.SubmitJobs(request, metadata=metadata)).jobs
        follow = aiter(stub.FollowJobs(jobs_pb2.FollowJobsRequest(id=job.id), metadata=metadata))
        async with asyncio.timeout(WAIT_S):
            await anext(follow)
            keys.replace([], {})
            await JobStore(database, wall_clock_s=time.time).cancel("ali", job.id)
            refused = await _refusal(_rest(follow))
        assert isinstance(refused, errors.Unauthenticated)
    await database.close()


async def test_a_revoked_key_ends_a_follower_of_what_does_not_change(
    cluster: FakeCluster, card: ModelCard, tmp_path: Path
) -> None:
    database, keys = open_database(f"sqlite:{tmp_path}/jobs.db"), tenant_keys({"sesame": "ali"})
    metadata = [("authorization", "Bearer sesame")]
    async with (
        open_router(cluster, card, database=database, keys=keys) as router,
        dial(router.host.endpoint) as channel,
    ):
        router.manager.drain()  # nothing is pulled
        stub: Any = JobServiceStub(channel)
        request = jobs_pb2.SubmitJobsRequest(jobs=[in_group("g")])
        await stub.SubmitJobs(request, metadata=metadata)
        follow = aiter(stub.FollowJobs(jobs_pb2.FollowJobsRequest(group_id="g"), metadata=metadata))
        async with asyncio.timeout(WAIT_S):
            await anext(follow)
            keys.replace([], {})
            refused = await _refusal(_rest(follow))
        assert isinstance(refused, errors.Unauthenticated)
    await database.close()


@pytest.mark.parametrize("group", ["batch_0123456789abcdef", "run_3fa85f64-5717-4562-b3fc-2c963f66afa6"])
async def test_groups_of_batches_and_queued_runs_are_not_a_clients(stub: Any, group: str) -> None:
    """A batch counts the jobs of its group: one more than its lines kept it from ending."""
    refused = await _refusal(stub.SubmitJobs(jobs_pb2.SubmitJobsRequest(jobs=[in_group(group)])))
    assert isinstance(refused, errors.InvalidArgument) and refused.field == "jobs[0].group_id"
    refused = await _refusal(stub.CancelJobs(jobs_pb2.CancelJobsRequest(group_id=group)))
    assert isinstance(refused, errors.InvalidArgument) and refused.field == "group_id"


@pytest.mark.parametrize(
    ("fields", "field"),
    [({"state": 9}, "state"), ({"after_id": "zz"}, "after_id"), ({"after_id": "job-0"}, "after_id")],
)
async def test_a_list_with_a_wrong_argument_is_refused(stub: Any, fields: dict[str, Any], field: str) -> None:
    refused = await _refusal(stub.ListJobs(jobs_pb2.ListJobsRequest(**fields)))
    assert isinstance(refused, errors.InvalidArgument) and refused.field == field


async def _rest(follow: AsyncIterator[Any]) -> None:
    async for update in follow:
        assert update.job.state != jobs_pb2.JOB_STATE_CANCELLED


async def test_the_jobs_of_one_call_read_no_more_than_their_share_of_stored_responses(
    router: RouterServer, stub: Any, tmp_path: Path
) -> None:
    """Each of the jobs alone would be taken: together they would read a response of 7 MiB ten times."""
    tenant, text = "default", "word " * ((7 << 20) // 5)
    part = {"type": "output_text", "text": text, "annotations": []}
    output = [{"id": "msg_k_0", "type": "message", "role": "assistant", "content": [part]}]
    database = open_database(f"sqlite:{tmp_path}/jobs.db")
    store = ResponseStore(database, wall_clock_s=time.time)
    await store.save(tenant, StoredResponse({"id": "resp_k", "output": output}, []))
    await database.close()
    body = json.dumps({"input": "Go on.", "previous_response_id": "resp_k"}).encode()
    jobs = [jobs_pb2.NewJob(path="/v1/responses", body=body) for _ in range(10)]
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stub.SubmitJobs(jobs_pb2.SubmitJobsRequest(jobs=jobs))
    error = from_rpc_error(refused.value)
    assert isinstance(error, errors.InvalidArgument)
    assert error.field == f"jobs[{api_bounds.REFERRED.high // len(text)}].body.input"
    few = await stub.SubmitJobs(jobs_pb2.SubmitJobsRequest(jobs=jobs[:2]))
    assert len(few.jobs) == 2


async def test_a_page_of_jobs_is_written_off_the_event_loop(
    stub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    [job] = (await stub.SubmitJobs(jobs_pb2.SubmitJobsRequest(jobs=[new_job(max_tokens=1)]))).jobs
    written_by, encode = [], service_module._encode_jobs

    def encode_jobs(jobs: Sequence[Job]) -> bytes:
        written_by.append(threading.get_ident())
        return encode(jobs)

    monkeypatch.setattr(service_module, "_encode_jobs", encode_jobs)
    listed = await stub.ListJobs(jobs_pb2.ListJobsRequest(limit=1000))
    assert [each.id for each in listed.jobs] == [job.id]
    assert written_by and threading.get_ident() not in written_by
