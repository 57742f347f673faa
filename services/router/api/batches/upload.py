"""Reads the form of an upload from its connection, part by part."""

from __future__ import annotations

import asyncio
import re
import warnings
from collections.abc import Callable, Mapping
from typing import cast

from aiohttp import (
    BadContentDispositionHeader,
    BadContentDispositionParam,
    BodyPartReader,
    MultipartReader,
    StreamReader,
    web,
)
from aiohttp.http import HttpProcessingError

from libs.common import batch_bounds
from services.router.api.batches.file_store import FileStore, FileWriter, NewFile
from services.router.api.batches.records import StoredFile
from slipstream.errors import BodyTooLarge, InvalidArgument

KEY_CHECK_S = 1.0
_READ_BYTES = 64 << 10
_MAX_TEXT_BYTES = 1024
# Of boundaries, headers, and what comes before the first part, which may be anything; each takes long.
_MAX_LINES = 1024
# What aiohttp raises for a boundary, a header or an end that does not fit.
_MALFORMED = (
    *(ValueError, AssertionError, EOFError),
    *(HttpProcessingError, web.HTTPException, web.RequestPayloadError),
    *(BadContentDispositionHeader, BadContentDispositionParam),
)
# As a warning, each distinct header would stay in Python's registry of warnings, and in the log.
for _category in (BadContentDispositionHeader, BadContentDispositionParam):
    warnings.simplefilter("error", _category)
_SECONDS = re.compile(r"[0-9]{1,9}")


class FileUpload:
    """One form: the parts `file` and `purpose`, and how long the file lives."""

    def __init__(self, files: FileStore, tenant: str, *, check_key: Callable[[], object]) -> None:
        """`check_key` raises Unauthenticated once the key of the upload counts no more."""
        self._check_key = check_key
        self._files = files
        self._tenant = tenant
        self._texts: dict[str, str] = {}
        self._writer: FileWriter | None = None

    async def read(self, request: web.Request) -> StoredFile:
        """Store the file of the form. Raises InvalidArgument, Overloaded; what was stored goes then.

        Raises Unauthenticated within KEY_CHECK_S after the key ceased to count, also while nothing arrives.
        """
        reading = asyncio.create_task(self._read(request))
        try:
            while not reading.done():
                self._check_key()
                await asyncio.wait([reading], timeout=KEY_CHECK_S)
        except BaseException:
            reading.cancel()
            await asyncio.wait([reading])
            raise
        return reading.result()

    async def _read(self, request: web.Request) -> StoredFile:
        try:
            await self._read_parts(request)
            if self._writer is None:
                raise batch_bounds.FILE.refused()
            if self._texts.get("purpose") != "batch":
                raise batch_bounds.PURPOSE.refused()
            ttl_s = _ttl_s(self._texts)
            self._check_key()
            return await self._writer.finish(ttl_s=ttl_s)
        except BaseException:
            if self._writer is not None:
                await self._writer.abandon()
            raise

    async def _read_parts(self, request: web.Request) -> None:
        try:
            reader = MultipartReader(request.headers, cast(StreamReader, _FormContent(request.content)))
            n_parts = 0
            while (part := await reader.next()) is not None:
                n_parts += 1
                batch_bounds.FILE_PARTS.check(n_parts)
                if isinstance(part, MultipartReader):
                    raise batch_bounds.FILE_FORM.refused()
                await self._read_part(part)
        except _MALFORMED as error:
            raise batch_bounds.FILE_FORM.refused() from error

    async def _read_part(self, part: BodyPartReader) -> None:
        if part.name == "file":
            await self._read_file(part)
            return
        text = b""
        while piece := await part.read_chunk(_READ_BYTES):
            text += piece
            if len(text) > _MAX_TEXT_BYTES:
                raise batch_bounds.FILE_FORM.refused()
        self._texts[part.name or ""] = text.decode("utf-8", "replace")

    async def _read_file(self, part: BodyPartReader) -> None:
        name = part.filename or ""
        if self._writer is not None or not name:
            raise batch_bounds.FILE.refused()
        batch_bounds.FILE_NAME.check(len(name.encode(errors="replace")))
        self._writer = await self._files.begin(NewFile(self._tenant, _safe_name(name), "batch"))
        while piece := await part.read_chunk(_READ_BYTES):
            await self._writer.append(piece)


class _FormContent:
    """The body of a form, as a MultipartReader reads it, with a bounded number of lines outside of parts."""

    def __init__(self, content: StreamReader) -> None:
        self._lines = 0
        self._content = content
        self.read, self.at_eof, self.unread_data = content.read, content.at_eof, content.unread_data

    async def readline(self, **given: int) -> bytes:
        """One line. Raises ValueError for too many."""
        self._lines += 1
        if self._lines > _MAX_LINES:
            raise ValueError("too many lines outside of parts")
        return await self._content.readline(**given)


def _ttl_s(texts: Mapping[str, str]) -> float:
    """The life of the file that the form asks for; clients of OpenAI write nested fields in brackets."""
    seconds = texts.get("expires_after[seconds]")
    anchor = texts.get("expires_after[anchor]")
    if seconds is None and anchor is None:
        return batch_bounds.FILE_TTL_S
    if anchor != "created_at":
        raise batch_bounds.EXPIRES_ANCHOR.refused()
    if seconds is None or not _SECONDS.fullmatch(seconds):
        raise InvalidArgument("expires_after.seconds", batch_bounds.EXPIRES.words)
    batch_bounds.EXPIRES.check(int(seconds))
    return float(seconds)


def _safe_name(name: str) -> str:
    """The name without folders and control characters: it is shown, and never a path."""
    last = re.split(r"[/\\]", name)[-1]
    return "".join(c if c.isprintable() else "?" for c in last) or "file"


def check_length(request: web.Request) -> None:
    """Raise InvalidArgument for a form that says that it is too large."""
    if (request.content_length or 0) > batch_bounds.MAX_FILE_BYTES + _READ_BYTES:
        raise BodyTooLarge("file", batch_bounds.FILE_BYTES.words)
