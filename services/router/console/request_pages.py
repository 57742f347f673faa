"""Pages of the list of requests, filtered. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from libs.common.service_bounds import CONSOLE_REQUESTS_PAGE
from services.router.recording.recorder import RequestRecorder
from services.router.recording.timeline import RequestStatus, RequestTimeline
from slipstream.errors import InvalidArgument

DEFAULT_PAGE = 100
_MAX_TEXT_CHARS = 256
_STATUSES = {status.value for status in RequestStatus}


@dataclass(frozen=True, slots=True)
class RequestFilter:
    """Which requests a page shows. Empty texts let all pass."""

    limit: int = DEFAULT_PAGE
    before: int | None = None
    status: str = ""
    tenant: str = ""
    session: str = ""
    text: str = ""  # within the id, the session, the tenant, a worker or the code

    def passes(self, timeline: RequestTimeline) -> bool:
        """Whether the page shows the request. `running` includes what waits for admission."""
        if self.status and timeline.status != self.status:
            is_queued = timeline.status is RequestStatus.QUEUED
            if not (is_queued and self.status == RequestStatus.RUNNING):
                return False
        if self.tenant and timeline.tenant != self.tenant:
            return False
        if self.session and timeline.session != self.session:
            return False
        if not self.text:
            return True
        texts = (
            timeline.request_id,
            timeline.session or "",
            timeline.tenant,
            timeline.prefill,
            timeline.decode,
            timeline.code,
        )
        return any(self.text in each.lower() for each in texts)


@dataclass(frozen=True, slots=True)
class RequestPage:
    """Timelines, newest first, and where the next page begins; None after the last one."""

    timelines: list[RequestTimeline]
    next_before: int | None


def read_filter(query: Mapping[str, str]) -> RequestFilter:
    """The filter in a query. Raises InvalidArgument, which names the field."""
    status = query.get("status", "")
    if status and status not in _STATUSES:
        raise InvalidArgument("status", f"must be one of {', '.join(sorted(_STATUSES))}")
    before = query.get("before", "")
    return RequestFilter(
        limit=whole_number(query, "limit", default=DEFAULT_PAGE, least=1, most=CONSOLE_REQUESTS_PAGE),
        before=whole_number(query, "before", default=0, least=1, most=1 << 53) if before else None,
        status=status,
        tenant=short_text(query, "tenant"),
        session=short_text(query, "session"),
        text=short_text(query, "q").lower(),
    )


def page_of(recorder: RequestRecorder, wanted: RequestFilter) -> RequestPage:
    """The newest requests that pass, at most `limit`."""
    timelines: list[RequestTimeline] = []
    for timeline in recorder.newest_first(before=wanted.before):
        if not wanted.passes(timeline):
            continue
        if len(timelines) == wanted.limit:
            return RequestPage(timelines, timelines[-1].seq)
        timelines.append(timeline)
    return RequestPage(timelines, None)


def whole_number(query: Mapping[str, str], name: str, *, default: int, least: int, most: int) -> int:
    """A number of a query. Raises InvalidArgument."""
    text = query.get(name, "")
    if not text:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= 16 and least <= int(text) <= most):
        raise InvalidArgument(name, f"must be a whole number from {least} to {most}")
    return int(text)


def short_text(query: Mapping[str, str], name: str) -> str:
    """A text of a query. Raises InvalidArgument."""
    text = query.get(name, "")
    if len(text) > _MAX_TEXT_CHARS:
        raise InvalidArgument(name, f"must have at most {_MAX_TEXT_CHARS} characters")
    return text
