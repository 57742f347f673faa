"""`client.files` against a whole router before fake workers."""

from __future__ import annotations

import asyncio
import io
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from grpc import _channel

from libs.database.database import Database
from services.router.api.batches.file_store import FileStore
from services.router.server import RouterServer
from slipstream import AsyncClient, Client
from slipstream.batches import transfers
from slipstream.batches.transfers import FreshContent, UploadSource
from slipstream.errors import InvalidArgument, NotFound, SlipstreamError
from tests.router.conftest import WAIT_S
from tests.sdk.calls.either_client import KINDS, EitherClient

CONTENT = bytes(range(256)) * (10 << 10)  # two pieces and a half


async def _rows_left(database: Database) -> int:
    """The rows of files after all that is deleted was swept."""
    files = FileStore(database, wall_clock_s=time.time)
    while await files.sweep():
        pass
    sql = "SELECT (SELECT COUNT(*) FROM files) + (SELECT COUNT(*) FROM file_chunks)"
    ((count,),) = await database.read(lambda tx: tx.execute(sql))
    return int(count)


async def _no_rows(database: Database) -> None:
    async with asyncio.timeout(WAIT_S):
        while await _rows_left(database):
            await asyncio.sleep(0.01)


async def test_a_path_goes_up_and_comes_down_to_a_path(client: EitherClient, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    path, copy = folder / "input.jsonl", folder / "copy.jsonl"
    path.write_bytes(CONTENT)
    copy.write_bytes(b"is replaced")
    for given in (path, str(path)):
        file = await client("files.upload", given, ttl_s=3600)
        assert (file.name, file.purpose, file.n_bytes) == ("input.jsonl", "batch", len(CONTENT))
        assert round(file.expires_unix_s - file.created_unix_s) == 3600
        assert await client("files.get", file.id) == file
        await client("files.download", file.id, copy)
        assert copy.read_bytes() == CONTENT
    assert sorted(os.listdir(folder)) == ["copy.jsonl", "input.jsonl"]
    assert b"".join(await client("files.content", file.id)) == CONTENT


async def test_bytes_and_open_files_go_up(client: EitherClient, tmp_path: Path) -> None:
    (tmp_path / "input.jsonl").write_bytes(CONTENT)
    begun = io.BytesIO(b"skipped" + CONTENT)
    begun.seek(7)
    path = tmp_path / "input.jsonl"
    with path.open("rb") as opened, path.open("rb", 0) as raw:
        for content, name in (
            (CONTENT, "requests.jsonl"),
            (bytearray(CONTENT), "requests.jsonl"),
            (begun, "requests.jsonl"),
            (opened, "input.jsonl"),
            (raw, "input.jsonl"),
        ):
            file = await client("files.upload", content)
            assert (file.name, file.n_bytes) == (name, len(CONTENT))
            assert b"".join(await client("files.content", file.id)) == CONTENT
        assert not opened.closed and not begun.closed
    assert (await client("files.upload", b"{}", name="folder/other.jsonl")).name == "other.jsonl"


def test_an_upload_is_read_a_piece_at_a_time(tmp_path: Path) -> None:
    (tmp_path / "input.jsonl").write_bytes(CONTENT)
    source = UploadSource(tmp_path / "input.jsonl")
    messages = source.messages()
    assert next(messages).header.n_bytes == len(CONTENT)
    sizes = [(len(message.content), source._file.tell()) for message in messages]
    piece = 1 << 20
    assert sizes == [(piece, piece), (piece, 2 * piece), (piece // 2, len(CONTENT))]
    assert b"".join([m.content for m in list(source.messages())[1:]]) == CONTENT  # another try has all
    source.close()
    assert source._file.closed


async def test_files_are_listed_page_by_page_and_deleted(
    client: EitherClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.batches.file_calls._PAGE", 2)
    files = [await client("files.upload", b"{}", name=f"{index}.jsonl") for index in range(5)]
    assert await client("files.list_files", oldest_first=True) == files
    assert await client("files.list_files", purpose="batch") == files[::-1]
    assert await client("files.list_files", purpose="batch_output") == []
    with pytest.raises(InvalidArgument, match=r"^purpose: must be one of batch, batch_output"):
        await client("files.list_files", purpose="other")
    await client("files.delete", files[0].id)
    for method in ("get", "delete", "content"):
        with pytest.raises(NotFound):
            await client(f"files.{method}", files[0].id)


async def test_a_download_that_fails_leaves_the_path_as_it_was(
    client: EitherClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "kept").write_bytes(b"kept")
    file = await client("files.upload", CONTENT)
    with pytest.raises(NotFound):
        await client("files.download", "file-000000000000", folder / "kept")

    def full(self: Any, piece: bytes) -> None:
        raise OSError("no space")

    with monkeypatch.context() as patch:
        patch.setattr(transfers.DownloadTarget, "write", full)
        with pytest.raises(OSError, match="no space"):
            await client("files.download", file.id, folder / "kept")
    assert os.listdir(folder) == ["kept"] and (folder / "kept").read_bytes() == b"kept"
    for wrong in (folder, folder / "no" / "folder", Path("/dev/null")):
        with pytest.raises(InvalidArgument, match=r"^to: "):
            await client("files.download", file.id, wrong)


async def test_a_link_stays_and_its_file_is_replaced(client: EitherClient, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "target")
    file = await client("files.upload", b"{}")
    await client("files.download", file.id, to=tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "target").read_bytes() == b"{}"


class _Source(io.BytesIO):
    """A file whose second piece waits, and then fails."""

    def __init__(self) -> None:
        super().__init__(CONTENT)
        self.reading, self.go_on = threading.Event(), threading.Event()

    def read(self, size: int | None = -1, /) -> bytes:
        if self.tell():
            self.reading.set()
            assert self.go_on.wait(WAIT_S)
            raise OSError("the disk is gone")
        return super().read(size)


async def test_a_source_that_fails_ends_the_upload_with_its_error(
    client: EitherClient, database: Database
) -> None:
    source = _Source()
    source.go_on.set()
    with pytest.raises(OSError, match="the disk is gone"):
        await client("files.upload", source)
    await _no_rows(database)
    assert await client("files.list_files") == []


async def _begun(upload: Any, source: _Source, database: Database) -> asyncio.Task[Any]:
    """An upload whose first piece is stored, and whose second one is waited for."""
    task: asyncio.Task[Any] = asyncio.ensure_future(upload)
    assert await asyncio.to_thread(source.reading.wait, WAIT_S)
    sql = "SELECT id FROM files WHERE is_whole = 0 AND expires_unix_s > 0"
    async with asyncio.timeout(WAIT_S):
        while not await database.read(lambda tx: tx.execute(sql)):
            await asyncio.sleep(0.01)
    return task


async def test_a_cancelled_upload_leaves_nothing(router: RouterServer, database: Database) -> None:
    async with AsyncClient(router.host.endpoint) as client:
        source = _Source()
        task = await _begun(client.files.upload(source), source, database)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await _no_rows(database)  # the call has ended before the source goes on
        source.go_on.set()


async def test_closing_a_blocking_client_ends_its_upload(router: RouterServer, database: Database) -> None:
    client, source = Client(router.host.endpoint), _Source()
    task = await _begun(asyncio.to_thread(client.files.upload, source), source, database)
    client.close()
    with pytest.raises(SlipstreamError):
        await task
    await _no_rows(database)
    source.go_on.set()


async def test_what_ends_a_blocking_wait_cancels_its_upload(
    router: RouterServer, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, stored = _Source(), threading.Event()
    result: Any = _channel._MultiThreadedRendezvous  # of gRPC: a blocking call that is a future

    def interrupted(self: Any, timeout: float | None = None) -> Any:
        assert stored.wait(WAIT_S)
        raise KeyboardInterrupt

    monkeypatch.setattr(result, "result", interrupted)
    with Client(router.host.endpoint) as client:

        def use() -> Any:
            with pytest.raises(KeyboardInterrupt) as ended:
                client.files.upload(source)
            return ended

        task = await _begun(asyncio.to_thread(use), source, database)
        stored.set()
        ended = await task  # its frames hold the call, which gRPC would cancel as it is dropped
        await _no_rows(database)
        assert ended.tb is not None
        source.go_on.set()


@KINDS
async def test_a_content_without_a_size_is_refused(kind: type[Client | AsyncClient], tmp_path: Path) -> None:
    client = EitherClient(kind("127.0.0.1:1"))
    read_end, write_end = os.pipe()
    with os.fdopen(read_end, "rb") as pipe, os.fdopen(write_end, "wb"):
        for content in (pipe, 5, tmp_path, tmp_path / "missing"):
            with pytest.raises(InvalidArgument, match=r"^content: (must have a size|cannot be read)"):
                await client("files.upload", content)
    for ttl_s in (-1.0, float("nan")):
        with pytest.raises(InvalidArgument, match=r"^ttl_s: "):
            await client("files.upload", b"{}", ttl_s=ttl_s)
    await client.close()


async def test_an_upload_that_does_not_fit_is_refused(
    client: EitherClient, tmp_path: Path, database: Database
) -> None:
    (tmp_path / "text").write_text("{}")
    with (tmp_path / "text").open() as text, pytest.raises(InvalidArgument, match=r"^content: .*of bytes"):
        await client("files.upload", text)
    with pytest.raises(InvalidArgument) as refused:  # while further pieces are on their way
        await client("files.upload", CONTENT * 8, name="n" * 257)
    assert refused.value.field == "file"
    with pytest.raises(InvalidArgument) as refused:
        await client("files.upload", b"")
    assert refused.value.field == "file"
    await _no_rows(database)


def test_a_download_that_begins_again_gives_no_byte_twice() -> None:
    fresh = FreshContent()
    tries = [(0, b"abc"), (0, b"de"), (1, b"ab"), (1, b"cdef"), (2, b"abcdefg"), (2, b"h")]
    assert [fresh.strip(*each) for each in tries] == [b"abc", b"de", b"", b"f", b"g", b"h"]
