"""A router that runs jobs before fake workers, and what it takes."""

from __future__ import annotations

from tests.router.conftest import card, cluster, database, model, model_dir  # noqa: F401 - fixtures
from tests.router.support.router_with_jobs import router  # noqa: F401 - fixture
