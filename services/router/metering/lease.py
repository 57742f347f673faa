"""How routers share one limit: each holds a lease of a part of it, and uses that without asking. Pure.

The database has the lease of each router. A router renews its leases in the background: it asks for what it
expects to use, and gets at most what the others leave. Until its next renewal it may use `overdraft` more, so
that a request does not wait. So all routers together use at most the limit and, for each router, one
overdraft. The overdrafts together are a quarter of the limit, or one unit for each router where that is more.
"""

from __future__ import annotations

from dataclasses import dataclass


def overdraft(limit: int, n_routers: int) -> int:
    """The amount that a router may use beyond its lease. One router alone shares with no other."""
    return limit if n_routers <= 1 else max(1, limit // (4 * n_routers))


def wanted(limit: int, *, used: int, recent: int, others: int, n_routers: int) -> int:
    """The amount that a router asks for: its past and expected use, and never all that is free.

    `recent`: what requests asked for since the last renewal. `others`: what the others hold. A router that is
    alone or idle holds nothing in advance: the overdraft is enough for its next requests.
    """
    if n_routers <= 1 or not recent:
        return used
    free = max(0, limit - others - used)
    return used + min(free, max(2 * recent, free // (2 * n_routers)))


def granted_of(limit: int, *, used: int, asked: int, held: int, others: int) -> int:
    """The amount for a router that holds `held`: what it has used, and more only of what the others leave."""
    return max(used, min(asked, max(held, limit - others)))


@dataclass(slots=True)
class Lease:
    """One router's lease of one limit in one window. `used` may exceed `granted` by the overdraft."""

    limit: int
    n_routers: int = 1
    granted: int = 0
    used: int = 0
    recent: int = 0
    others_granted: int = 0
    others_used: int = 0
    is_changed: bool = False  # since the last renewal
    renewed_unix_s: float = 0.0

    @property
    def free(self) -> int:
        """The amount that no router held at the last renewal."""
        return max(0, self.limit - self.others_granted - self.granted)

    @property
    def room(self) -> int:
        """The amount that may be used now, within what the others leave: a lease may record an overdraft."""
        held = self.granted + min(self.free, overdraft(self.limit, self.n_routers))
        return min(held, max(0, self.limit - self.others_granted)) - self.used

    @property
    def remaining(self) -> int:
        """The amount that all routers together have left, as far as this one knows."""
        return max(0, self.limit - self.others_used - self.used)

    @property
    def is_low(self) -> bool:
        """Whether a renewal would help soon."""
        return self.free > 0 and self.granted - self.used < max(1, self.recent)

    def ask(self, amount: int) -> None:
        """Note that a request wants this much, whether it gets it or not."""
        self.recent += amount
        self.is_changed = True

    def use(self, amount: int) -> None:
        """Use this much; a negative amount gives some back."""
        self.used = max(0, self.used + amount)
        self.is_changed = True

    def begin_renewal(self) -> tuple[int, int]:
        """The amounts to report as used and to ask for. The lease gives up what it does not ask for."""
        asked = wanted(
            self.limit,
            used=self.used,
            recent=self.recent,
            others=self.others_granted,
            n_routers=self.n_routers,
        )
        self.granted = min(self.granted, asked)
        self.is_changed = asked > self.used  # if no request comes, the next renewal gives this back
        self.recent = 0
        return self.used, asked

    def renew(self, granted: int, *, others_granted: int, others_used: int, now_unix_s: float) -> None:
        """Take over the outcome of a renewal."""
        self.granted = granted
        self.others_granted, self.others_used = others_granted, others_used
        self.renewed_unix_s = now_unix_s

    def reduce(self, held: int) -> None:
        """Hold at most this much: the lease was not renewed in time, and others may hold its share."""
        self.granted = min(self.granted, held)
