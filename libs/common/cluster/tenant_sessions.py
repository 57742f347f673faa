"""The names of known sessions by tenant: those of one are found without a look at the others. Pure."""

from __future__ import annotations

from libs.common.cluster.placement_record import SessionId


class TenantSessions:
    """A set of sessions for each tenant that has one."""

    def __init__(self) -> None:
        self._sessions: dict[str, set[SessionId]] = {}

    def add(self, session: SessionId) -> None:
        """Add a session. Idempotent."""
        self._sessions.setdefault(session.tenant, set()).add(session)

    def discard(self, session: SessionId) -> None:
        """Remove a session. Idempotent."""
        sessions = self._sessions.get(session.tenant)
        if sessions is None:
            return
        sessions.discard(session)
        if not sessions:
            del self._sessions[session.tenant]

    def count(self, tenant: str) -> int:
        """The number of the tenant's sessions."""
        return len(self._sessions.get(tenant, ()))

    def of(self, tenant: str) -> list[SessionId]:
        """The tenant's sessions, in no particular order."""
        return list(self._sessions.get(tenant, ()))

    def tenants(self) -> list[str]:
        """The tenants that have sessions."""
        return list(self._sessions)
