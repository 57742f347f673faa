"""BatchService of a whole router before fake workers: its methods, tenants, bounds, and what HTTP sees."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest

from libs.common import batch_bounds, service_bounds
from libs.common.rpc.call_reset import resetting_after
from services.router.api.batches import upload
from services.router.api.batches.file_store import FileStore
from services.router.api.batches.rpc import service
from services.router.api.batches.rpc.messages import batches_page
from services.router.request.model_card import ModelCard
from slipstream import errors
from slipstream.rpc.dial import dial
from slipstream.v1 import batches_pb2
from slipstream.v1.batches_pb2_grpc import BatchServiceStub
from tests.router.api.batches.conftest import CHAT, line
from tests.router.conftest import WAIT_S, eventually, open_router
from tests.router.support.fake_cluster import FakeCluster
from tests.router.support.two_faces import TwoFaces, key_of, refusal, two_faces

UPLOAD = "/slipstream.v1.BatchService/UploadFile"
PART_BYTES = batch_bounds.FILE_CHUNK_BYTES


@pytest.fixture
async def faces(cluster: FakeCluster, card: ModelCard, tmp_path: Path) -> AsyncIterator[TwoFaces]:
    async with two_faces(cluster, card, tmp_path) as opened:
        yield opened


class Batches:
    """The calls of one tenant."""

    def __init__(self, faces: TwoFaces, tenant: str = "alice") -> None:
        self._stub: Any = BatchServiceStub(faces.channel)
        self._metadata = key_of(tenant)

    def call(self, method: str, **fields: Any) -> Any:
        request = getattr(batches_pb2, f"{method}Request")(**fields)
        return getattr(self._stub, method)(request, metadata=self._metadata, timeout=WAIT_S)

    def send(self, *messages: batches_pb2.UploadFileRequest) -> Any:
        return self._stub.UploadFile(iter(messages), metadata=self._metadata, timeout=WAIT_S)

    async def upload(self, content: bytes, **header: Any) -> batches_pb2.File:
        parts = [content[begin : begin + PART_BYTES] for begin in range(0, len(content), PART_BYTES)]
        header = {"name": "in.jsonl", "n_bytes": len(content), **header}
        answer = await self.send(header_of(**header), *map(part_of, parts))
        file: batches_pb2.File = answer.file
        return file

    async def download(self, file_id: str) -> bytes:
        pieces = [piece.content async for piece in self.call("DownloadFile", file_id=file_id)]
        assert all(0 < len(piece) <= PART_BYTES for piece in pieces)
        return b"".join(pieces)

    async def ended(self, batch_id: str) -> batches_pb2.Batch:
        async with asyncio.timeout(WAIT_S):
            while True:
                batch: batches_pb2.Batch = (await self.call("GetBatch", batch_id=batch_id)).batch
                if batch.ended_unix_s:
                    return batch
                await asyncio.sleep(0.02)


def header_of(**fields: Any) -> batches_pb2.UploadFileRequest:
    return batches_pb2.UploadFileRequest(header=batches_pb2.FileHeader(**fields))


def part_of(content: bytes) -> batches_pb2.UploadFileRequest:
    return batches_pb2.UploadFileRequest(content=content)


async def rows_left(faces: TwoFaces) -> int:
    """The rows of files after all that is deleted was swept."""
    files = FileStore(faces.database, wall_clock_s=time.time)
    while await files.sweep():
        pass
    sql = "SELECT (SELECT COUNT(*) FROM files) + (SELECT COUNT(*) FROM file_chunks)"
    ((count,),) = await faces.database.read(lambda tx: tx.execute(sql))
    return int(count)


async def test_a_batch_goes_from_end_to_end_and_both_apis_show_it(faces: TwoFaces, card: ModelCard) -> None:
    batches = Batches(faces)
    content = line("a") + line("b") + line("bad", body={"messages": [], "model": card.name})
    file = await batches.upload(content, name="folder/in.jsonl")
    assert (file.name, file.n_bytes, file.purpose) == (
        "in.jsonl",
        len(content),
        batches_pb2.FILE_PURPOSE_BATCH,
    )
    assert (await batches.call("GetFile", file_id=file.id)).file == file
    assert (
        await batches.download(file.id) == content == await faces.ask("GET", f"/v1/files/{file.id}/content")
    )
    created = await batches.call(
        "CreateBatch", input_file_id=file.id, endpoint=CHAT, metadata={"for": "a test"}
    )
    assert created.batch.state == batches_pb2.BATCH_STATE_VALIDATING
    batch = await batches.ended(created.batch.id)
    assert batch.state == batches_pb2.BATCH_STATE_COMPLETED and dict(batch.metadata) == {"for": "a test"}
    assert (batch.counts.total, batch.counts.completed, batch.counts.failed) == (3, 2, 1)
    answers = [json.loads(each) for each in (await batches.download(batch.output_file_id)).splitlines()]
    assert {answer["custom_id"] for answer in answers} == {"a", "b"}
    [failed] = (await batches.download(batch.error_file_id)).splitlines()
    assert json.loads(failed)["custom_id"] == "bad"
    shown = await faces.ask("GET", f"/v1/batches/{batch.id}")
    assert (shown["status"], shown["output_file_id"]) == ("completed", batch.output_file_id)
    assert shown["usage"]["output_tokens"] == batch.usage.completion_tokens > 0
    outputs = await batches.call("ListFiles", purpose=batches_pb2.FILE_PURPOSE_BATCH_OUTPUT)
    assert {each.id for each in outputs.files} == {batch.output_file_id, batch.error_file_id}


async def test_a_file_of_one_api_makes_a_batch_of_the_other(faces: TwoFaces) -> None:
    batches = Batches(faces)
    file = await batches.upload(line("a"))
    body = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"}
    made = await faces.ask("POST", "/v1/batches", json=body)
    assert (await batches.call("GetBatch", batch_id=made["id"])).batch.input_file_id == file.id
    assert [each.id for each in (await batches.call("ListBatches")).batches] == [made["id"]]
    assert (await batches.ended(made["id"])).counts.completed == 1


async def test_a_failed_batch_names_its_lines(faces: TwoFaces) -> None:
    batches = Batches(faces)
    file = await batches.upload(line("a") + line("a"))
    created = await batches.call("CreateBatch", input_file_id=file.id, endpoint=CHAT)
    batch = await batches.ended(created.batch.id)
    [error] = batch.errors
    assert batch.state == batches_pb2.BATCH_STATE_FAILED
    assert (error.code, error.line, error.field) == (
        batches_pb2.LINE_ERROR_CODE_DUPLICATE_CUSTOM_ID,
        2,
        "custom_id",
    )


async def test_a_batch_is_cancelled_and_its_file_stays_meanwhile(
    faces: TwoFaces, cluster: FakeCluster
) -> None:
    for decode in cluster.decodes:
        decode.gate.clear()  # nothing ends
    batches = Batches(faces)
    file = await batches.upload(line("a"))
    created = await batches.call("CreateBatch", input_file_id=file.id, endpoint=CHAT)
    held = await refusal(batches.call("DeleteFile", file_id=file.id))
    assert isinstance(held, errors.FailedPrecondition)
    cancelled = await batches.call("CancelBatch", batch_id=created.batch.id)
    assert cancelled.batch.state == batches_pb2.BATCH_STATE_CANCELLING
    batch = await batches.ended(created.batch.id)
    assert batch.state == batches_pb2.BATCH_STATE_CANCELLED
    over = await refusal(batches.call("CancelBatch", batch_id=batch.id))
    assert isinstance(over, errors.FailedPrecondition)
    await batches.call("DeleteFile", file_id=file.id)
    for method in ("GetFile", "DeleteFile"):
        gone = await refusal(batches.call(method, file_id=file.id))
        assert isinstance(gone, errors.NotFound) and gone.field == "file_id"
    for decode in cluster.decodes:
        decode.gate.set()


async def test_pages_lead_from_one_to_the_next(faces: TwoFaces) -> None:
    batches = Batches(faces)
    files = [(await batches.upload(line("a"))).id for _ in range(3)]
    made = []
    for file in files:
        made.append((await batches.call("CreateBatch", input_file_id=file, endpoint=CHAT)).batch.id)
    first = await batches.call("ListFiles", limit=2, oldest_first=True)
    second = await batches.call("ListFiles", limit=2, oldest_first=True, after=first.files[-1].id)
    assert (first.has_more, second.has_more) == (True, False)
    assert [each.id for each in (*first.files, *second.files)] == files
    assert [each.id for each in (await batches.call("ListFiles")).files] == files[::-1]
    first = await batches.call("ListBatches", limit=2)
    second = await batches.call("ListBatches", limit=2, after=first.batches[-1].id)
    assert (first.has_more, second.has_more) == (True, False)
    assert [each.id for each in (*first.batches, *second.batches)] == made[::-1]


async def test_a_long_page_of_batches_ends_early_and_is_written_off_the_event_loop(
    faces: TwoFaces, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_bounds, "BATCHES_PAGE_BYTES", 2000)
    threads, write = list[threading.Thread](), batches_page

    def noted_write(records: Any, limit: int) -> bytes:
        threads.append(threading.current_thread())
        return write(records, limit)

    monkeypatch.setattr(service, "batches_page", noted_write)
    batches = Batches(faces)
    file = await batches.upload(line("a"))
    fields = {"input_file_id": file.id, "endpoint": CHAT, "metadata": {"k": "v" * 500}}
    made = [(await batches.call("CreateBatch", **fields)).batch.id for _ in range(5)]
    found, after, n_pages = list[str](), "", 0
    while True:
        page = await batches.call("ListBatches", after=after)
        found, n_pages = [*found, *(each.id for each in page.batches)], n_pages + 1
        assert page.ByteSize() <= 2000
        if not page.has_more:
            break
        after = found[-1]
    assert found == made[::-1] and n_pages >= 2
    assert threads and threading.main_thread() not in threads


async def test_a_tenant_sees_its_own_alone(faces: TwoFaces) -> None:
    alice, bob = Batches(faces), Batches(faces, "bob")
    file = await alice.upload(line("a"))
    batch = (await alice.call("CreateBatch", input_file_id=file.id, endpoint=CHAT)).batch
    calls = [
        bob.call("GetFile", file_id=file.id),
        bob.call("DeleteFile", file_id=file.id),
        bob.download(file.id),
        bob.call("CreateBatch", input_file_id=file.id, endpoint=CHAT),
        bob.call("GetBatch", batch_id=batch.id),
        bob.call("CancelBatch", batch_id=batch.id),
    ]
    for call in calls:
        assert isinstance(await refusal(call), errors.NotFound)
    assert not (await bob.call("ListFiles")).files and not (await bob.call("ListBatches")).batches
    assert len((await alice.call("ListFiles")).files) == 1


@pytest.mark.parametrize(
    ("method", "fields", "field"),
    [
        ("ListFiles", {"limit": 1001}, "limit"),
        ("ListFiles", {"after": "batch_000000000000"}, "after"),
        ("ListFiles", {"purpose": 7}, "purpose"),
        ("ListBatches", {"limit": 101}, "limit"),
        ("ListBatches", {"after": "file-000000000000"}, "after"),
        ("CreateBatch", {}, "input_file_id"),
        ("CreateBatch", {"endpoint": "/v1/embeddings"}, "endpoint"),
        ("CreateBatch", {"metadata": {str(index): "" for index in range(17)}}, "metadata"),
        ("CreateBatch", {"metadata": {"a": "v" * 513}}, "metadata.a"),
        ("CreateBatch", {"output_ttl_ms": 1}, "output_ttl_ms"),
    ],
)
async def test_what_does_not_fit_is_refused_by_field(
    faces: TwoFaces, method: str, fields: dict[str, Any], field: str
) -> None:
    batches = Batches(faces)
    if method == "CreateBatch" and fields:
        fields = {"input_file_id": (await batches.upload(line("a"))).id, "endpoint": CHAT, **fields}
    error = await refusal(batches.call(method, **fields))
    assert isinstance(error, errors.InvalidArgument) and error.field == field


HEADER = header_of(name="a", n_bytes=3)


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([part_of(b"abc")], "header"),
        ([batches_pb2.UploadFileRequest()], "header"),
        ([HEADER, HEADER], "header"),
        ([HEADER, part_of(b"ab")], "content"),
        ([HEADER, part_of(b"abcd")], "content"),
        ([HEADER], "content"),
        ([header_of(name="a", n_bytes=3, ttl_ms=5), part_of(b"abc")], "header.ttl_ms"),
        ([header_of(name="a"), part_of(b"abc")], "file"),
        ([header_of(n_bytes=3), part_of(b"abc")], "file"),
        ([header_of(name="n" * 257, n_bytes=3), part_of(b"abc")], "file"),
        ([header_of(name="a", n_bytes=(100 << 20) + 1)], "file"),
        ([header_of(name="a", n_bytes=2 << 20), part_of(b"x" * (PART_BYTES + 1))], "content"),
        ([header_of(name="a", n_bytes=2 << 20), part_of(b"x" * (2 * PART_BYTES))], "request"),
    ],
)
async def test_an_upload_that_does_not_fit_leaves_nothing(
    faces: TwoFaces, messages: Iterable[batches_pb2.UploadFileRequest], field: str
) -> None:
    error = await refusal(Batches(faces).send(*messages))
    assert isinstance(error, errors.InvalidArgument) and error.field == field
    assert await rows_left(faces) == 0


@pytest.mark.parametrize("place", [0, 1, 2])
async def test_a_malformed_message_of_an_upload_is_refused(faces: TwoFaces, place: int) -> None:
    sent = [HEADER.SerializeToString(), part_of(b"ab").SerializeToString(), part_of(b"c").SerializeToString()]
    sent[place] = b"\xff\xff"
    call: Any = faces.channel.stream_unary(UPLOAD)
    error = await refusal(call(iter(sent), metadata=key_of(), timeout=WAIT_S))
    assert isinstance(error, errors.InvalidArgument) and "well-formed" in error.message
    assert await rows_left(faces) == 0


async def _begun(faces: TwoFaces) -> Any:
    """An upload of three bytes of which two have been sent, once it has a row."""
    stub: Any = BatchServiceStub(faces.channel)
    call = stub.UploadFile(metadata=key_of(), timeout=WAIT_S)
    await call.write(HEADER)
    await call.write(part_of(b"ab"))
    sql = "SELECT id FROM files WHERE is_whole = 0 AND expires_unix_s > 0"
    async with asyncio.timeout(WAIT_S):
        while not await faces.database.read(lambda tx: tx.execute(sql)):
            await asyncio.sleep(0.01)
    return call


async def test_a_cancel_amid_an_upload_leaves_no_file(faces: TwoFaces) -> None:
    (await _begun(faces)).cancel()
    async with asyncio.timeout(WAIT_S):
        while await rows_left(faces):
            await asyncio.sleep(0.01)
    assert not (await Batches(faces).call("ListFiles")).files
    await eventually(lambda: not [task for task in asyncio.all_tasks() if "UploadFile" in task.get_name()])


@pytest.mark.parametrize("goes_on", [True, False], ids=["that goes on", "that is silent"])
async def test_an_upload_ends_with_its_key(
    faces: TwoFaces, goes_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload, "KEY_CHECK_S", WAIT_S if goes_on else 0.02)
    call = await _begun(faces)
    faces.revoke_all()
    if goes_on:
        await call.write(part_of(b"c"))
        await call.done_writing()
    assert isinstance(await refusal(call), errors.Unauthenticated)
    assert await rows_left(faces) == 0


async def test_uploads_of_both_apis_share_their_places(
    faces: TwoFaces, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots, receive = list[Any](), upload.UploadSlots.receive

    async def noted(self: Any, *given: Any, **options: Any) -> Any:
        slots.append(self)
        return await receive(self, *given, **options)

    monkeypatch.setattr(upload.UploadSlots, "receive", noted)
    form = aiohttp.FormData({"purpose": "batch"})
    form.add_field("file", line("a"), filename="in.jsonl")
    file = await faces.ask("POST", "/v1/files", data=form)
    assert await Batches(faces).download(file["id"]) == line("a")
    await Batches(faces).upload(line("a"))
    assert len(slots) == 2 and slots[0] is slots[1]


async def test_a_large_file_goes_up_and_down_in_pieces(faces: TwoFaces) -> None:
    batches, content = Batches(faces), bytes(range(256)) * (40 << 10)
    file = await batches.upload(content, ttl_ms=3_600_000)
    assert round(file.expires_unix_s - file.created_unix_s) == 3600
    assert await batches.download(file.id) == content


async def test_a_download_that_is_not_read_is_cut_off(
    faces: TwoFaces, monkeypatch: pytest.MonkeyPatch
) -> None:
    within, delays = resetting_after, list[float]()

    def sooner(delay_s: float) -> Any:
        delays.append(delay_s)
        return within(0.2)

    monkeypatch.setattr(service, "resetting_after", sooner)
    file = await Batches(faces).upload(b"x" * (8 << 20))
    small = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1 << 14)]
    async with grpc.aio.insecure_channel(faces.router.host.endpoint, options=small) as channel:
        stub: Any = BatchServiceStub(channel)
        await stub.GetFile(batches_pb2.GetFileRequest(file_id=file.id), metadata=key_of())
        call = stub.DownloadFile(batches_pb2.DownloadFileRequest(file_id=file.id), metadata=key_of())
        await call.initial_metadata()

        def handlers() -> list[str]:
            names = [task.get_name() for task in asyncio.all_tasks()]
            return [name for name in names if name.endswith("/DownloadFile]")]

        await eventually(lambda: not handlers())
        assert set(delays) == {service_bounds.WRITE_STALL_S}
        call.cancel()


async def test_a_router_without_a_database_refuses_by_the_name_of_the_flag(
    cluster: FakeCluster, card: ModelCard
) -> None:
    async with open_router(cluster, card) as server, dial(server.host.endpoint) as channel:
        stub: Any = BatchServiceStub(channel)
        for name, method in batches_pb2.DESCRIPTOR.services_by_name["BatchService"].methods_by_name.items():
            request = getattr(batches_pb2, method.input_type.name)()
            sent = iter([HEADER]) if name == "UploadFile" else request
            call = getattr(stub, name)(sent, timeout=WAIT_S)
            error = await refusal(call.read() if name == "DownloadFile" else call)
            assert isinstance(error, errors.FailedPrecondition) and "--database" in error.message, name
