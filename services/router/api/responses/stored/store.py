"""Stored responses: what a client may read again, continue or refer to, by tenant.

A response is stored with all items before it, so that neither the deletion nor the end of the life time of an
earlier one ends a conversation.
"""

from __future__ import annotations

import random
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial

import msgspec

from libs.common import api_bounds
from libs.database.database import Database
from libs.database.schema import Schema
from libs.database.transaction import SqlTransaction
from services.router.admission.fair_threads import RunPiece, run_on_a_thread
from services.router.admission.tenant_shares import TenantSlots
from services.router.api.answers.long_json import json_pieces
from services.router.api.json_body import Json
from services.router.api.responses.request import EarlierItems, ResponseDraft
from services.router.api.responses.stored.items import read_item
from services.router.request.json_limits import check_structure
from slipstream import errors
from slipstream.bound import shown

# A tenant that saves beside others could keep to the saves that sweep nothing, if they were counted.
_SWEEP_SHARE = 1 / 16

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
        (
            # With all that a sweep reads: without the id it would read the rows, which are large.
            "DROP INDEX IF EXISTS stored_responses_age",
            "CREATE INDEX IF NOT EXISTS stored_responses_sweep"
            " ON stored_responses (tenant, created_unix_s, n_bytes, id)",
        ),
    ),
)
_INSERT = (
    "INSERT INTO stored_responses (tenant, id, created_unix_s, expires_unix_s, n_bytes, body, items, earlier)"
    " VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (tenant, id) DO NOTHING"
)
# A part of what has expired, which no reader finds: a transaction is short, others wait for it.
_SWEPT_RESPONSES = 64
_EXPIRED = (
    "DELETE FROM stored_responses WHERE (tenant, id) IN (SELECT tenant, id FROM stored_responses"
    " WHERE expires_unix_s <= ? ORDER BY expires_unix_s LIMIT ?)"
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


class ResponseStore:
    """The responses of all tenants. Beyond a bound, a tenant's oldest ones go."""

    def __init__(
        self,
        database: Database,
        *,
        wall_clock_s: Callable[[], float],
        ttl_s: float = api_bounds.RESPONSE_TTL_S,
        max_responses: int = api_bounds.MAX_TENANT_RESPONSES,
        max_bytes: int = api_bounds.MAX_TENANT_RESPONSE_BYTES,
        chance: Callable[[], float] = random.random,
        run_piece: RunPiece = run_on_a_thread,
    ) -> None:
        """The bounds are those of one tenant. `chance`: whether a response that is saved sweeps.

        `run_piece` packs and unpacks. Each takes the interpreter for up to 40 ms: few may run together.
        """
        self._database = database
        self._wall_clock_s = wall_clock_s
        self._ttl_s = ttl_s
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._chance = chance
        self._run_piece = run_piece
        wait_s = api_bounds.RESPONSE_CALL_WAIT_S
        self._slots = TenantSlots(api_bounds.MAX_TENANT_RESPONSE_CALLS, wait_s=wait_s)
        self._reads = TenantSlots(api_bounds.MAX_CONVERSATIONS_READ, wait_s=wait_s)  # of all tenants as one
        database.declare(_SCHEMA)

    async def save(self, tenant: str, response: StoredResponse) -> None:
        """Store a response. Returns when it is durable."""
        async with self.slot(tenant):
            insert = await self.insertion(tenant, response)
            await self._database.run(insert, is_idempotent=True, tenant=tenant, adds_content=True)

    def slot(self, tenant: str) -> AbstractAsyncContextManager[None]:
        """Read or write inside. A tenant with many responses delays others by a few of them."""
        return self._slots.slot(tenant)

    async def insertion(self, tenant: str, response: StoredResponse) -> Callable[[SqlTransaction], None]:
        """A function that stores a response in a transaction. Raises InvalidArgument for a long response."""
        blobs = await self._run_piece(tenant, partial(_packed, response))
        n_bytes, now_s = sum(map(len, blobs)), self._wall_clock_s()
        row = (tenant, response.body["id"], now_s, now_s + self._ttl_s, n_bytes, *blobs)

        def insert(tx: SqlTransaction) -> None:
            tx.execute(_INSERT, row)
            # Drawn again where the transaction runs again: a sweep that takes too long must not keep a job.
            if self._chance() < _SWEEP_SHARE:
                tx.execute(_EXPIRED, (now_s, _SWEPT_RESPONSES))
                tx.execute(_SURPLUS, (tenant, tenant, self._max_responses, self._max_bytes))

        return insert

    async def find_body(self, tenant: str, response_id: str) -> bytes:
        """The tenant's response with this id, as JSON. Raises NotFound."""
        async with self.slot(tenant):
            (body,) = await self._find(tenant, response_id, ("body",), field="response_id")
            return await self._run_piece(tenant, partial(_inflated, body))

    async def find_items(self, tenant: str, response_id: str) -> Sequence[Json]:
        """The input items of a response. Raises NotFound."""
        async with self.slot(tenant):
            (items,) = await self._find(tenant, response_id, ("items",), field="response_id")
            return await self._run_piece(tenant, partial(_items_of, items))

    async def delete(self, tenant: str, response_id: str) -> None:
        """Delete a response. Raises NotFound."""
        now_s = self._wall_clock_s()
        sql = "DELETE FROM stored_responses WHERE tenant = ? AND id = ? AND expires_unix_s > ? RETURNING id"
        async with self.slot(tenant):
            values = (tenant, response_id, now_s)
            deleted = await self._database.run(lambda tx: tx.execute(sql, values), tenant=tenant)
        if not deleted:
            raise _not_found(response_id, "response_id")

    async def earlier_items(self, tenant: str, draft: ResponseDraft) -> EarlierItems:
        """The items that a body refers to. Raises NotFound naming the first id that is unknown."""
        previous, field = _StoredConversation(), "previous_response_id"
        if draft.previous_id is not None:
            previous = await self._conversation(tenant, draft.previous_id, field=field)
        wanted = Counter(draft.references)
        responses = {response_of(item_id) for item_id in wanted}
        api_bounds.REFERENCES.check(len(responses))
        found: dict[str, Json] = {}
        n_bytes, n_read_bytes = previous.n_bytes, previous.n_read_bytes
        for response_id in responses:
            try:
                conversation = await self._conversation(tenant, response_id, field="input")
            except errors.NotFound:
                continue
            n_read_bytes += conversation.n_read_bytes
            api_bounds.REFERRED.check(n_read_bytes)
            for item in conversation.items:
                item_id = item.get("id")
                if isinstance(item_id, str) and item_id in wanted and item_id not in found:
                    found[item_id] = item
                    n_bytes += wanted[item_id] * len(msgspec.json.encode(item))
                    api_bounds.CONVERSATION.check(n_bytes, "input")
        for item_id in wanted:
            if item_id not in found:
                raise errors.NotFound(f"item {shown(item_id)} is not stored here", field="input")
        return EarlierItems(previous.items, found, n_bytes, n_read_bytes)

    async def _conversation(self, tenant: str, response_id: str, *, field: str) -> _StoredConversation:
        """All items up to the end of a response. Raises NotFound, and InvalidArgument for too many."""
        async with self.slot(tenant), self._reads.slot(""):
            blobs = await self._find(tenant, response_id, ("earlier", "items", "body"), field=field)
            return await self._run_piece(tenant, partial(_conversation_of, blobs, field))

    async def _find(
        self, tenant: str, response_id: str, columns: Sequence[str], *, field: str
    ) -> Sequence[bytes]:
        now_s = self._wall_clock_s()
        sql = (
            f"SELECT {', '.join(columns)} FROM stored_responses"
            " WHERE tenant = ? AND id = ? AND expires_unix_s > ?"
        )
        values = (tenant, response_id, now_s)
        rows = await self._database.read(lambda tx: tx.execute(sql, values), tenant=tenant)
        if not rows:
            raise _not_found(response_id, field)
        return [bytes(value) for value in rows[0]]


class _StoredConversation(msgspec.Struct, frozen=True):
    """Items, how long their JSON is, and that of all that was read for them."""

    items: Sequence[Json] = ()
    n_bytes: int = 0
    n_read_bytes: int = 0


def response_of(item_id: str) -> str:
    """The id of the response that made an item, which is part of the item's id."""
    key = item_id.partition("_")[2].rpartition("_")[0]
    return f"resp_{key}"


def _packed(response: StoredResponse) -> list[bytes]:
    """The columns. Raises InvalidArgument for one that `_inflated` would not take."""
    blobs = []
    for part in (response.body, response.items, response.earlier):
        packer, packed, n_bytes = zlib.compressobj(1), list[bytes](), 0
        for piece in json_pieces(part):
            packed.append(packer.compress(piece))
            n_bytes += len(piece)
        api_bounds.STORED.check(n_bytes)
        blobs.append(b"".join([*packed, packer.flush()]))
    return blobs


def _inflated(blob: bytes) -> bytes:
    """The JSON of a column. Raises DataCorrupt for more than what is ever stored."""
    data = zlib.decompressobj().decompress(blob, api_bounds.STORED.high + 1)
    if len(data) > api_bounds.STORED.high:
        raise errors.DataCorrupt("a stored response is too large")
    return data


def _items_of(blob: bytes) -> Sequence[Json]:
    items: Sequence[Json] = msgspec.json.decode(_inflated(blob))
    return items


def _conversation_of(blobs: Sequence[bytes], field: str) -> _StoredConversation:
    """Unpack what a body continues. It costs as much as if the body had it, and grows, so it is bounded here.

    A part is decoded only once it is known to be short.
    """
    n_bytes, items = 0, list[Json]()
    for blob in blobs[:2]:
        data = _inflated(blob)
        n_bytes += len(data)
        api_bounds.CONVERSATION.check(n_bytes, field)
        check_structure([(field, data)])
        items += msgspec.json.decode(data)
    body = _inflated(blobs[2])
    n_read_bytes = n_bytes + len(body)
    output = [_without_logprobs(item) for item in msgspec.json.decode(body, type=_StoredOutput).output]
    n_bytes += len(msgspec.json.encode(output))
    api_bounds.CONVERSATION.check(n_bytes, field)
    return _StoredConversation([*items, *output], n_bytes, n_read_bytes)


class _StoredOutput(msgspec.Struct):
    """The part of a stored response that a conversation goes on with."""

    output: list[dict[str, msgspec.Raw]]


def _without_logprobs(item: Mapping[str, msgspec.Raw]) -> Json:
    """An item of an answer without what no prompt has."""
    read = read_item(item)
    if read.get("type") == "message":
        for part in read.get("content", ()):
            part.pop("logprobs", None)
    return read


def _not_found(response_id: str, field: str) -> errors.NotFound:
    return errors.NotFound(f"response {shown(response_id)} is not stored here", field=field)
