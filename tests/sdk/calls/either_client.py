"""The fixture `client`: the blocking and the asynchronous client of one router, used in one way."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Iterator
from operator import attrgetter
from typing import Any

import pytest

from services.router.server import RouterServer
from slipstream import AsyncClient, Client
from tests.router.conftest import WAIT_S


class EitherClient:
    """A client of one of both kinds. A thread makes the calls of the blocking one."""

    def __init__(self, client: Client | AsyncClient) -> None:
        self._client = client

    async def __call__(self, method: str, *arguments: Any, **options: Any) -> Any:
        """The result of a method such as "files.get", and a list of what it yields."""
        async with asyncio.timeout(WAIT_S):
            if isinstance(self._client, Client):
                return await asyncio.to_thread(self._blocking, method, *arguments, **options)
            found = attrgetter(method)(self._client)(*arguments, **options)
            if inspect.isasyncgen(found):
                return [each async for each in found]
            return await found if inspect.isawaitable(found) else found

    async def close(self) -> None:
        """Close it, also where it is closed already."""
        closed = self._client.close()
        if closed is not None:
            await closed

    def _blocking(self, method: str, *arguments: Any, **options: Any) -> Any:
        found = attrgetter(method)(self._client)(*arguments, **options)
        return list(found) if isinstance(found, Iterator) else found


KINDS = pytest.mark.parametrize("kind", [Client, AsyncClient])


@pytest.fixture(params=[Client, AsyncClient])
async def client(request: pytest.FixtureRequest, router: RouterServer) -> AsyncIterator[EitherClient]:
    """Both kinds, one after the other."""
    opened = EitherClient(request.param(router.host.endpoint))
    yield opened
    await opened.close()
