"""A router with a database before fake workers, and both clients of it."""

from __future__ import annotations

from tests.router.conftest import card, cluster, database, model, model_dir  # noqa: F401 - fixtures
from tests.router.support.router_with_jobs import router  # noqa: F401 - fixture
from tests.sdk.calls.either_client import client  # noqa: F401 - fixture
