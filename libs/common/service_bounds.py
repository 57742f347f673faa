"""Limits of the services' memory, queues and waits; also generates docs/bounds.md. Pure.

`slipstream/bounds.py` has the bounds of one request.
"""

from __future__ import annotations

from libs.common import api_bounds, batch_bounds, fleet_bounds, list_bounds, worker_bounds
from libs.common.job_bounds import JOBS, WEBHOOKS_ROW
from slipstream import bounds
from slipstream.rpc.backoff import HEAL_S, LONGEST_PAUSE_S

IDLE_CONNECTION_S = 30.0
HTTP_CONNECTIONS = 4096
# What a client has to take in WRITE_STALL_S: from asyncio's high to its low-water mark.
HTTP_MIN_TAKEN_BYTES = 48 << 10
# What the kernel keeps of an answer for a client that does not take it, beside what is on the way.
HTTP_UNSENT_BYTES = 64 << 10
# What waits in the process for such a client, with TLS too.
HTTP_UNWRITTEN_BYTES = 64 << 10
# At each port, HTTP or gRPC.
TENANT_CONNECTIONS = 1024
ADDRESS_CONNECTIONS = 1024  # before their first key
GRPC_KEYLESS_CHECK_S = 1.0
WRITE_STALL_S = 30.0
GRPC_RESET_S = 5.0
UNREAD_SUSPEND_S = 1.0
MAX_TENANT_SUSPENDED = 256
MAX_TENANT_LATE_ROWS = 1 << 20  # about 50 MB; a router delivers 160,000 in a second
# A suspended request goes on after the first of these at the earliest, doubled each time up to the second.
RESUME_PAUSE_S = (0.5, 15.0)
GRPC_HANDSHAKE_S = 10.0
GRPC_PING_S = 10.0
GRPC_PING_ANSWER_S = 5.0
# What a process of the cluster serves at once over gRPC, and takes before a handler reads.
GRPC_CONNECTIONS = 2048
GRPC_CONNECTION_CALLS = 1024
GRPC_CALLS = 4096
# Calls of health and of reflection: of each method, of those whose messages arrive, and the message of one.
GRPC_PUBLIC_CALLS = 64
GRPC_PUBLIC_ARRIVING = 16
GRPC_PUBLIC_REQUEST_BYTES = 4096
GRPC_PUBLIC_READ_S = 2.0
GRPC_WINDOW_BYTES = 65_535  # HTTP/2's initial window
REQUEST_READ_S = bounds.BODY_READ_S
# The router's public port: an idle connection, and a message with its envelope. Methods that take only names.
GRPC_IDLE_CONNECTION_S = 4.5
GRPC_REQUEST_BYTES = bounds.MAX_BODY_BYTES + (1 << 20)
GRPC_SHORT_REQUEST_BYTES = 64 << 10
# A worker's streams of load reports: one for each router and operator.
LOAD_WATCHERS = 256

# The file of prices, and a price of a million tokens in it.
MAX_PRICE_FILE_BYTES = 256 << 10
MAX_PRICE = 10_000
# Counters of usage that wait for the database are written so often; a lease of a limit is renewed so often.
USAGE_WRITE_S = 1.0
LIMIT_RENEW_S = 0.25
DATABASE_END_S = 4.0  # for the jobs, and for the usage and limits, of a router that ends
# A lease of a limit that its router does not renew within this time is free for others.
LIMIT_LEASE_S = 10.0
# The rows of one answer about usage.
MAX_USAGE_ROWS = 10_000

# Admission, by class: interactive, default, bulk, jobs. The queue is limited in number and in time.
MAX_RUNNING_REQUESTS = 256
TENANT_RESERVE_SHARE = 0.25  # further places, for tenants that have less than their share
MAX_WAITING_REQUESTS = (256, 512, 1024, 64)
MAX_WAIT_S = (30.0, 60.0, 300.0, 300.0)
PROMOTE_AFTER_S = (0.0, 10.0, 60.0, 60.0)
MAX_PREFILL_WAIT_S = 30.0
MAX_PREEMPTIONS = 2
MAX_PREEMPTION_VICTIMS = 8
RETRY_AFTER_S = (0.1, 30.0)
MAX_WAITING_BYTES = 64 << 10
MAX_MEASURED = 8
# Messages that wait for a thread to parse or check them.
MAX_WAITING_WORK = 512
# The text of requests that run or wait at a router, and messages that arrive together.
MAX_HELD_TEXT_CHARS = 512 << 20
MAX_TENANT_HELD_TEXT_CHARS = 256 << 20
MAX_RECEIVED_TOGETHER = 64
MAX_TENANT_RECEIVED_TOGETHER = 16
# Calls of one tenant whose messages have not arrived: a quarter of GRPC_CALLS.
MAX_TENANT_ARRIVING_CALLS = 1024

# The CPU time to check one schema or grammar; one is checked at a time, and the process is killed beyond it.
GRAMMAR_CHECK_S = 5.0

# Jobs in the database: of one tenant, with its stored bodies, and of one page of a list.
MAX_TENANT_JOBS = 100_000
MAX_TENANT_JOB_BYTES = 4 << 30
JOBS_PAGE = 100
# Of a router: jobs that it runs, clients of one tenant that follow some, one delivery of a webhook.
MAX_RUNNING_JOBS = 64
MAX_TENANT_JOB_FOLLOWERS = 64
MAX_REFUSED_ENDS = 3
WEBHOOK_S = 10.0
WEBHOOK_LIFE_S = 86_400.0

# Limits of what one request costs the workers.
MAX_FRUITLESS_ATTEMPTS = 5
MAX_ATTEMPTS = 200
QUARANTINE_S = 60.0
MAX_QUARANTINED = 1024
DEATH_REPORT_WAIT_S = 1.0  # reports arrive within milliseconds where etcd answers
EXIT_REPORT_WRITE_S = 30.0
ATTEMPTS_REPORT_WAIT_S = 0.3

MAX_DECODED_TOKENS = bounds.MAX_MESSAGE_NUMBERS  # of one call of /detokenize or Detokenize, at once

# A file of settings. The parser's time grows with the square of the length of a dotted key.
MAX_CONFIGURATION_BYTES = 64 << 10

# Host memory of a worker's prompt cache, which lets later requests refer to a prefix.
MAX_PROMPT_MEMORY_BYTES = 128 << 20
MAX_TENANT_PROMPT_MEMORY_BYTES = 64 << 20
# The router sends shorter prefixes whole: a reference would save nothing.
MIN_PREFIX_REF_TOKENS = 1024
# Memory of a router's prefix index: about 30 bytes a block, for any number of holders.
MAX_PREFIX_INDEX_BYTES = 512 << 20
MAX_TENANT_PREFIX_INDEX_BYTES = 256 << 20
MAX_LOCAL_SESSIONS = 100_000  # whose placement a router without etcd remembers
# Sessions of a tenant whose placements are in etcd: at most 1 KB each, until they expire.
MAX_TENANT_SESSIONS = 50_000
# Blocks that a router assumes to be in a worker's prompt cache.
MAX_REMOTE_CACHE_BLOCKS = 131_072
# Workers that a router follows, and records of which discovery keeps the content: about 90 KB and 1 KB each.
MAX_FOLLOWED_WORKERS = 1024
MAX_FLEET_RECORDS = 8192
# The console of a router: requests whose timelines it keeps, rows of all their placement tables (about 400
# bytes each), readers of its events, and rows of one answer.
MAX_RECORDED_REQUESTS = 2_000
MAX_RECORDED_CANDIDATES = 100_000
CONSOLE_READERS = 16
CONSOLE_REQUESTS_PAGE = 500
CONSOLE_SESSIONS_PAGE = 200
CONSOLE_JOBS_PAGE = 500


def _by_class(values: tuple[float, ...], unit: str) -> str:
    return " / ".join(f"{value:g}" for value in values) + f" {unit}"


_Row = tuple[str, str, str]  # what, bound, what happens beyond it
_CONNECTIONS: tuple[_Row, ...] = (
    ("No whole request header (HTTP)", f"{IDLE_CONNECTION_S:g} s", "closed"),
    ("A client takes nothing of what waits (HTTP)", f"{WRITE_STALL_S:g} s", "closed"),
    (
        "A client takes an answer, at least (HTTP)",
        f"{HTTP_MIN_TAKEN_BYTES} bytes in {WRITE_STALL_S:g} s",
        "closed",
    ),
    ("Connections of one port, open TLS handshakes included (HTTP)", f"{HTTP_CONNECTIONS}", "closed"),
    ("Unread bytes of an answer in the kernel (HTTP)", f"{HTTP_UNSENT_BYTES} bytes", "the writer waits"),
    (
        "Unread bytes of an answer in the process (HTTP, TLS)",
        f"{HTTP_UNWRITTEN_BYTES} bytes",
        "the writer waits",
    ),
    (
        "Connections of one address off loopback, before their first key (HTTP)",
        f"{ADDRESS_CONNECTIONS}",
        "closed",
    ),
    ("Connections of one tenant (HTTP)", f"{TENANT_CONNECTIONS}", "429, then closed"),
    (
        "Connections of one address off loopback, without a key (gRPC)",
        f"{ADDRESS_CONNECTIONS}",
        f"the newest are closed within {GRPC_KEYLESS_CHECK_S:g} s",
    ),
    (
        "Connections of one tenant that have calls, or had one lately (gRPC)",
        f"{TENANT_CONNECTIONS}",
        "RESOURCE_EXHAUSTED for calls on further ones",
    ),
    ("A client reads nothing of a waiting answer", f"{WRITE_STALL_S:g} s", "request aborted"),
    (
        "A client reads nothing of an answer that ended early (gRPC)",
        f"{GRPC_RESET_S:g} to {2 * GRPC_RESET_S:g} s",
        "call reset",
    ),
    ("A client does not read a unary answer (gRPC)", f"{WRITE_STALL_S:g} s", "call reset"),
    ("No whole TLS and HTTP/2 handshake (gRPC)", f"{GRPC_HANDSHAKE_S:g} s", "closed"),
    (
        f"No answer to the ping after {GRPC_PING_S:g} s of silence (gRPC)",
        f"{GRPC_PING_ANSWER_S:g} s",
        "closed",
    ),
    (
        "Connections of a process / calls of a connection / calls of a process (gRPC)",
        f"{GRPC_CONNECTIONS} / {GRPC_CONNECTION_CALLS} / {GRPC_CALLS}",
        "closed / wait / RESOURCE_EXHAUSTED",
    ),
    (
        "Calls of one method of health or reflection / those whose messages have not arrived (gRPC)",
        f"{GRPC_PUBLIC_CALLS} / {GRPC_PUBLIC_ARRIVING}",
        "the oldest call of the busiest connection is reset",
    ),
    (
        "Message of a call of health or reflection / the wait for it (gRPC)",
        f"{GRPC_PUBLIC_REQUEST_BYTES} bytes / {GRPC_PUBLIC_READ_S:g} s",
        "INVALID_ARGUMENT",
    ),
    ("Bytes of a connection before a call is accepted (gRPC)", f"{GRPC_WINDOW_BYTES}", "wait at the client"),
    (
        "Message to a router / of a method without prompt, bodies or blocks (gRPC)",
        f"{GRPC_REQUEST_BYTES} / {GRPC_SHORT_REQUEST_BYTES} bytes",
        "RESOURCE_EXHAUSTED (SDK: BodyTooLarge) / INVALID_ARGUMENT",
    ),
    ("No whole message of an accepted call (gRPC)", f"{REQUEST_READ_S:g} s", "INVALID_ARGUMENT"),
    (
        "No call on a router's connection (gRPC)",
        f"{GRPC_IDLE_CONNECTION_S:g} to {2 * GRPC_IDLE_CONNECTION_S:g} s",
        "closed",
    ),
    ("Streams of load reports of one process", f"{LOAD_WATCHERS}", "RESOURCE_EXHAUSTED"),
    (
        "Messages that arrive together at a router: all tenants / one",
        f"{MAX_RECEIVED_TOGETHER} / {MAX_TENANT_RECEIVED_TOGETHER}",
        f"others wait, at most {REQUEST_READ_S:g} s",
    ),
    ("Calls of one tenant whose messages have not arrived", f"{MAX_TENANT_ARRIVING_CALLS}", "refused"),
    ("Longest pause before a reconnect", f"{LONGEST_PAUSE_S:g} s", f"connected again within {HEAL_S:g} s"),
)
_TOGETHER: tuple[_Row, ...] = (
    ("Requests running at one router (`--max-requests`)", f"{MAX_RUNNING_REQUESTS}", "others wait"),
    ("Further running requests, of tenants below their share", f"{TENANT_RESERVE_SHARE:.0%} more", "wait"),
    (
        "Waiting requests: interactive / default / bulk / jobs",
        _by_class(MAX_WAITING_REQUESTS, "requests"),
        "refused: it, or the newest of the tenant with most",
    ),
    (
        "Text of all requests: all tenants / one; jobs take half of it",
        f"{MAX_HELD_TEXT_CHARS} / {MAX_TENANT_HELD_TEXT_CHARS} characters",
        "refused",
    ),
    ("Longest wait: interactive / default / bulk / jobs", _by_class(MAX_WAIT_S, "s"), "refused"),
    ("Wait until a class competes with higher ones", _by_class(PROMOTE_AFTER_S, "s"), "promoted"),
    (
        "Prompts tokenized before they wait: they may exceed the context",
        f"{MAX_MEASURED}",
        "others are tokenized in the queue",
    ),
    ("Long messages waiting for a check, in equal shares of tenants", f"{MAX_WAITING_WORK}", "refused"),
    ("Expected wait for a prefill worker", f"{MAX_PREFILL_WAIT_S:g} s", "waits at the router"),
    ("Preemptions of one request by higher classes", f"{MAX_PREEMPTIONS}", "it stays"),
    ("Requests preempted for one", f"{MAX_PREEMPTION_VICTIMS}", "it waits"),
    ("Retry delay in a refusal", f"{RETRY_AFTER_S[0]:g} to {RETRY_AFTER_S[1]:g} s", ""),
    ("Unread text of one request", f"{MAX_WAITING_BYTES} bytes", "its sequence waits"),
    (
        "A client reads nothing while its text is full or others wait for a place",
        f"{UNREAD_SUSPEND_S:g} s",
        "the request leaves its workers",
    ),
    (
        "Pause before such a request goes on, doubled each time",
        f"{RESUME_PAUSE_S[0]:g} to {RESUME_PAUSE_S[1]:g} s",
        "waits",
    ),
    ("Requests of one tenant that left their workers so", f"{MAX_TENANT_SUSPENDED}", "request aborted"),
    ("Late log probabilities of one tenant at a router", f"{MAX_TENANT_LATE_ROWS}", "request aborted"),
    ("Failed attempts in a row without a token", f"{MAX_FRUITLESS_ATTEMPTS}", "request failed"),
    ("Attempts at one request", f"{MAX_ATTEMPTS}", "request failed"),
    ("Quarantine of a request that crashed workers", f"{QUARANTINE_S:g} s", "refused meanwhile"),
    ("Requests in quarantine, and with strikes", f"{MAX_QUARANTINED} each", "the oldest is forgotten"),
    ("Wait for a worker's exit report", f"{DEATH_REPORT_WAIT_S:g} s", "the worker counts as crashed"),
    ("Writing an exit report while etcd takes no changes", f"{EXIT_REPORT_WRITE_S:g} s", "there is none"),
    (
        "Wait for other routers' requests at that worker",
        f"{ATTEMPTS_REPORT_WAIT_S:g} s",
        "they had none there",
    ),
    (
        "Prompt cache of a worker: all tenants / one tenant",
        f"{MAX_PROMPT_MEMORY_BYTES} / {MAX_TENANT_PROMPT_MEMORY_BYTES} bytes",
        "the least recently used is evicted",
    ),
    (
        "Prefix index of a router: all tenants / one or unknown ones",
        f"{MAX_PREFIX_INDEX_BYTES} / {MAX_TENANT_PREFIX_INDEX_BYTES} bytes",
        "the least recently used is evicted",
    ),
    (
        "Workers that a router follows / whose records a process keeps",
        f"{MAX_FOLLOWED_WORKERS} / {MAX_FLEET_RECORDS}",
        "others are not used",
    ),
    ("The file of API keys", f"{bounds.MAX_KEY_FILE_BYTES} bytes", "not taken"),
    ("The file of prices", f"{MAX_PRICE_FILE_BYTES} bytes", "not taken"),
    ("A price of a million tokens", f"{MAX_PRICE}", "not taken"),
    (
        "A limit of requests or tokens / of spend",
        f"{bounds.MAX_LIMIT} / {bounds.MAX_SPEND}",
        "not taken",
    ),
    ("Usage not yet in the database", f"{USAGE_WRITE_S:g} s", "lost if the router is killed"),
    ("Rows of one answer about usage", f"{MAX_USAGE_ROWS}", "400, INVALID_ARGUMENT"),
    (
        "Use beyond a shared limit, of each router",
        "limit / (4 x routers), at least 1",
        "429 until its lease is renewed",
    ),
    ("Token ids of `/detokenize` and `Detokenize`", f"{MAX_DECODED_TOKENS}", "400, INVALID_ARGUMENT"),
    ("A file of settings (`--config`)", f"{MAX_CONFIGURATION_BYTES} bytes", "refused"),
    (
        "Sessions of a router without etcd",
        f"{MAX_LOCAL_SESSIONS}",
        "the least recently used lose their placement",
    ),
    (
        "Sessions of one tenant with a placement in etcd",
        f"{MAX_TENANT_SESSIONS}",
        "further ones have none (`--session-ttl-s`)",
    ),
    (
        "Prompt blocks that a router assumes at one worker",
        f"{MAX_REMOTE_CACHE_BLOCKS}",
        "prompts are sent whole",
    ),
)
_JOBS: tuple[_Row, ...] = (
    (
        "Jobs of one tenant, unended or with a waiting webhook / their bodies",
        f"{MAX_TENANT_JOBS} / {MAX_TENANT_JOB_BYTES} bytes",
        "429, RESOURCE_EXHAUSTED",
    ),
    ("Jobs that one router runs", f"{MAX_RUNNING_JOBS}", "others wait in the database"),
    ("Refusals of a job's end by the database", f"{MAX_REFUSED_ENDS}", "the job fails without a result"),
    ("Clients of one tenant that follow jobs", f"{MAX_TENANT_JOB_FOLLOWERS}", "refused"),
    WEBHOOKS_ROW,
    ("One delivery of a webhook", f"{WEBHOOK_S:g} s", "repeated later"),
    ("All deliveries of one webhook", f"{WEBHOOK_LIFE_S:g} s", "given up"),
)
_CONSOLE: tuple[_Row, ...] = (
    ("Requests whose timelines a router keeps", f"{MAX_RECORDED_REQUESTS}", "the oldest is forgotten"),
    (
        "Rows of the placement tables of these",
        f"{MAX_RECORDED_CANDIDATES}",
        "the oldest are forgotten; the choice and its reasons stay",
    ),
    ("Readers of the live events", f"{CONSOLE_READERS}", "429"),
    (
        "Requests / sessions / jobs of one answer",
        f"{CONSOLE_REQUESTS_PAGE} / {CONSOLE_SESSIONS_PAGE} / {CONSOLE_JOBS_PAGE}",
        "400; the answer names the next page",
    ),
)


def render_markdown() -> str:
    """docs/bounds.md."""
    lines = [
        "# Bounds",
        "",
        "Made from `slipstream/bounds.py` and the tables of bounds in `libs/common/` by",
        "`python -m libs.common.service_bounds > docs/bounds.md`; do not edit.",
        "",
        "The router refuses a request outside these bounds: on HTTP with status 400 in OpenAI's error shape",
        "(413 for the body's size), on gRPC with INVALID_ARGUMENT and a `google.rpc.BadRequest` field",
        "violation. The message is the field, a colon and the words below, without the notes in italics.",
        "A line without (HTTP) or (gRPC) holds in both APIs. Other rules are in their error messages alone.",
        'From "Connections" on the lines state a bound and what happens beyond it.',
    ]
    for each in (*bounds.SECTIONS, list_bounds.LISTS, *api_bounds.API_SECTIONS, JOBS, *batch_bounds.SECTIONS):
        lines += each.markdown()
    tables = (
        ("Connections", _CONNECTIONS),
        ("Requests together", _TOGETHER),
        ("Files and batches together", batch_bounds.ROWS),
        ("Stored responses", api_bounds.ROWS),
        ("Stored jobs", _JOBS),
        ("The console of a router", _CONSOLE),
        ("Workers", worker_bounds.ROWS),
        ("The fleet as a router sees it", fleet_bounds.ROWS),
    )
    for title, rows in tables:
        lines += ["", f"## {title}", ""]
        lines += [f"- {what}: **{bound}**{f'; {then}' if then else ''}" for what, bound, then in rows]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(render_markdown(), end="")
