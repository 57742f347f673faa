"""A question about usage: which days, of which tenant, grouped by what. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from enum import StrEnum

from slipstream import bounds
from slipstream.errors import PermissionDenied

DEFAULT_DAYS = 30


class UsageColumn(StrEnum):
    """The columns by which rows may be grouped."""

    DAY = "day"
    TENANT = "tenant"
    KEY = "key"
    MODEL = "model"
    ENDPOINT = "endpoint"

    @property
    def column(self) -> str:
        """The column of the database."""
        return "key_name" if self is UsageColumn.KEY else self.value


@dataclass(frozen=True, slots=True)
class UsageQuery:
    """A question for usage. Both days count. `tenant` None: all tenants."""

    from_day: date
    to_day: date
    group_by: Sequence[UsageColumn]
    tenant: str | None


def parse_usage_query(
    *,
    from_day: str,
    to_day: str,
    group_by: Sequence[str],
    tenant: str,
    own_tenant: str,
    is_operator: bool,
    today: date,
) -> UsageQuery:
    """The question of a caller; empty texts are left out. Raises InvalidArgument, PermissionDenied.

    A tenant's key sees its own tenant. An operator's sees all, or the one that it names.
    """
    last = _day("to", to_day) if to_day else today
    first = _day("from", from_day) if from_day else last - timedelta(days=DEFAULT_DAYS - 1)
    if first > last:
        raise bounds.USAGE_DAYS.refused("from")
    groups: list[UsageColumn] = []
    for name in filter(None, group_by):
        if name not in list(UsageColumn) or name in groups:
            raise bounds.USAGE_GROUP.refused()
        groups.append(UsageColumn(name))
    if not is_operator and tenant not in ("", own_tenant):
        raise PermissionDenied("an API key of scope operator sees the usage of other tenants")
    asked: str | None = own_tenant
    if is_operator:
        asked = tenant or None
    return UsageQuery(first, last, tuple(groups), asked)


def _day(field: str, text: str) -> date:
    try:
        if len(text) != len("2027-01-31"):
            raise ValueError
        return date.fromisoformat(text)
    except ValueError:
        raise bounds.USAGE_DAY.refused(field) from None
