"""Files: whole or invisible, within a tenant's share, and gone in the end."""

from __future__ import annotations

import os

import pytest

from libs.common import batch_bounds
from services.router.api.batches.file_store import NewFile
from slipstream import errors
from tests.router.api.batches.conftest import TENANT, BatchTables


async def ids(tables: BatchTables, tenant: str = TENANT, **given: object) -> list[str]:
    options = {"purpose": "", "after": "", "limit": 100, "is_ascending": True, **given}
    return [file.id for file in await tables.files.page(tenant, **options)]  # type: ignore[arg-type]


async def test_content_comes_back_as_it_was_sent(tables: BatchTables) -> None:
    content = os.urandom(2 * batch_bounds.FILE_CHUNK_BYTES + 17)
    writer = await tables.files.begin(NewFile(TENANT, "a", "batch"))
    for begin in range(0, len(content), 300_000):
        await writer.append(content[begin : begin + 300_000])
    assert await ids(tables) == []  # not whole yet
    file = await writer.finish(ttl_s=3600)
    assert await ids(tables) == [file.id]
    assert await tables.files.get(TENANT, file.id) == file
    chunks = [chunk async for chunk in tables.files.chunks(file)]
    assert b"".join(chunks) == content and len(chunks) == 3


async def test_a_file_of_another_tenant_does_not_exist(tables: BatchTables) -> None:
    file_id = await tables.upload(b"x")
    with pytest.raises(errors.NotFound):
        await tables.files.get("mallory", file_id)
    with pytest.raises(errors.NotFound):
        await tables.files.delete("mallory", file_id)
    assert await ids(tables, "mallory") == []
    assert await ids(tables) == [file_id]


async def test_a_tenant_has_a_bounded_number_of_files_and_bytes(
    tables: BatchTables, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_bounds, "MAX_TENANT_FILES", 2)
    monkeypatch.setattr(batch_bounds, "MAX_TENANT_FILE_BYTES", 10)
    first = await tables.upload(b"12345")
    with pytest.raises(errors.Overloaded):
        await tables.upload(b"123456")
    assert not await tables.files.sweep()
    await tables.upload(b"12345", tenant="bob")
    with pytest.raises(errors.Overloaded):  # the one that broke off counts until it is swept or expires
        await tables.upload(b"1")
    await tables.files.delete(TENANT, first)
    with pytest.raises(errors.Overloaded):  # its content is still there
        await tables.upload(b"1")
    while await tables.files.sweep():
        pass
    await tables.upload(b"1")


async def test_what_expires_is_invisible_and_then_removed(tables: BatchTables) -> None:
    content = os.urandom(20 * batch_bounds.FILE_CHUNK_BYTES)
    old, young = await tables.upload(content, ttl_s=3600), await tables.upload(b"y", ttl_s=7200)
    tables.jobs.now_s += 3600
    assert await ids(tables) == [young]
    with pytest.raises(errors.NotFound):
        await tables.files.get(TENANT, old)
    n_steps = 0
    while await tables.files.sweep():
        n_steps += 1
    assert n_steps == 2  # in pieces
    rows = await tables.jobs.database.read(lambda tx: tx.execute("SELECT DISTINCT file_id FROM file_chunks"))
    assert rows == [(young,)]


async def test_a_file_that_is_too_large_or_empty_is_refused(
    tables: BatchTables, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(errors.InvalidArgument):
        await tables.upload(b"")
    writer = await tables.files.begin(NewFile(TENANT, "a", "batch"))
    writer.n_bytes = batch_bounds.MAX_FILE_BYTES
    with pytest.raises(errors.InvalidArgument):
        await writer.append(b"x")


async def test_pages_go_through_all_files_in_both_orders(tables: BatchTables) -> None:
    made = []
    for _ in range(5):
        made.append(await tables.upload(b"x"))
        tables.jobs.now_s += 1
    assert await ids(tables) == made
    assert await ids(tables, is_ascending=False) == made[::-1]
    assert await ids(tables, after=made[1], limit=2) == made[2:4]
    assert await ids(tables, after=made[1], is_ascending=False) == [made[0]]
    assert await ids(tables, purpose="batch_output") == []
