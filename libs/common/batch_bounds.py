"""Bounds of files, batches and queued runs; docs/bounds.md has them beside those of service_bounds.py."""

from __future__ import annotations

from slipstream import bounds
from slipstream.bound import Range, Rule, Section, Size

MAX_FILE_BYTES = 100 << 20
FILE_UPLOAD_S = 600.0
FILE_CHUNK_BYTES = 1 << 20
# Of an upload over gRPC: a chunk with its envelope.
FILE_MESSAGE_BYTES = FILE_CHUNK_BYTES + 1024
# Of a list of batches over gRPC: stock clients take 4 MiB.
BATCHES_PAGE_BYTES = 1 << 20
FILES_PAGE, BATCHES_PAGE = 100, 20
MAX_TENANT_FILES = 1000
MAX_TENANT_FILE_BYTES = 1 << 30
FILE_TTL_S = 30 * 24 * 3600
# What an upload that broke off, or whose router died, leaves behind until then.
UPLOAD_TTL_S = 3600
# Uploads that arrive together: of all tenants / of one. They take longer than other bodies.
MAX_UPLOADS = (16, 4)
MAX_BATCH_LINES = 50_000
# A body, and what is around it in a line.
MAX_LINE_BYTES = bounds.MAX_BODY_BYTES + (64 << 10)
MAX_TENANT_BATCHES = 100
MAX_TENANT_STORED_BATCHES = 1000
MAX_BATCH_ERRORS = 100
BATCH_WINDOW_S = 24 * 3600

_files = Section("Files and batches")
FILE = _files.add(Rule("file", "must be given, with a file name"))
FILE_BYTES = _files.add(Size("file", 1, MAX_FILE_BYTES, "bytes"))
FILE_NAME = _files.add(Size("file", 1, 256, "bytes in its name"))
FILE_PART = _files.add(Size("content", 0, FILE_CHUNK_BYTES, "bytes in one message", apis="gRPC"))
FILE_WHOLE = _files.add(
    Rule("content", "must have the {n_bytes} bytes that the header states, not {n_arrived}", apis="gRPC")
)
FILE_HEADER = _files.add(Rule("header", "must be the first message of an upload, and it alone", apis="gRPC"))
FILE_FORM = _files.add(
    Rule("body", "must be multipart/form-data with the parts file and purpose", apis="HTTP")
)
FILE_PARTS = _files.add(Size("body", 0, 16, "parts", apis="HTTP"))
PURPOSE = _files.add(Rule("purpose", "must be batch", apis="HTTP"))
EXPIRES_ANCHOR = _files.add(
    Rule("expires_after.anchor", "must be created_at", "Also output_expires_after.", "HTTP")
)
EXPIRES = _files.add(
    Range("expires_after.seconds", 3600, FILE_TTL_S, "Default: 30 days.", whole=True, apis="HTTP")
)
TTL_MS = _files.add(
    Range(
        "header.ttl_ms",
        3600 * 1000,
        FILE_TTL_S * 1000,
        "0 = 30 days. Also output_ttl_ms.",
        whole=True,
        apis="gRPC",
    )
)
ENDPOINT = _files.add(Rule("endpoint", "must be one of {endpoints}"))
WINDOW = _files.add(Rule("completion_window", "must be 24h", apis="HTTP"))
INPUT_FILE = _files.add(Rule("input_file_id", "must be given"))
LIMIT = _files.add(Range("limit", 1, 100, "Of batches; gRPC: 0 = 20.", whole=True))
FILES_LIMIT = _files.add(Range("limit", 1, MAX_TENANT_FILES, "Of files; gRPC: 0 = 100.", whole=True))
ORDER = _files.add(Rule("order", "must be asc or desc", apis="HTTP"))
AFTER = _files.add(Rule("after", "names nothing of this list"))
LISTED_PURPOSE = _files.add(Rule("purpose", "is not known", apis="gRPC"))

_runs = Section("Runs of Workers AI's API")
RUN_INPUT = _runs.add(Rule("prompt", "must be given, unless messages are, and not beside them", apis="HTTP"))
RUNS = _runs.add(Size("requests", 1, 500, "requests", apis="HTTP"))
RUN_STREAM = _runs.add(Rule("stream", "is not for a run in a batch or in the queue", apis="HTTP"))
RUNS_AT_ONCE = _runs.add(Size("requests", 1, 64, "requests without queueRequest", apis="HTTP"))
RUN_REFERENCE = _runs.add(Size("external_reference", 0, 500, "characters", apis="HTTP"))

SECTIONS = (_files, _runs)
# Of the disk of a SQLite database, and of its free pages. A deletion writes to the log first.
SPARE_DISK_BYTES = 64 << 20

ROWS: tuple[tuple[str, str, str], ...] = (
    (
        "Room of SQLite's disk (or an eighth) that no new file, batch, job or response takes",
        f"{SPARE_DISK_BYTES} bytes",
        "507; deletions and ends of jobs go on. It is not reserved: one commit may take from it",
    ),
    (
        "Uploads that arrive together: all tenants / one",
        f"{MAX_UPLOADS[0]} / {MAX_UPLOADS[1]}",
        "others wait, at most 30 s",
    ),
    ("Whole upload of a file", f"{FILE_UPLOAD_S:g} s", "400"),
    ("Page of batches over gRPC", f"about {BATCHES_PAGE_BYTES} bytes", "the page ends earlier"),
    ("Files of one tenant: number / bytes", f"{MAX_TENANT_FILES} / {MAX_TENANT_FILE_BYTES}", "429"),
    ("Life of a file", f"{FILE_TTL_S} s, or `expires_after`", "deleted"),
    ("Rest of a broken upload", f"{UPLOAD_TTL_S} s", "deleted"),
    ("Requests of one batch", f"{MAX_BATCH_LINES}", "the batch fails"),
    ("A line of a batch", f"{MAX_LINE_BYTES} bytes", "the batch fails and names the line"),
    ("Errors that a failed batch names", f"{MAX_BATCH_ERRORS}", "the first ones"),
    ("Unfinished batches of one tenant", f"{MAX_TENANT_BATCHES}", "429"),
    (
        "Stored batches of one tenant",
        f"{MAX_TENANT_STORED_BATCHES}",
        "the oldest finished ones are forgotten",
    ),
    ("Time of a batch (`completion_window`)", f"{BATCH_WINDOW_S} s", "expired; the output has what is done"),
)
