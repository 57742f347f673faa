"""The token that opens the metrics of every process, for Prometheus: a bearer token that does not expire.

It derives from the cluster's secret, and opens nothing else.
"""

from __future__ import annotations

from slipstream.rpc.cluster_secret import ClusterSecret

SCRAPE_LABEL = "scrape-token"


def scrape_token(secret: ClusterSecret) -> str:
    """The token, as `Authorization: Bearer TOKEN` has it."""
    return secret.derive(SCRAPE_LABEL).hex()
