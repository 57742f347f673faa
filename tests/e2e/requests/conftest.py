"""One cluster of the shipped model for all files that change nothing of it but by requests and kills."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.conftest import shipped_cluster
from tests.support.clusters.local_cluster import LocalCluster


@pytest.fixture(scope="package")
def cluster(request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
    with shipped_cluster(request) as running:
        yield running
