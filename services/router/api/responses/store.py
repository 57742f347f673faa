"""Stored responses: what a client may read again, continue or refer to, by tenant.

A response is stored with all items before it, so that neither the deletion nor the end of the life time of an
earlier one ends a conversation.
"""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from libs.common import api_bounds
from libs.database.database import Database
from libs.database.schema import Schema
from libs.database.transaction import SqlTransaction
from services.router.api.json_body import Json
from services.router.api.responses.request import EarlierItems, ResponseDraft
from slipstream import errors
from slipstream.bound import shown

MAX_RESPONSES = 10_000
MAX_BYTES = 1 << 30
_SWEEP_EVERY = 16  # responses

_SCHEMA = Schema(
    "stored_responses",
    (
        (
            "CREATE TABLE IF NOT EXISTS stored_responses (tenant TEXT NOT NULL, id TEXT NOT NULL,"
            " created_unix_s DOUBLE PRECISION NOT NULL, expires_unix_s DOUBLE PRECISION NOT NULL,"
            " n_bytes BIGINT NOT NULL, body BLOB NOT NULL, items BLOB NOT NULL, earlier BLOB NOT NULL,"
            " PRIMARY KEY (tenant, id))",
            "CREATE INDEX IF NOT EXISTS stored_responses_age"
            " ON stored_responses (tenant, created_unix_s, n_bytes)",
            "CREATE INDEX IF NOT EXISTS stored_responses_expiry ON stored_responses (expires_unix_s)",
        ),
    ),
)
_INSERT = (
    "INSERT INTO stored_responses (tenant, id, created_unix_s, expires_unix_s, n_bytes, body, items, earlier)"
    " VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (tenant, id) DO NOTHING"
)
# The oldest responses of a tenant, from the first one that exceeds a bound.
_SURPLUS = (
    "DELETE FROM stored_responses WHERE tenant = ? AND id IN (SELECT id FROM (SELECT id,"
    " ROW_NUMBER() OVER newest AS place, SUM(n_bytes) OVER newest AS total"
    " FROM stored_responses WHERE tenant = ?"
    " WINDOW newest AS (ORDER BY created_unix_s DESC, id)) AS ages WHERE place > ? OR total > ?)"
)


class StoredResponse(msgspec.Struct, frozen=True):
    """A response, the items of its input, and those of the conversation before."""

    body: Json
    items: Sequence[Json]
    earlier: Sequence[Json] = ()

    @property
    def conversation(self) -> Sequence[Json]:
        """All items up to the end of the response."""
        return [*self.earlier, *self.items, *self.body["output"]]


class ResponseStore:
    """The responses of all tenants. Beyond a bound, a tenant's oldest ones go."""

    def __init__(
        self,
        database: Database,
        *,
        wall_clock_s: Callable[[], float],
        ttl_s: float = api_bounds.RESPONSE_TTL_S,
        max_responses: int = MAX_RESPONSES,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        """The bounds are those of one tenant."""
        self._database = database
        self._wall_clock_s = wall_clock_s
        self._ttl_s = ttl_s
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._n_saved = 0
        database.declare(_SCHEMA)

    async def save(self, tenant: str, response: StoredResponse) -> None:
        """Store a response. Returns when it is durable."""
        blobs = await asyncio.to_thread(_packed, response)
        n_bytes, now_s = sum(map(len, blobs)), self._wall_clock_s()
        row = (tenant, response.body["id"], now_s, now_s + self._ttl_s, n_bytes, *blobs)
        sweeps = self._n_saved % _SWEEP_EVERY == 0
        self._n_saved += 1

        def insert(tx: SqlTransaction) -> None:
            tx.execute(_INSERT, row)
            if sweeps:
                tx.execute("DELETE FROM stored_responses WHERE expires_unix_s <= ?", (now_s,))
                tx.execute(_SURPLUS, (tenant, tenant, self._max_responses, self._max_bytes))

        await self._database.run(insert, is_idempotent=True)

    async def find(self, tenant: str, response_id: str) -> StoredResponse:
        """The tenant's response with this id. Raises NotFound."""
        return await self._find(tenant, response_id, field="response_id")

    async def delete(self, tenant: str, response_id: str) -> None:
        """Delete a response. Raises NotFound."""
        now_s = self._wall_clock_s()
        sql = "DELETE FROM stored_responses WHERE tenant = ? AND id = ? AND expires_unix_s > ? RETURNING id"
        deleted = await self._database.run(lambda tx: tx.execute(sql, (tenant, response_id, now_s)))
        if not deleted:
            raise _not_found(response_id, "response_id")

    async def earlier_items(self, tenant: str, draft: ResponseDraft) -> EarlierItems:
        """The items that a body refers to. Raises NotFound naming the first id that is unknown."""
        items: Sequence[Json] = ()
        if draft.previous_id is not None:
            previous = await self._find(tenant, draft.previous_id, field="previous_response_id")
            items = previous.conversation
        wanted = {item_id: response_of(item_id) for item_id in draft.references}
        api_bounds.REFERENCES.check(len(set(wanted.values())))
        found: dict[str, Json] = {}
        for response_id in set(wanted.values()):
            try:
                response = await self._find(tenant, response_id, field="input")
            except errors.NotFound:
                continue
            found |= {item["id"]: item for item in response.conversation if "id" in item}
        for item_id in wanted:
            if item_id not in found:
                raise errors.NotFound(f"item {shown(item_id)} is not stored here", field="input")
        return EarlierItems(items, found)

    async def _find(self, tenant: str, response_id: str, *, field: str) -> StoredResponse:
        now_s = self._wall_clock_s()
        sql = (
            "SELECT body, items, earlier FROM stored_responses"
            " WHERE tenant = ? AND id = ? AND expires_unix_s > ?"
        )
        rows = await self._database.read(lambda tx: tx.execute(sql, (tenant, response_id, now_s)))
        if not rows:
            raise _not_found(response_id, field)
        return await asyncio.to_thread(_unpacked, rows[0])


def response_of(item_id: str) -> str:
    """The id of the response that made an item, which is part of the item's id."""
    key = item_id.partition("_")[2].rpartition("_")[0]
    return f"resp_{key}"


def _packed(response: StoredResponse) -> list[bytes]:
    parts: list[Any] = [response.body, response.items, response.earlier]
    return [zlib.compress(json.dumps(part, ensure_ascii=False).encode(), 1) for part in parts]


def _unpacked(row: Sequence[Any]) -> StoredResponse:
    return StoredResponse(*[json.loads(zlib.decompress(bytes(blob))) for blob in row])


def _not_found(response_id: str, field: str) -> errors.NotFound:
    return errors.NotFound(f"response {shown(response_id)} is not stored here", field=field)
