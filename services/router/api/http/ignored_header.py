"""Fields without effect, as answers name them and metrics count them."""

from __future__ import annotations

from libs.common.telemetry.counters import Counters
from services.router.api.openai.ignored_fields import IGNORED_HEADER, IgnoredFields


def ignored_header(names: str) -> dict[str, str]:
    """The answer's header with these names; none where there are no names."""
    return {IGNORED_HEADER: names} if names else {}


def count_ignored(counters: Counters, ignored: IgnoredFields) -> dict[str, str]:
    """Count the fields of a body; the answer's header that names them."""
    if not ignored.count:
        return {}
    counters.add("slipstream_ignored_fields_total", ignored.count)
    return ignored_header(ignored.header())
