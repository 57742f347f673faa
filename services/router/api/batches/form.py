"""Reads the form of an upload over HTTP from its connection, part by part."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
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
from services.router.api.batches.upload import FileUpload
from slipstream.errors import BodyTooLarge, InvalidArgument

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


class FormReader:
    """One form: the parts `file` and `purpose`, and how long the file lives."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._texts: dict[str, str] = {}

    async def read(self, upload: FileUpload) -> float:
        """Give the content to the upload; the life of the file in seconds. Raises InvalidArgument."""
        await self._read_parts(upload)
        if not upload.has_begun:
            raise batch_bounds.FILE.refused()
        if self._texts.get("purpose") != "batch":
            raise batch_bounds.PURPOSE.refused()
        return _ttl_s(self._texts)

    async def _read_parts(self, upload: FileUpload) -> None:
        request = self._request
        try:
            reader = MultipartReader(request.headers, cast(StreamReader, _FormContent(request.content)))
            n_parts = 0
            while (part := await reader.next()) is not None:
                n_parts += 1
                batch_bounds.FILE_PARTS.check(n_parts)
                if isinstance(part, MultipartReader):
                    raise batch_bounds.FILE_FORM.refused()
                await self._read_part(part, upload)
        except _MALFORMED as error:
            raise batch_bounds.FILE_FORM.refused() from error

    async def _read_part(self, part: BodyPartReader, upload: FileUpload) -> None:
        if part.name == "file":
            await upload.begin(part.filename or "")
            while piece := await part.read_chunk(_READ_BYTES):
                await upload.append(piece)
            return
        text = b""
        while piece := await part.read_chunk(_READ_BYTES):
            text += piece
            if len(text) > _MAX_TEXT_BYTES:
                raise batch_bounds.FILE_FORM.refused()
        self._texts[part.name or ""] = text.decode("utf-8", "replace")


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


def check_length(request: web.Request) -> None:
    """Raise InvalidArgument for a form that says that it is too large."""
    if (request.content_length or 0) > batch_bounds.MAX_FILE_BYTES + _READ_BYTES:
        raise BodyTooLarge("file", batch_bounds.FILE_BYTES.words)
