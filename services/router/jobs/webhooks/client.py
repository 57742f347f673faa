"""Posts one webhook and reads the status of the answer, and nothing else of it.

A client library parses all that a receiver sends. A flood of interim answers, or a body in chunks of a byte,
kept the event loop for seconds. Here an answer counts by its first bytes, and each delivery has a connection.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import Mapping
from functools import cache
from urllib.parse import quote, urlsplit

from libs.common.job_bounds import WEBHOOK_ANSWER_BYTES
from services.router.jobs.webhooks.policy import SCHEME_PORTS
from services.router.jobs.webhooks.resolver import AllowedResolver

_STATUS = re.compile(rb"HTTP/1\.[01] ([1-9][0-9]{2})(?: .*)?\r?\n", re.DOTALL)
_FIRST_FINAL = 200
# What may stand in the target of a request: other characters are escaped.
_TARGET_CHARS = "!#$%&'()*+,/:;=?@[]~"


class WebhookUnanswered(Exception):
    """The receiver was not reached, or said nothing that is an answer."""


async def post_webhook(
    url: str, body: bytes, headers: Mapping[str, str], *, resolver: AllowedResolver, timeout_s: float
) -> int:
    """The status of the answer; no redirect is followed. Raises WebhookUnanswered."""
    try:
        async with asyncio.timeout(timeout_s):
            return await _post(url, body, headers, resolver)
    except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as error:
        raise WebhookUnanswered(type(error).__name__) from None


async def _post(url: str, body: bytes, headers: Mapping[str, str], resolver: AllowedResolver) -> int:
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or SCHEME_PORTS[parts.scheme]
    target = quote(parts.path or "/", safe=_TARGET_CHARS)
    if parts.query:
        target += f"?{quote(parts.query, safe=_TARGET_CHARS)}"
    lines = [f"POST {target} HTTP/1.1", f"Host: {parts.netloc}", f"Content-Length: {len(body)}"]
    lines += ["User-Agent: slipstream", "Accept: */*", "Connection: close"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    tls = _tls() if parts.scheme == "https" else None
    address = await resolver.resolve(host, port)
    reader, writer = await asyncio.open_connection(
        address, port, limit=WEBHOOK_ANSWER_BYTES, ssl=tls, server_hostname=host if tls else None
    )
    try:
        writer.write("\r\n".join([*lines, "", ""]).encode("ascii") + body)
        return await _final_status(reader)
    finally:
        writer.transport.abort()


async def _final_status(reader: asyncio.StreamReader) -> int:
    """The status of the first answer that is not an interim one. Raises ValueError."""
    left = WEBHOOK_ANSWER_BYTES
    while left > 0:
        line = await reader.readuntil(b"\n")
        left -= len(line)
        found = _STATUS.fullmatch(line)
        if found is None:
            raise ValueError("not a status line")
        if (status := int(found[1])) >= _FIRST_FINAL:
            return status
        while left > 0 and line.strip():
            line = await reader.readuntil(b"\n")
            left -= len(line)
    raise ValueError("too many interim answers")


@cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()
