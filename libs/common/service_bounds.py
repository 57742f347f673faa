"""What the services hold and wait for at most, and docs/bounds.md, which lists both tables. Pure.

What one request may hold is in `slipstream/bounds.py`.
"""

from __future__ import annotations

from slipstream import bounds
from slipstream.backoff import HEAL_S, LONGEST_PAUSE_S

IDLE_CONNECTION_S = 30.0
WRITE_STALL_S = 30.0
GRPC_HANDSHAKE_S = 10.0
GRPC_PING_S = 10.0
GRPC_PING_ANSWER_S = 5.0

# Admission, by class: interactive, default, bulk. What waits is bounded in number and in time.
MAX_RUNNING_REQUESTS = 256
MAX_WAITING_REQUESTS = (256, 512, 1024)
MAX_WAIT_S = (30.0, 60.0, 300.0)
PROMOTE_AFTER_S = (0.0, 10.0, 60.0)
MAX_PREFILL_WAIT_S = 30.0
MAX_PREEMPTIONS = 2
MAX_PREEMPTION_VICTIMS = 8
RETRY_AFTER_S = (0.1, 30.0)
MAX_WAITING_BYTES = 64 << 10
MAX_MEASURED = 8

# What one request may cost workers.
MAX_FRUITLESS_ATTEMPTS = 5
MAX_ATTEMPTS = 200
QUARANTINE_S = 60.0
MAX_QUARANTINED = 1024
# A report of how a worker ended comes within milliseconds, or never.
DEATH_REPORT_WAIT_S = 1.0

# What a prefill or decode worker remembers of prompts, so that the next turn only names them; host memory.
MAX_PROMPT_MEMORY_BYTES = 128 << 20
MAX_TENANT_PROMPT_MEMORY_BYTES = 64 << 20
# Beginnings shorter than this are sent: to name them saves nothing.
LEAST_NAMED_TOKENS = 1024
# What a router remembers of where blocks of KV are: some 30 bytes a block, whoever holds it.
MAX_PREFIX_INDEX_BYTES = 512 << 20
MAX_TENANT_PREFIX_INDEX_BYTES = 256 << 20
# Blocks that a router takes a worker to remember.
MAX_BELIEVED_BLOCKS = 131_072


def _by_class(values: tuple[float, ...], unit: str) -> str:
    return " / ".join(f"{value:g}" for value in values) + f" {unit}"


_Row = tuple[str, str, str]  # what, bound, what happens beyond it
_CONNECTIONS: tuple[_Row, ...] = (
    ("No whole request header on a connection (HTTP)", f"{IDLE_CONNECTION_S:g} s", "closed"),
    ("Nothing read of an answer that waits", f"{WRITE_STALL_S:g} s", "request aborted"),
    ("No whole TLS and HTTP/2 handshake on a connection (gRPC)", f"{GRPC_HANDSHAKE_S:g} s", "closed"),
    (
        f"No answer to the ping of a connection silent for {GRPC_PING_S:g} s (gRPC)",
        f"{GRPC_PING_ANSWER_S:g} s",
        "closed",
    ),
    (
        "Longest pause before a broken connection is tried again",
        f"{LONGEST_PAUSE_S:g} s",
        f"carries within {HEAL_S:g} s",
    ),
)
_TOGETHER: tuple[_Row, ...] = (
    ("Requests running at one router (`--max-requests`)", f"{MAX_RUNNING_REQUESTS}", "others wait"),
    (
        "Requests waiting there: interactive / default / bulk",
        _by_class(MAX_WAITING_REQUESTS, "requests"),
        "refused, or the newest of the tenant that has most waiting",
    ),
    ("How long one waits: interactive / default / bulk", _by_class(MAX_WAIT_S, "s"), "refused"),
    ("Waiting after which a class has turns above its rank", _by_class(PROMOTE_AFTER_S, "s"), "promoted"),
    (
        "Prompts that may fit no context, and are measured before they wait",
        f"{MAX_MEASURED}",
        "others wait first",
    ),
    ("Expected wait for a prefill worker", f"{MAX_PREFILL_WAIT_S:g} s", "waits at the router"),
    ("Times one request is put back for a higher class", f"{MAX_PREEMPTIONS}", "it stays"),
    ("Requests put back for one", f"{MAX_PREEMPTION_VICTIMS}", "it waits"),
    ("Time to come back that a refusal names", f"{RETRY_AFTER_S[0]:g} to {RETRY_AFTER_S[1]:g} s", ""),
    ("Text of one request that waits for its reader", f"{MAX_WAITING_BYTES} bytes", "its sequence waits"),
    ("Failed attempts in a row without a new token", f"{MAX_FRUITLESS_ATTEMPTS}", "request failed"),
    ("Attempts at one request", f"{MAX_ATTEMPTS}", "request failed"),
    ("A request that workers died of is known again", f"{QUARANTINE_S:g} s", "refused meanwhile"),
    ("Such requests known", f"{MAX_QUARANTINED}", "the oldest is forgotten"),
    ("Wait for a report of how a worker ended", f"{DEATH_REPORT_WAIT_S:g} s", "it counts as broken"),
    (
        "Prompts that a worker remembers: of all tenants / of one",
        f"{MAX_PROMPT_MEMORY_BYTES} / {MAX_TENANT_PROMPT_MEMORY_BYTES} bytes",
        "the least recently used are forgotten, and sent whole again",
    ),
    (
        "What a router remembers of where KV is: of all tenants / of one, and of blocks that no prompt named",
        f"{MAX_PREFIX_INDEX_BYTES} / {MAX_TENANT_PREFIX_INDEX_BYTES} bytes",
        "the ends of the least recently used chains are forgotten, and taken to be nowhere",
    ),
    (
        "Blocks of prompts that a router takes a worker to remember",
        f"{MAX_BELIEVED_BLOCKS}",
        "prompts are sent whole",
    ),
)


def render_markdown() -> str:
    """docs/bounds.md."""
    lines = [
        "# Bounds",
        "",
        "Made from `slipstream/bounds.py` and `libs/common/service_bounds.py` by",
        "`python -m libs.common.service_bounds > docs/bounds.md`; do not edit.",
        "",
        "What is outside of these bounds is refused before it reaches a worker: INVALID_ARGUMENT with a",
        "`google.rpc.BadRequest` field violation on gRPC, status 400 in OpenAI's error shape on HTTP (413",
        "for the body's size; NOT_FOUND and 404 for the model). The message is the field, a colon and the",
        "words below, on both faces the same.",
    ]
    for section in bounds.SECTIONS:
        lines += section.markdown()
    for title, rows in (("Connections", _CONNECTIONS), ("Requests together", _TOGETHER)):
        lines += ["", f"## {title}", "", "| What | Bound | Then |", "|---|---|---|"]
        lines += [f"| {what} | {bound} | {then} |" for what, bound, then in rows]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(render_markdown(), end="")
