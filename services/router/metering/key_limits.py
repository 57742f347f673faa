"""Whether a router can hold the limits of a file of API keys. Pure."""

from __future__ import annotations

from slipstream.credentials.api_key_file import KeyFile


def check_limits(file: KeyFile, *, has_prices: bool, has_database: bool) -> None:
    """Raises ValueError for limits that the flags of this router do not allow to hold."""
    limits = [*(key.limits for key in file.keys), *file.tenants.values()]
    if any(each.limits_spend for each in limits) and not (has_prices and has_database):
        raise ValueError("limits of spend need a router's --prices and --database")
