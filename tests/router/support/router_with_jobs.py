"""The fixture `router` with a database, without which there are no jobs."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from libs.database.database import Database
from services.router.request.model_card import ModelCard
from services.router.server import RouterServer
from tests.router.conftest import open_router
from tests.router.support.fake_cluster import FakeCluster


@pytest.fixture
async def router(cluster: FakeCluster, card: ModelCard, database: Database) -> AsyncIterator[RouterServer]:
    async with open_router(cluster, card, database=database) as server:
        yield server
