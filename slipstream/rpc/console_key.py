"""The key of the console, made of the cluster's secret: a bearer token that a browser can send.

It makes its bearer an operator on the console of every router, and opens nothing else.
"""

from __future__ import annotations

from slipstream.rpc.cluster_secret import ClusterSecret

CONSOLE_LABEL = "console-key"


def console_key(secret: ClusterSecret) -> str:
    """The key, as `Authorization: Bearer KEY` has it."""
    return secret.derive(CONSOLE_LABEL).hex()
