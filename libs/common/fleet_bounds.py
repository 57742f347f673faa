"""Bounds of what a router takes from the other processes of its cluster, for docs/bounds.md."""

from __future__ import annotations

from slipstream.bounds import MAX_SECRET_FILE_BYTES

# Beyond these a router's load counts as unknown: a process that writes into etcd may add thousands.
MAX_FOLLOWED_ROUTERS = 256
# Routers, and processes that leave, in one answer to an operator; it stays below what a message may have.
MAX_SHOWN_PROCESSES = 1024
# Processes that leave and are asked for their load for such an answer.
MAX_ASKED_LEAVING = 64
# Handoffs in a row that no decode worker read. Each cost the computation of a whole prompt.
MAX_UNREAD_HANDOFFS = 3
# Of a router's event loop, for one worker's stream of block events: the share, and what may come at once.
# A worker that sends a change for each of 100 steps a second takes 0.02.
BLOCK_EVENTS_SHARE = 0.1
BLOCK_EVENTS_BURST_S = 0.5  # a snapshot of about 200,000 new blocks, as measured on one core
# Files of `slipstream plan` and `slipstream route`, which need no cluster.
MAX_TRACE_LINES = 10_000_000
MAX_TRACE_LINE_BYTES = 1 << 20  # a prompt of 256k tokens has 512 hashes
MAX_ROUTE_FILE_BYTES = 16 << 20

ROWS = (
    ("Other routers whose load a router follows", f"{MAX_FOLLOWED_ROUTERS}", "the load of others is unknown"),
    (
        "Routers / leaving processes in an operator's answer",
        f"{MAX_SHOWN_PROCESSES} / {MAX_SHOWN_PROCESSES}",
        "others are left out",
    ),
    ("Leaving processes asked for their load", f"{MAX_ASKED_LEAVING}", "others are shown without"),
    (
        "Unread handoffs of one request in a row",
        f"{MAX_UNREAD_HANDOFFS}",
        "a decode worker computes the prompt",
    ),
    (
        "Router's time for one worker's block events",
        f"{BLOCK_EVENTS_SHARE:.0%}, after {BLOCK_EVENTS_BURST_S:g} s at once",
        "they wait at the worker",
    ),
    ("A file of a secret or certificate", f"{MAX_SECRET_FILE_BYTES} bytes", "refused"),
    (
        "A trace of `slipstream plan`: lines / one line",
        f"{MAX_TRACE_LINES} / {MAX_TRACE_LINE_BYTES} bytes",
        "refused",
    ),
    ("A file of `slipstream route`", f"{MAX_ROUTE_FILE_BYTES} bytes", "refused"),
)
