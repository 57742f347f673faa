"""The caller of a method: the tenant of its credential, and the options of its metadata."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import grpc

from libs.common.rpc.access import current_caller
from libs.common.rpc.serve import metadata_of
from services.router.api.api_keys import DEFAULT_TENANT, ApiKeys
from services.router.request.types import Caller
from slipstream.rpc.caller_class import CallerClass

Context = grpc.aio.ServicerContext[Any, Any]


class Callers:
    """Reads the metadata of calls."""

    def __init__(self, keys: ApiKeys, clock: Callable[[], float]) -> None:
        self._keys = keys
        self._clock = clock

    def tenant(self, context: Context) -> str:
        """The key's tenant; an operator without a key acts for the default tenant."""
        return self._tenant_of(metadata_of(context))

    def key_sha256(self, context: Context) -> bytes:
        """The hash of the call's API key; empty without one."""
        return self._keys.hash_of(metadata_of(context))

    def key_name(self, context: Context) -> str:
        """The name of the call's API key; empty without one."""
        return self._keys.key_name(self.key_sha256(context))

    def key_name_of(self, caller: Caller) -> str:
        """The name of the caller's API key; empty without one."""
        return self._keys.key_name(caller.key_sha256)

    def check_key(self, context: Context) -> None:
        """Raise Unauthenticated where the call's API key counts no more: the call began with it."""
        metadata = metadata_of(context)
        if self._keys.has_key(metadata):
            self._keys.tenant_of(metadata)

    def caller(self, metadata: Mapping[str, str], context: Context, *, endpoint: str) -> Caller:
        """The tenant, deadline, session and stated placement of a call."""
        left_s = context.time_remaining()
        return Caller(
            tenant=self._tenant_of(metadata),
            session=_session(metadata),
            deadline_s=None if left_s is None else self._clock() + left_s,
            requested_prefill=metadata.get("x-slipstream-prefill"),
            attempt=_attempt(metadata.get("x-slipstream-attempt", "")),
            priority=metadata.get("x-slipstream-priority", ""),
            key_sha256=self._keys.hash_of(metadata),
            endpoint=endpoint,
        )

    def sees_all_tenants(self) -> bool:
        """Whether the caller sees what belongs to other tenants, too."""
        return self._keys.open or is_operator()

    def _tenant_of(self, metadata: Mapping[str, str]) -> str:
        tenant = current_caller().tenant
        if tenant:
            return tenant
        return self._keys.tenant_of(metadata) if self._keys.has_key(metadata) else DEFAULT_TENANT


def is_operator() -> bool:
    """Whether the call has an operator's credential."""
    return current_caller().kind is CallerClass.OPERATOR


def _session(metadata: Mapping[str, str]) -> str | None:
    """Metadata is ASCII, but for what ends in -bin: bytes, which `metadata_of` gives one by one."""
    raw = metadata.get("x-session-affinity-bin")
    if raw is None:
        return metadata.get("x-session-affinity")
    return raw.encode("latin-1").decode("utf-8", "surrogateescape")


def _attempt(text: str) -> int:
    """A number of up to four digits; 0 for any other text."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 4 else 0
