"""The guard that keeps foreign pages out of the console, and the headers of its answers. Pure.

The admin port has checked Host, Origin and the caller before (`libs/common/http/`).
"""

from __future__ import annotations

from collections.abc import Mapping

from libs.common.http.failure import HttpRefusal
from libs.common.http.guard import check_body

CONSOLE_HEADER = "x-slipstream-console"
_POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data:",
        "font-src 'self'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
        "form-action 'none'",
    ]
)
SECURITY_HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
# Browsers state where a request comes from; other clients state nothing.
_OWN_SITES = ("", "same-origin", "none")


def check_site(headers: Mapping[str, str]) -> None:
    """Refuse what a page of another origin makes a browser ask, which sends no Origin. Raises HttpRefusal."""
    if headers.get("Sec-Fetch-Site", "") not in _OWN_SITES:
        raise HttpRefusal(403, "pages of other origins may not read the console", code="origin_not_allowed")


def check_post(headers: Mapping[str, str], *, content_type: str) -> None:
    """Refuse a POST that a page of another origin could send without a preflight. Raises HttpRefusal."""
    check_site(headers)
    if headers.get(CONSOLE_HEADER) != "1":
        message = f"a change needs the header {CONSOLE_HEADER}: 1"
        raise HttpRefusal(403, message, code="console_header_missing")
    check_body(headers, content_type=content_type)


def is_console(path: str) -> bool:
    """Whether a path of the admin port belongs to the console."""
    return path == "/console" or path.startswith("/console/")
