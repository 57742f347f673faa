"""API keys of tests."""

from __future__ import annotations

from collections.abc import Mapping

from services.router.api.api_keys import ApiKeys
from slipstream.credentials.api_key_file import KeyRecord, KeyScope, key_hash


def tenant_keys(tenants: Mapping[str, str]) -> ApiKeys:
    """Keys with these tenants; each key is named after itself."""
    return ApiKeys(KeyRecord(key, tenant, KeyScope.TENANT, key_hash(key)) for key, tenant in tenants.items())
