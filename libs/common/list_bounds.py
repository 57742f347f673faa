"""The bounds of calls that list what a router knows. Pure; docs/bounds.md shows them."""

from __future__ import annotations

from slipstream.bound import Range, Rule, Section

SESSIONS_PAGE = 100
MAX_SESSIONS_PAGE = 1000

LISTS = Section("Lists of sessions")
SESSIONS_LIMIT = LISTS.add(
    Range("limit", 0, MAX_SESSIONS_PAGE, f"0 = {SESSIONS_PAGE}.", whole=True, apis="gRPC")
)
SESSIONS_AFTER = LISTS.add(Rule("after", "must be `next` of an earlier page", apis="gRPC"))
