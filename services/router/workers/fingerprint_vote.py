"""Which fingerprint a router serves, where its workers have several. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from libs.common.cluster.worker_record import Role
from services.router.workers.connection import WorkerConnection
from slipstream.v1 import common_pb2


def most_shared(links: Iterable[WorkerConnection]) -> common_pb2.Fingerprint | None:
    """See `RouterFleet.fingerprint`."""
    found: dict[bytes, common_pb2.Fingerprint] = {}
    votes: dict[Role, Counter[bytes]] = {Role.DECODE: Counter(), Role.PREFILL: Counter()}
    for link in links:
        if link.ready and link.fingerprint is not None and link.worker.role in votes:
            found[link.fingerprint.digest] = link.fingerprint
            votes[link.worker.role][link.fingerprint.digest] += 1
    decode, prefill = votes.values()
    # A group without a decode worker can serve nothing.
    chosen = max(decode, key=lambda digest: (decode[digest], prefill[digest], digest), default=None)
    return None if chosen is None else found[chosen]
