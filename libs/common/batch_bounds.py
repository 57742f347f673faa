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
FILE = _files.add(
    Rule("file", "must be given, with a file name", "One part of the form, or the header of the upload.")
)
FILE_BYTES = _files.add(Size("file", 1, MAX_FILE_BYTES, "bytes", "It is kept in the database."))
FILE_NAME = _files.add(Size("file", 1, 256, "bytes in its name", "Answers show it."))
FILE_PART = _files.add(
    Size("content", 0, FILE_CHUNK_BYTES, "bytes in one message", "A message is whole in memory.", "gRPC")
)
FILE_WHOLE = _files.add(
    Rule(
        "content",
        "must have the {n_bytes} bytes that the header states, not {n_arrived}",
        "A broken call ends so, too.",
        "gRPC",
    )
)
FILE_HEADER = _files.add(
    Rule("header", "must be the first message of an upload, and it alone", "The content follows.", "gRPC")
)
FILE_FORM = _files.add(
    Rule("body", "must be multipart/form-data with the parts file and purpose", "As OpenAI's.", "HTTP")
)
FILE_PARTS = _files.add(Size("body", 0, 16, "parts", "A form has few.", "HTTP"))
PURPOSE = _files.add(Rule("purpose", "must be batch", "Files are for batches.", "HTTP"))
EXPIRES_ANCHOR = _files.add(
    Rule("expires_after.anchor", "must be created_at", "As OpenAI's; also output_expires_after.", "HTTP")
)
EXPIRES = _files.add(
    Range("expires_after.seconds", 3600, FILE_TTL_S, "Left out: 30 days.", whole=True, apis="HTTP")
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
ENDPOINT = _files.add(Rule("endpoint", "must be one of {endpoints}", "What a batch may call."))
WINDOW = _files.add(Rule("completion_window", "must be 24h", "As OpenAI's.", "HTTP"))
INPUT_FILE = _files.add(Rule("input_file_id", "must be given", "The requests of the batch."))
LIMIT = _files.add(Range("limit", 1, 100, "Of a page of batches. gRPC: 0 = 20.", whole=True))
FILES_LIMIT = _files.add(
    Range("limit", 1, MAX_TENANT_FILES, "Of a page of files. gRPC: 0 = 100.", whole=True)
)
ORDER = _files.add(Rule("order", "must be asc or desc", "By the time of creation.", "HTTP"))
AFTER = _files.add(Rule("after", "names nothing of this list", "The id at the end of a page."))
LISTED_PURPOSE = _files.add(Rule("purpose", "is not known", "A file has one of two.", "gRPC"))

_runs = Section("Runs of Workers AI's API")
RUN_INPUT = _runs.add(
    Rule("prompt", "must be given, unless messages are, and not beside them", "One input.", "HTTP")
)
RUNS = _runs.add(Size("requests", 1, 500, "requests", "They are one body.", "HTTP"))
RUN_STREAM = _runs.add(
    Rule("stream", "is not for a run in a batch or in the queue", "None reads it.", "HTTP")
)
RUNS_AT_ONCE = _runs.add(Size("requests", 1, 64, "requests without queueRequest", "They run now.", "HTTP"))
RUN_REFERENCE = _runs.add(Size("external_reference", 0, 500, "characters", "It is echoed.", "HTTP"))

SECTIONS = (_files, _runs)
# Of the disk of a SQLite database, and of its free pages. A deletion writes to the log first.
SPARE_DISK_BYTES = 64 << 20

ROWS: tuple[tuple[str, str, str], ...] = (
    (
        "Room of SQLite's disk, or an eighth of a small disk, that no new file, batch, job or response takes",
        f"{SPARE_DISK_BYTES} bytes",
        "507; deletions and the ends of jobs go on. The room is checked before content is written and not "
        "reserved, so one commit may take from it.",
    ),
    (
        "Uploads that arrive together: of all tenants / of one",
        f"{MAX_UPLOADS[0]} / {MAX_UPLOADS[1]}",
        "others wait at the client, at most 30 s",
    ),
    ("Whole upload of a file", f"{FILE_UPLOAD_S:g} s", "400"),
    ("Page of batches over gRPC", f"about {BATCHES_PAGE_BYTES} bytes", "the page ends earlier"),
    (
        "Files of one tenant: number / bytes in all",
        f"{MAX_TENANT_FILES} / {MAX_TENANT_FILE_BYTES}",
        "429, until some are deleted or expire",
    ),
    ("Life of a file", f"{FILE_TTL_S} s, or `expires_after`", "deleted"),
    ("Rest of an upload that broke off", f"{UPLOAD_TTL_S} s", "deleted"),
    ("Requests of one batch", f"{MAX_BATCH_LINES}", "the batch fails and says so"),
    ("A line of a batch", f"{MAX_LINE_BYTES} bytes", "the batch fails and names the line"),
    ("Errors that a failed batch names", f"{MAX_BATCH_ERRORS}", "the first ones"),
    ("Batches of one tenant that are not over", f"{MAX_TENANT_BATCHES}", "429"),
    (
        "Batches of one tenant that are stored",
        f"{MAX_TENANT_STORED_BATCHES}",
        "the oldest that are over are forgotten",
    ),
    (
        "Time of a batch (`completion_window`)",
        f"{BATCH_WINDOW_S} s",
        "expired; what is done is in the output",
    ),
)
