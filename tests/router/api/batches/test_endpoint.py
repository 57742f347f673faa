"""Files and batches over HTTP before fake workers: forms, pages, tenants, and a batch from end to end."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from libs.common import batch_bounds
from libs.database.database import open_database
from services.router.api.api_keys import ApiKeys
from services.router.api.batches import endpoint, upload
from services.router.api.batches.file_store import FileStore
from services.router.api.batches.records import TokenTotals
from services.router.api.batches.results import result_lines
from services.router.jobs.types import JobResult, JobState
from services.router.request.model_card import ModelCard
from services.router.server import RouterServer
from slipstream.credentials.api_key_file import add_key, read_keys
from tests.router.api.batches.conftest import CHAT, line
from tests.router.conftest import open_router
from tests.router.support.fake_cluster import FakeCluster


class Tenants:
    """A router with a database, and the keys of two tenants."""

    def __init__(self, router: RouterServer, http: aiohttp.ClientSession, keys: dict[str, str]) -> None:
        self.router = router
        self.http = http
        self.keys = keys

    async def ask(
        self, method: str, path: str, *, tenant: str = "alice", status: int = 200, **given: Any
    ) -> Any:
        headers = {"Authorization": f"Bearer {self.keys[tenant]}", **given.pop("headers", {})}
        async with self.http.request(method, path, headers=headers, **given) as answer:
            assert answer.status == status, await answer.text()
            said = await answer.read()
        return json.loads(said) if status != 200 or not path.endswith("/content") else said

    async def upload(self, content: bytes, *, status: int = 200, tenant: str = "alice", **parts: str) -> Any:
        form = aiohttp.FormData()
        for name, value in {"purpose": "batch", **parts}.items():
            form.add_field(name, value)
        form.add_field("file", content, filename="in.jsonl", content_type="application/jsonl")
        return await self.ask("POST", "/v1/files", data=form, status=status, tenant=tenant)

    async def create(self, file_id: str, *, status: int = 200, tenant: str = "alice", **given: Any) -> Any:
        body = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h", **given}
        return await self.ask("POST", "/v1/batches", json=body, status=status, tenant=tenant)


@pytest.fixture
async def tenants(cluster: FakeCluster, card: ModelCard, tmp_path: Path) -> AsyncIterator[Tenants]:
    database = open_database(f"sqlite:{tmp_path}/router.db")
    path = tmp_path / "keys.toml"
    keys = {tenant: add_key(path, name=tenant, tenant=tenant) for tenant in ("alice", "bob")}
    async with (
        open_router(cluster, card, database=database, keys=ApiKeys(read_keys(path))) as router,
        aiohttp.ClientSession(f"http://{router.http_endpoint}") as http,
    ):
        yield Tenants(router, http, keys)
    await database.close()


async def test_a_batch_goes_from_end_to_end(tenants: Tenants, card: ModelCard) -> None:
    content = line("a") + line("b") + line("bad", body={"messages": [], "model": card.name})
    file = await tenants.upload(content)
    assert await tenants.ask("GET", f"/v1/files/{file['id']}") == file
    assert await tenants.ask("GET", f"/v1/files/{file['id']}/content") == content
    batch = await tenants.create(file["id"], metadata={"for": "a test"})
    assert (batch["status"], batch["metadata"]) == ("validating", {"for": "a test"})
    async with asyncio.timeout(60):
        while batch["status"] not in ("completed", "failed"):
            await asyncio.sleep(0.05)
            batch = await tenants.ask("GET", f"/v1/batches/{batch['id']}")
    assert batch["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
    output = await tenants.ask("GET", f"/v1/files/{batch['output_file_id']}/content")
    answers = {item["custom_id"]: item["response"]["body"] for item in map(json.loads, output.splitlines())}
    assert answers.keys() == {"a", "b"}
    assert answers["a"]["choices"][0]["message"]["role"] == "assistant"
    (failed,) = (await tenants.ask("GET", f"/v1/files/{batch['error_file_id']}/content")).splitlines()
    assert json.loads(failed)["response"]["status_code"] == 400
    assert batch["usage"]["output_tokens"] == sum(
        answer["usage"]["completion_tokens"] for answer in answers.values()
    )


async def test_a_batch_of_responses_stores_them_and_counts_their_tokens(tenants: Tenants) -> None:
    path = "/v1/responses"
    lines = [
        line("a", url=path, body={"input": "Where is it?", "max_output_tokens": 3}),
        line("b", url=path, body={"input": [{"role": "user", "content": "hi"}], "store": False}),
        line("bad", url=path, body={"input": "a", "top_p": 7}),
    ]
    file = await tenants.upload(b"".join(lines))
    batch = await tenants.create(file["id"], endpoint=path)
    async with asyncio.timeout(60):
        while batch["status"] not in ("completed", "failed"):
            await asyncio.sleep(0.05)
            batch = await tenants.ask("GET", f"/v1/batches/{batch['id']}")
    assert (batch["endpoint"], batch["request_counts"]) == (path, {"total": 3, "completed": 2, "failed": 1})
    output = await tenants.ask("GET", f"/v1/files/{batch['output_file_id']}/content")
    answers = {item["custom_id"]: item["response"]["body"] for item in map(json.loads, output.splitlines())}
    assert answers["a"]["object"] == "response"
    assert answers["a"]["output"][0]["content"][0]["text"]
    assert await tenants.ask("GET", f"{path}/{answers['a']['id']}") == answers["a"]
    await tenants.ask("GET", f"{path}/{answers['b']['id']}", status=404)
    assert batch["usage"]["output_tokens"] == sum(each["usage"]["output_tokens"] for each in answers.values())
    (failed,) = (await tenants.ask("GET", f"/v1/files/{batch['error_file_id']}/content")).splitlines()
    assert json.loads(failed)["response"]["body"]["error"]["param"] == "top_p"


async def test_a_batch_of_messages_has_their_answers_and_errors(tenants: Tenants) -> None:
    path, body = "/v1/messages", {"messages": [{"role": "user", "content": "Where is it?"}], "max_tokens": 3}
    lines = [line("a", url=path, body=body), line("bad", url=path, body={**body, "top_p": 7})]
    file = await tenants.upload(b"".join(lines))
    batch = await tenants.create(file["id"], endpoint=path)
    async with asyncio.timeout(60):
        while batch["status"] not in ("completed", "failed"):
            await asyncio.sleep(0.05)
            batch = await tenants.ask("GET", f"/v1/batches/{batch['id']}")
    output = await tenants.ask("GET", f"/v1/files/{batch['output_file_id']}/content")
    answer = json.loads(output)["response"]["body"]
    assert (answer["type"], answer["content"][0]["type"]) == ("message", "text")
    used = answer["usage"]
    n_prompt = used["input_tokens"] + used["cache_read_input_tokens"]
    assert (batch["usage"]["input_tokens"], batch["usage"]["output_tokens"]) == (n_prompt, 3)
    (failed,) = (await tenants.ask("GET", f"/v1/files/{batch['error_file_id']}/content")).splitlines()
    error = json.loads(failed)["response"]["body"]["error"]
    assert error["type"] == "invalid_request_error" and "top_p" in error["message"]


def test_tokens_of_messages_count_as_those_of_other_answers() -> None:
    usage = {"input_tokens": 8, "cache_read_input_tokens": 32, "output_tokens": 9}
    body = {"usage": {**usage, "output_tokens_details": {"thinking_tokens": 4}}}
    job: Any = SimpleNamespace(id="job-1", reference="a")
    lines = result_lines([(job, JobResult(200, json.dumps(body).encode()))], code="")
    assert lines.tokens == TokenTotals(40, 32, 9, 4)


async def test_a_tenant_sees_its_own_alone(tenants: Tenants) -> None:
    file = await tenants.upload(line("a"))
    batch = await tenants.create(file["id"])
    for method, path in (
        ("GET", f"/v1/files/{file['id']}"),
        ("GET", f"/v1/files/{file['id']}/content"),
        ("DELETE", f"/v1/files/{file['id']}"),
        ("GET", f"/v1/batches/{batch['id']}"),
        ("POST", f"/v1/batches/{batch['id']}/cancel"),
    ):
        await tenants.ask(method, path, tenant="bob", status=404)  # a cancel needs no body
    await tenants.create(file["id"], tenant="bob", status=404)
    for path in ("/v1/files", "/v1/batches"):
        assert (await tenants.ask("GET", path, tenant="bob"))["data"] == []
        assert [item["id"] for item in (await tenants.ask("GET", path))["data"]] != []
        async with tenants.http.get(path) as answer:
            assert answer.status == 401


async def test_pages_lead_from_one_to_the_next(tenants: Tenants) -> None:
    made = []
    for _ in range(3):
        made.append((await tenants.upload(line("a")))["id"])
        await asyncio.sleep(0.002)  # ids have the time in milliseconds
    found, after = [], ""
    while True:
        page = await tenants.ask("GET", f"/v1/files?limit=2&order=asc&after={after}")
        found += [item["id"] for item in page["data"]]
        assert page["last_id"] == found[-1]
        after = page["last_id"]
        if not page["has_more"]:
            break
    assert found == made
    for path in ("/v1/files?limit=0", "/v1/files?limit=x", "/v1/batches?limit=101", "/v1/files?order=up"):
        await tenants.ask("GET", path, status=400)
    await tenants.ask("GET", "/v1/batches?after=file-000000000000", status=400)


async def test_a_page_of_failed_batches_is_written_off_the_event_loop(
    tenants: Tenants, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []
    write = endpoint._batches_page

    def noted_write(*given: Any) -> bytes:
        threads.append(threading.current_thread())
        return write(*given)

    monkeypatch.setattr(endpoint, "_batches_page", noted_write)
    file = await tenants.upload(b"{\n" * 50)
    made = [(await tenants.create(file["id"]))["id"] for _ in range(3)]
    async with asyncio.timeout(60):
        while True:
            page = (await tenants.ask("GET", "/v1/batches"))["data"]
            if all(batch["status"] == "failed" for batch in page):
                break
            await asyncio.sleep(0.05)
    assert [batch["id"] for batch in page] == made[::-1]
    assert all(len(batch["errors"]["data"]) == 50 for batch in page)
    assert threads and threading.main_thread() not in threads


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"endpoint": "/v1/embeddings"}, "endpoint"),
        ({"endpoint": None}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"input_file_id": None}, "input_file_id"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"metadata": {str(index): "" for index in range(17)}}, "metadata"),
        ({"output_expires_after": {"anchor": "now", "seconds": 7200}}, "output_expires_after.anchor"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after.seconds"),
    ],
)
async def test_a_batch_that_does_not_fit_is_refused_by_field(
    tenants: Tenants, given: dict[str, Any], field: str
) -> None:
    file = await tenants.upload(line("a"))
    error = await tenants.create(**{"file_id": file["id"], "status": 400, **given})
    assert error["error"]["param"] == field


async def test_a_form_that_does_not_fit_leaves_nothing(tenants: Tenants) -> None:
    await tenants.upload(line("a"), status=400, purpose="assistants")
    await tenants.upload(b"", status=400)
    await tenants.upload(line("a"), status=400, **{"expires_after[seconds]": "7200"})
    await tenants.upload(
        line("a"), status=400, **{"expires_after[anchor]": "created_at", "expires_after[seconds]": "1"}
    )
    await tenants.upload(line("a"), status=400, note="x" * 2000)
    await tenants.upload(line("a"), status=400, **{f"n{index}": "" for index in range(20)})
    boundary = {"Content-Type": "multipart/form-data; boundary=xx"}
    head = b'--xx\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n'
    purpose = b'Content-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--xx--\r\n'
    for data in (
        b"",
        b"junk",
        b"--xx",
        b"--xx\r\nno header\r\n\r\n",
        head,
        head + b"\r\nabc",
        b"line\r\n" * 2000 + head + b"\r\nabc\r\n--xx\r\n" + purpose,
        head + b"Content-Type: multipart/mixed; boundary=yy\r\n\r\n--yy\r\n\r\n--yy--\r\n--xx--",
    ):
        await tenants.ask("POST", "/v1/files", data=data, headers=boundary, status=400)
    no_boundary = {"Content-Type": "multipart/form-data"}
    await tenants.ask("POST", "/v1/files", data=b"x", headers=no_boundary, status=400)
    for headers in ({"Content-Type": "text/plain"}, {**boundary, "Content-Encoding": "gzip"}):
        await tenants.ask("POST", "/v1/files", data=b"x", headers=headers, status=415)
    for disposition in (b'form-data{ name="purpose"', b"form-data; name=\xe9", b"form-data; name"):
        odd = b"--xx\r\nContent-Disposition: " + disposition + b"\r\n\r\nbatch\r\n"
        good = head + b"\r\nabc\r\n--xx\r\n" + purpose
        error = await tenants.ask("POST", "/v1/files", data=odd + good, headers=boundary, status=400)
        assert "form" in error["error"]["message"]
    assert (await tenants.ask("GET", "/v1/files"))["data"] == []
    # What broke off expired at once, and is swept.
    database = tenants.router._options.database
    assert database is not None
    files = FileStore(database, wall_clock_s=time.time)
    while await files.sweep():
        pass
    for table in ("files", "file_chunks"):
        rows = await database.read(lambda tx, table=table: tx.execute(f"SELECT * FROM {table}"))  # type: ignore[misc]
        assert rows == []


async def test_a_form_larger_than_a_body_is_taken_and_one_beyond_the_bound_is_not(
    tenants: Tenants, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = b"".join(line(str(index), body={"messages": "x" * 100_000}) for index in range(100))
    assert (await tenants.upload(content))["bytes"] == len(content) > 8 << 20
    monkeypatch.setattr(batch_bounds, "MAX_FILE_BYTES", 1000)
    await tenants.upload(b"x" * 100_000, status=413)


async def test_a_page_of_another_origin_uploads_nothing(tenants: Tenants) -> None:
    form = aiohttp.FormData({"purpose": "batch"})
    form.add_field("file", b"x", filename="a")
    headers = {"Origin": "http://evil.test"}
    await tenants.ask("POST", "/v1/files", data=form, headers=headers, status=403)


async def test_uploaded_text_is_shown_by_no_browser(tenants: Tenants) -> None:
    file = await tenants.upload(b"<script>alert(1)</script>\n")
    headers = {"Authorization": f"Bearer {tenants.keys['alice']}"}
    async with tenants.http.get(f"/v1/files/{file['id']}/content", headers=headers) as answer:
        assert answer.headers["Content-Type"] == "application/octet-stream"
        assert answer.headers["Content-Disposition"] == "attachment"
        assert answer.headers["X-Content-Type-Options"] == "nosniff"


async def test_the_page_of_the_api_needs_no_key(tenants: Tenants) -> None:
    async with tenants.http.get("/docs") as answer:
        assert answer.status == 200 and answer.content_type == "text/html"
        assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
        assert "/v1/batches" in await answer.text()


async def test_a_form_without_a_key_is_not_read(tenants: Tenants) -> None:
    form = aiohttp.FormData({"purpose": "batch"})
    form.add_field("file", b"x", filename="a")
    async with tenants.http.post("/v1/files", data=form) as answer:
        assert answer.status == 401


@pytest.mark.parametrize("goes_on", [True, False], ids=["that goes on", "that is silent"])
async def test_an_upload_ends_with_its_key(
    tenants: Tenants, goes_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check of the end alone ends an upload that goes on; the check of each second ends a silent one."""
    monkeypatch.setattr(upload, "KEY_CHECK_S", 60.0 if goes_on else 0.02)
    database = tenants.router._options.database
    assert database is not None
    files = FileStore(database, wall_clock_s=time.time)
    is_revoked, never = asyncio.Event(), asyncio.Event()

    async def form() -> AsyncIterator[bytes]:
        yield b'--xx\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n' + line("a")
        await (is_revoked if goes_on else never).wait()
        yield line("b") + b'\r\n--xx\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n'
        yield b"batch\r\n--xx--\r\n"

    headers = {"Content-Type": "multipart/form-data; boundary=xx"}
    asked = asyncio.create_task(tenants.ask("POST", "/v1/files", data=form(), headers=headers, status=401))
    async with asyncio.timeout(60):
        while not await database.read(lambda tx: tx.execute("SELECT id FROM files WHERE is_whole = 0")):
            await asyncio.sleep(0.01)
        keys = tenants.router._options.keys
        assert keys._records is not None
        keys.replace([record for record in keys._records.values() if record.tenant != "alice"])
        is_revoked.set()
        assert (await asked)["error"]["code"] == "invalid_api_key"
        while await files.sweep():
            pass
    assert await database.read(lambda tx: tx.execute("SELECT id FROM files")) == []


async def test_a_download_ends_with_its_key(tenants: Tenants, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also amid a chunk, of which a slow client takes a piece at a time."""
    file, write_piece = await tenants.upload(b"x" * batch_bounds.FILE_CHUNK_BYTES), web.StreamResponse.write

    async def write(response: web.StreamResponse, piece: bytes) -> None:
        await write_piece(response, piece)
        tenants.router._options.keys.replace([])

    monkeypatch.setattr(web.StreamResponse, "write", write)
    with pytest.raises(aiohttp.ClientPayloadError):
        await tenants.ask("GET", f"/v1/files/{file['id']}/content")


@pytest.mark.parametrize(
    ("state", "code"), [(JobState.EXPIRED, "batch_expired"), (JobState.CANCELLED, "request_cancelled")]
)
def test_a_job_without_an_answer_says_why(state: JobState, code: str) -> None:
    """Its tenant may cancel a job of a batch; that is no end of the batch's time."""
    job: Any = SimpleNamespace(id="job-1", reference="a", state=state)
    lines = result_lines([(job, None)], code="request_cancelled")
    assert json.loads(lines.errors)["error"]["code"] == code
