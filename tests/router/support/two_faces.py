"""A router with a database and the keys of two tenants, called over gRPC and over HTTP."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest

from libs.database.database import Database, open_database
from services.router.request.model_card import ModelCard
from services.router.server import RouterServer
from slipstream import errors
from slipstream.rpc.dial import dial
from slipstream.rpc.rpc_errors import from_rpc_error
from tests.router.conftest import open_router
from tests.router.support.fake_cluster import FakeCluster
from tests.support.api_keys import tenant_keys

KEYS = {"alice": "key-a", "bob": "key-b"}


class TwoFaces:
    """Both APIs of one router. Calls are alice's unless they name another tenant."""

    def __init__(
        self, router: RouterServer, database: Database, channel: grpc.aio.Channel, http: aiohttp.ClientSession
    ) -> None:
        self.router = router
        self.database = database
        self.channel = channel
        self._http = http

    async def ask(
        self, method: str, path: str, *, tenant: str = "alice", status: int = 200, **options: Any
    ) -> Any:
        """Call the HTTP API, and return the JSON of the answer, or the content of a file."""
        headers = {"x-api-key": KEYS[tenant]}
        async with self._http.request(method, path, headers=headers, **options) as answer:
            assert answer.status == status, await answer.text()
            data = await answer.read()
        return data if path.endswith("/content") and status == 200 else json.loads(data)

    def revoke_all(self) -> None:
        """Let no key count any more."""
        self.router._options.keys.replace([], {})


def key_of(tenant: str = "alice") -> list[tuple[str, str]]:
    """The metadata of a tenant's calls."""
    return [("authorization", f"Bearer {KEYS[tenant]}")]


async def refusal(call: Any) -> errors.SlipstreamError:
    """The typed error of a call that is refused."""
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call
    return from_rpc_error(refused.value)


@asynccontextmanager
async def two_faces(cluster: FakeCluster, card: ModelCard, folder: Path) -> AsyncIterator[TwoFaces]:
    """Open the router, with its database in the folder."""
    database = open_database(f"sqlite:{folder}/faces.db")
    keys = tenant_keys({key: tenant for tenant, key in KEYS.items()})
    async with (
        open_router(cluster, card, database=database, keys=keys) as router,
        dial(router.host.endpoint) as channel,
        aiohttp.ClientSession(f"http://{router.http_endpoint}") as http,
    ):
        yield TwoFaces(router, database, channel, http)
    await database.close()
