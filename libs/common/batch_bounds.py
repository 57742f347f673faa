"""Bounds of files, batches and queued runs; docs/bounds.md has them beside those of service_bounds.py."""

from __future__ import annotations

from slipstream import bounds
from slipstream.bound import Range, Rule, Section, Size

MAX_FILE_BYTES = 100 << 20
FILE_UPLOAD_S = 600.0
FILE_CHUNK_BYTES = 1 << 20
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
FILE = _files.add(Rule("file", "must be given, with a file name", "One part of the form.", "HTTP"))
FILE_BYTES = _files.add(Size("file", 1, MAX_FILE_BYTES, "bytes", "It is kept in the database.", "HTTP"))
FILE_NAME = _files.add(Size("file", 1, 256, "bytes in its name", "Answers show it.", "HTTP"))
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
ENDPOINT = _files.add(Rule("endpoint", "must be one of {endpoints}", "What a batch may call.", "HTTP"))
WINDOW = _files.add(Rule("completion_window", "must be 24h", "As OpenAI's.", "HTTP"))
INPUT_FILE = _files.add(Rule("input_file_id", "must be given", "The requests of the batch.", "HTTP"))
LIMIT = _files.add(Range("limit", 1, 100, "Of a page of batches.", whole=True, apis="HTTP"))
FILES_LIMIT = _files.add(Range("limit", 1, MAX_TENANT_FILES, "Of a page of files.", whole=True, apis="HTTP"))
ORDER = _files.add(Rule("order", "must be asc or desc", "By the time of creation.", "HTTP"))
AFTER = _files.add(Rule("after", "names nothing of this list", "The id at the end of a page.", "HTTP"))

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
ROWS: tuple[tuple[str, str, str], ...] = (
    (
        "Uploads that arrive together: of all tenants / of one",
        f"{MAX_UPLOADS[0]} / {MAX_UPLOADS[1]}",
        "others wait at the client, at most 30 s",
    ),
    ("Whole upload of a file", f"{FILE_UPLOAD_S:g} s", "400"),
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
