"""The clients of each tenant that follow jobs, or responses that jobs make."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

from libs.common import service_bounds
from slipstream.errors import Overloaded


class Followers:
    """Counts the clients at one API of a router."""

    def __init__(self, noun: str) -> None:
        """`noun`: what they follow, for errors."""
        self._noun = noun
        self._counts: Counter[str] = Counter()  # by tenant

    @contextlib.contextmanager
    def following(self, tenant: str) -> Iterator[None]:
        """Count a client. Raises Overloaded for too many of its tenant."""
        if self._counts[tenant] >= service_bounds.MAX_TENANT_JOB_FOLLOWERS:
            raise Overloaded(f"too many clients of this tenant follow {self._noun} at this router")
        self._counts[tenant] += 1
        try:
            yield
        finally:
            self._counts[tenant] -= 1
            self._counts += Counter()  # forgets tenants with none
