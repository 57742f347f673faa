"""Lines of a batch's input file -> requests. Pure.

A file is cut into lines piece by piece, so that no more than one line and one piece are in memory. A line
that is no request fails the whole batch, as OpenAI has it. The fields of a body are checked when it runs.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from libs.common import batch_bounds, job_bounds
from services.router.api.json_body import parse_object
from services.router.request.json_limits import check_structure
from slipstream import bounds
from slipstream.bound import shown
from slipstream.errors import InvalidArgument

MAX_CUSTOM_ID_BYTES = 512
# The place of a defect is looked for in shorter lines only: that takes longer than 50 ms in the longest.
_EXPLAINED_BYTES = 1 << 20


class BatchLine(msgspec.Struct, frozen=True, gc=False):
    """One request. `number` counts from 1, as editors do."""

    number: int
    custom_id: str
    body: bytes


class DefectCode(enum.StrEnum):
    """What may be wrong with a line or a file, by OpenAI's names where it has some.

    A code that a later version stored reads as INVALID_REQUEST.
    """

    INVALID_JSON_LINE = "invalid_json_line"
    MISSING_REQUIRED_PARAMETER = "missing_required_parameter"
    INVALID_TYPE = "invalid_type"
    INVALID_CUSTOM_ID = "invalid_custom_id"
    INVALID_METHOD = "invalid_method"
    MISMATCHED_URL = "mismatched_url"
    INVALID_REQUEST = "invalid_request"
    DUPLICATE_CUSTOM_ID = "duplicate_custom_id"
    TOO_MANY_REQUESTS = "too_many_requests"
    INVALID_FILE = "invalid_file"
    EMPTY_FILE = "empty_file"

    @classmethod
    def _missing_(cls, value: object) -> DefectCode:
        return cls.INVALID_REQUEST


class LineDefect(msgspec.Struct, frozen=True, gc=False):
    """Why a batch fails, in OpenAI's shape."""

    code: DefectCode
    message: str
    line: int | None = None
    param: str | None = None


class _Line(msgspec.Struct, gc=False):
    custom_id: Any = None
    method: Any = None
    url: Any = None
    body: msgspec.Raw = msgspec.Raw()


class _Delivery(msgspec.Struct, gc=False):
    stream: Any = None
    background: Any = None


_SPACES = re.compile(rb"\s*")

_DECODER = msgspec.json.Decoder(_Line)
_DELIVERY_DECODER = msgspec.json.Decoder(_Delivery)


class LineSplitter:
    """Cuts a file that arrives in pieces. Raises InvalidArgument for a line that is too long."""

    def __init__(self) -> None:
        self._rest: list[bytes] = []
        self._rest_bytes = 0
        self._number = 0

    def feed(self, piece: bytes) -> Iterator[tuple[int, bytes]]:
        """The lines that end in this piece, with their numbers; empty lines are left out.

        A hundred million empty lines cost what a hundred million bytes of one line do.
        """
        end = piece.rfind(b"\n") + 1
        if end:
            at = piece.index(b"\n") + 1
            self._keep(piece[: at - 1])
            yield from self.finish()
            while (begin := self._line_after(piece, at, end)) < end:
                at = piece.index(b"\n", begin) + 1
                self._keep(piece[begin : at - 1])
                yield from self.finish()
        self._keep(piece[end:])

    def finish(self) -> Sequence[tuple[int, bytes]]:
        """The line that is kept, which no line feed ends at the end of a file."""
        line, self._rest, self._rest_bytes = b"".join(self._rest), [], 0
        self._number += 1
        return [(self._number, line)] if line.strip() else []

    def _line_after(self, piece: bytes, at: int, end: int) -> int:
        """Where the first line that is not empty begins; the lines before it are counted."""
        text = _SPACES.match(piece, at, end).end()  # type: ignore[union-attr]  # it always matches
        begin = end if text == end else max(at, piece.rfind(b"\n", at, text) + 1)
        self._number += piece.count(b"\n", at, begin)
        return begin

    def _keep(self, data: bytes) -> None:
        self._rest_bytes += len(data)
        if self._rest_bytes > batch_bounds.MAX_LINE_BYTES:
            words = f"has more than {batch_bounds.MAX_LINE_BYTES} bytes"
            raise InvalidArgument(f"line {self._number + 1}", words)
        self._rest.append(data)


def parse_line(number: int, data: bytes, endpoint: str) -> BatchLine | LineDefect:
    """One line as a request to `endpoint`, or its first defect."""
    try:
        check_structure([("line", data)])
        line = _decoded(data)
    except InvalidArgument as error:
        return LineDefect(DefectCode.INVALID_JSON_LINE, error.message, number)
    for name in ("custom_id", "method", "url"):
        given = getattr(line, name)
        if given is None or given == "":
            return LineDefect(DefectCode.MISSING_REQUIRED_PARAMETER, f"{name} must be given", number, name)
        if not isinstance(given, str):
            return LineDefect(DefectCode.INVALID_TYPE, f"{name} must be text", number, name)
    if len(line.custom_id.encode(errors="surrogatepass")) > MAX_CUSTOM_ID_BYTES:
        message = f"custom_id must have at most {MAX_CUSTOM_ID_BYTES} bytes"
        return LineDefect(DefectCode.INVALID_CUSTOM_ID, message, number, "custom_id")
    if "\0" in line.custom_id:  # PostgreSQL stores none: the batch would begin again until it expires
        return LineDefect(DefectCode.INVALID_CUSTOM_ID, "custom_id must have no NUL", number, "custom_id")
    if line.method != "POST":
        return LineDefect(
            DefectCode.INVALID_METHOD, f"method must be POST, not {shown(line.method)}", number, "method"
        )
    if line.url != endpoint:
        message = f"url must be the batch's endpoint {endpoint}, not {shown(line.url)}"
        return LineDefect(DefectCode.MISMATCHED_URL, message, number, "url")
    body = bytes(line.body)
    if not body.startswith(b"{"):
        code = DefectCode.INVALID_TYPE if body else DefectCode.MISSING_REQUIRED_PARAMETER
        return LineDefect(code, "body must be an object", number, "body")
    if len(body) > bounds.MAX_BODY_BYTES:
        return LineDefect(DefectCode.INVALID_REQUEST, f"body {bounds.BODY.words}", number, "body")
    delivery = _DELIVERY_DECODER.decode(body)
    for name, row in (("stream", job_bounds.STREAM), ("background", job_bounds.BACKGROUND)):
        if getattr(delivery, name) not in (None, False):
            return LineDefect(DefectCode.INVALID_REQUEST, f"body.{name} {row.words}", number, f"body.{name}")
    return BatchLine(number, line.custom_id, body)


def _decoded(data: bytes) -> _Line:
    try:
        line = _DECODER.decode(data)
        data.decode()  # the decoder passes over the texts of a body
        return line
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    # The standard library says where the defect is; what it alone reads, such as NaN, is none of JSON.
    if len(data) <= _EXPLAINED_BYTES:
        parse_object(data)
    raise InvalidArgument("body", "is not JSON")


class SeenIds:
    """The custom ids of a batch so far."""

    def __init__(self) -> None:
        self._lines: dict[str, int] = {}  # by custom id

    def defect(self, line: BatchLine) -> LineDefect | None:
        """Why this line may not join them: its id is taken, or there are too many."""
        if (first := self._lines.get(line.custom_id)) is not None:
            message = f"custom_id {shown(line.custom_id)} is in lines {first} and {line.number}"
            return LineDefect(DefectCode.DUPLICATE_CUSTOM_ID, message, line.number, "custom_id")
        if len(self._lines) == batch_bounds.MAX_BATCH_LINES:
            message = f"a batch has at most {batch_bounds.MAX_BATCH_LINES} requests"
            return LineDefect(DefectCode.TOO_MANY_REQUESTS, message, line.number)
        self._lines[line.custom_id] = line.number
        return None

    def __len__(self) -> int:
        return len(self._lines)


class LineReader:
    """Reads the requests of a file that arrives in pieces."""

    def __init__(self, endpoint: str, *, skipped: int = 0) -> None:
        """The first `skipped` requests are known already, and are not read again."""
        self._endpoint = endpoint
        self._skipped = skipped
        self._lines = LineSplitter()

    def feed(self, piece: bytes) -> Sequence[BatchLine | LineDefect]:
        """The requests that end in this piece, or their defects."""
        return self._read(self._lines.feed(piece))

    def finish(self) -> Sequence[BatchLine | LineDefect]:
        """The last one, where no line feed ends it."""
        return self._read(self._lines.finish())

    def _read(self, lines: Iterable[tuple[int, bytes]]) -> Sequence[BatchLine | LineDefect]:
        found: list[BatchLine | LineDefect] = []
        n_defects = 0
        try:
            for number, line in lines:
                if self._skipped:
                    self._skipped -= 1
                    continue
                found.append(parse_line(number, line, self._endpoint))
                n_defects += isinstance(found[-1], LineDefect)
                if n_defects == batch_bounds.MAX_BATCH_ERRORS:  # the batch fails, and naming a defect is slow
                    break
        except InvalidArgument as error:
            found.append(LineDefect(DefectCode.INVALID_JSON_LINE, error.message))
        return found
