"""Reads what every request of the public HTTP API has: the caller of its headers, and its body."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from aiohttp import web

from libs.common.http.admin_server import CALLER
from libs.common.http.connection import HttpConnection
from services.router.admission.tenant_shares import ReceiveSlots
from services.router.api.api_keys import DEFAULT_TENANT, ApiKeys
from services.router.api.content_encoding import EncodedBody
from services.router.api.http.middleware import RECORD
from services.router.request.types import Caller
from services.router.request.validation import is_request_id
from slipstream import bounds, errors
from slipstream.credentials.api_key_file import KeyScope


class RequestReader:
    """Bounds what a request may cost before it is parsed. Times are in seconds; see docs/bounds.md."""

    def __init__(
        self, keys: ApiKeys, received: ReceiveSlots, *, body_read_s: float, clock: Callable[[], float]
    ) -> None:
        self._keys = keys
        self._received = received
        self._body_read_s = body_read_s
        self._clock = clock

    def tenant(self, request: web.Request) -> str:
        """The tenant of the request's key. Raises Unauthenticated, and Overloaded for its connections."""
        record = request[RECORD]
        if (caller := request.get(CALLER)) is not None:  # the admin port has judged the credential
            record.tenant = caller.tenant or DEFAULT_TENANT
            record.key_name = caller.name if caller.tenant else ""  # a token has a name, too, and no tenant
            return record.tenant
        identity = self._keys.identify(request.headers, over_http=True)
        tenant = record.tenant = identity.tenant
        record.key_name = identity.name
        connection = request.protocol
        if self._keys.open or not isinstance(connection, HttpConnection) or connection.share is None:
            return tenant
        try:
            connection.share.claim(tenant)
        except errors.Overloaded:
            connection.close()  # after the answer
            raise
        return tenant

    def sees_all_tenants(self, request: web.Request) -> bool:
        """Whether the caller sees what belongs to other tenants, too. Raises Unauthenticated."""
        scope = self._keys.identify(request.headers, over_http=True).scope
        return self._keys.open or scope is KeyScope.OPERATOR

    def caller(self, request: web.Request, path: str) -> Caller:
        """The tenant and the options of the headers. `path`: the endpoint that is called."""
        headers = request.headers
        if (given := headers.get("x-request-id")) and not is_request_id(given):
            raise bounds.REQUEST_ID.refused("x-request-id")
        timeout = headers.get("x-request-timeout-ms")
        deadline_s = None
        if timeout is not None:
            deadline_s = self._clock() + bounds.TIMEOUT.parse(timeout) / 1e3
        tenant = self.tenant(request)
        key_sha256 = request[RECORD].key_sha256 = self._keys.hash_of(headers)
        return Caller(
            tenant=tenant,
            session=headers.get("x-session-affinity"),
            deadline_s=deadline_s,
            requested_prefill=headers.get("x-slipstream-prefill"),
            priority=headers.get("x-slipstream-priority", ""),
            reject_if_busy="?" in request.raw_path and _reject_if_busy(request.query.get("rejectIfBusy")),
            key_sha256=key_sha256,
            endpoint=path,
        )

    async def encoded_body(self, request: web.Request, tenant: str) -> EncodedBody:
        """The body with its encoding. Raises as `body`."""
        encoding = request.headers.get("Content-Encoding", "").lower()
        return EncodedBody(await self.body(request, tenant), encoding)

    async def body(self, request: web.Request, tenant: str) -> bytes:
        """The body, as it was sent. Raises InvalidArgument when it is too large or too slow."""
        try:
            if request.content.is_eof():  # most bodies arrive with the header, and need no time-out
                return await request.read()
            if (request.content_length or 0) > bounds.MAX_BODY_BYTES:
                raise bounds.body_too_large()
            async with self._received.receiving(tenant), asyncio.timeout(self._body_read_s):
                return await request.read()
        except web.HTTPRequestEntityTooLarge:
            raise bounds.body_too_large() from None
        except TimeoutError:
            raise bounds.BODY_TIME.refused() from None
        except web.RequestPayloadError as error:  # the body is not what its Content-Encoding says
            raise bounds.BODY_FORMAT.refused() from error


def _reject_if_busy(given: str | None) -> bool:
    """The query parameter, for clients that send every option as one."""
    if given not in (None, "true", "false"):
        raise bounds.TYPE.refused("rejectIfBusy", expected="true or false")
    return given == "true"
