"""Errors of the database, and what a fault of a driver means for a transaction."""

from __future__ import annotations

import enum

from slipstream.errors import DataCorrupt, Unavailable


class DatabaseUnavailable(Unavailable):
    """The database is lost, locked or too slow. Nothing was committed, unless `may_have_committed`."""

    def __init__(self, message: str, *, may_have_committed: bool = False) -> None:
        super().__init__(message)
        self.may_have_committed = may_have_committed


class DatabaseFull(Unavailable):
    """The disk of the database is full. Nothing was committed."""

    http_status = 507


class DatabaseDamaged(DataCorrupt):
    """The database's file is damaged, or is no database."""


class DatabaseFault(enum.Enum):
    """The meaning of a driver's exception."""

    BUSY = "locked by others"  # the transaction did not happen and may run again
    LOST = "connection lost"  # likewise, after a reconnect
    FULL = "disk full"
    DAMAGED = "damaged"
    MOVED = "its file was deleted or replaced; put it back, or restart this process"
    READ_ONLY = "its file is read-only"
    VALUE = "a text that the database does not take"
    DEFECT = "defect"  # a wrong statement, a violated constraint


def fault_error(fault: DatabaseFault, *, may_have_committed: bool = False) -> Unavailable | DataCorrupt:
    """The error of a fault that is not retried any more."""
    if fault is DatabaseFault.FULL:
        return DatabaseFull("the disk of the database is full")
    if fault is DatabaseFault.DAMAGED:
        return DatabaseDamaged("the database is damaged")
    if may_have_committed:
        return DatabaseUnavailable("the connection to the database broke", may_have_committed=True)
    return DatabaseUnavailable(f"the database does not answer: {fault.value}")
