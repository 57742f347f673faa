"""Batches in the database, each held by one router at a time while it is worked on."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import msgspec

from libs.common import batch_bounds
from libs.database.database import Database
from libs.database.transaction import SqlTransaction
from services.router.api.batches.file_store import check_room
from services.router.api.batches.records import (
    BATCH_PREFIX,
    NewBatch,
    RequestBatch,
    check_id,
    new_id,
    unknown,
)
from services.router.api.batches.schema import SCHEMA
from services.router.api.batches.states import ACTIVE, CANCELLABLE, FINAL, BatchState
from services.router.jobs.rows import marks
from slipstream import errors

# A router that died holds a batch for so long.
LEASE_S = 60.0
# A batch that is over is forgotten with its files.
BATCH_TTL_S = batch_bounds.FILE_TTL_S
# The batches of a tenant from the first beyond a number on, the newest first, but for those that go on.
_SURPLUS = (
    "DELETE FROM batches WHERE tenant = ? AND ended_unix_s IS NOT NULL AND id <= (SELECT id FROM batches"
    " WHERE tenant = ? ORDER BY id DESC LIMIT 1 OFFSET ?)"
)
_ACTIVE = ", ".join(f"'{state.value}'" for state in ACTIVE)


@dataclass(frozen=True, slots=True)
class HeldBatch:
    """A batch under the lease of this router."""

    batch: RequestBatch
    lease: str


class BatchStore:
    """Batches by tenant, and the leases of routers on them."""

    def __init__(self, database: Database, *, wall_clock_s: Callable[[], float]) -> None:
        self._database = database
        self.wall_clock_s = wall_clock_s
        database.declare(SCHEMA)

    # ---- for tenants

    async def create(self, tenant: str, new: NewBatch, *, key_sha256: bytes = b"") -> RequestBatch:
        """Store a batch to be validated. Raises Overloaded when the tenant has too many, or no room.

        The files that end it have no bound, so it begins only where they fit beside the tenant's others.
        Beyond a number of batches the tenant's oldest that are over are forgotten.
        """
        now_s = self.wall_clock_s()
        batch = RequestBatch(
            id=new_id(BATCH_PREFIX, now_s, os.urandom(10)),
            tenant=tenant,
            endpoint=new.endpoint,
            input_file=new.input_file,
            window=new.window,
            state=BatchState.VALIDATING,
            created_unix_s=now_s,
            expires_unix_s=now_s + batch_bounds.BATCH_WINDOW_S,
            metadata=new.metadata,
            output_ttl_s=new.output_ttl_s,
            key_sha256=key_sha256.hex(),
        )

        def insert(tx: SqlTransaction) -> None:
            ((n_active,),) = tx.execute(
                f"SELECT COUNT(*) FROM batches WHERE tenant = ? AND state IN ({_ACTIVE})", (tenant,)
            )
            if n_active >= batch_bounds.MAX_TENANT_BATCHES:
                raise errors.Overloaded(f"{n_active} batches are not over", retry_after_ms=30_000)
            check_room(tx, tenant)
            tx.execute(_SURPLUS, (tenant, tenant, batch_bounds.MAX_TENANT_STORED_BATCHES - 1))
            tx.execute(
                "INSERT INTO batches (id, tenant, state, input_file, record, lease, lease_until_unix_s)"
                " VALUES (?, ?, ?, ?, ?, '', 0) ON CONFLICT (id) DO NOTHING",
                (batch.id, tenant, batch.state.value, batch.input_file, _encode(batch)),
            )

        await self._database.run(insert, is_idempotent=True, tenant=tenant, adds_content=True)
        return batch

    async def get(self, tenant: str, batch_id: str) -> RequestBatch:
        """A batch. Raises NotFound, InvalidArgument."""
        check_id(batch_id, BATCH_PREFIX, "batch_id")
        rows = await self._database.read(
            lambda tx: tx.execute(
                "SELECT record FROM batches WHERE id = ? AND tenant = ?", (batch_id, tenant)
            ),
            tenant=tenant,
        )
        if not rows:
            raise unknown(batch_id, "batch_id")
        return decode_batch(rows[0][0])

    async def page(self, tenant: str, *, after: str, limit: int) -> Sequence[str]:
        """Records of batches, newest first, beginning after the one named, for `decode_batch`."""
        where, values = "tenant = ?", [tenant]
        if after:
            where += " AND id < ?"
            values.append(after)
        rows = await self._database.read(
            lambda tx: tx.execute(
                f"SELECT record FROM batches WHERE {where} ORDER BY id DESC LIMIT ?", (*values, limit)
            ),
            tenant=tenant,
        )
        return [row[0] for row in rows]

    async def cancel(self, tenant: str, batch_id: str) -> RequestBatch:
        """Ask for the end of a batch. Raises as `get`, and FailedPrecondition for one that is over."""
        check_id(batch_id, BATCH_PREFIX, "batch_id")
        now_s = self.wall_clock_s()

        def mark(tx: SqlTransaction) -> RequestBatch:
            rows = tx.execute(
                f"SELECT record FROM batches WHERE id = ? AND tenant = ? {tx.for_update}", (batch_id, tenant)
            )
            if not rows:
                raise unknown(batch_id, "batch_id")
            batch = decode_batch(rows[0][0])
            if batch.state in FINAL:
                raise errors.FailedPrecondition(f"the batch is {batch.state.value} already")
            if batch.state in CANCELLABLE:
                changes = {"state": BatchState.CANCELLING, "cancelling_unix_s": now_s}
                batch = msgspec.structs.replace(batch, **changes)
                # The lease ends: the runner that holds the batch finds that it lost it; another look begins.
                _write(tx, batch, ", lease = '', lease_until_unix_s = 0", "", ())
            return batch

        return await self._database.run(mark, is_idempotent=True, tenant=tenant)

    # ---- for the router that works on one

    async def hold(self, *, but: Collection[str] = ()) -> HeldBatch | None:
        """Take the oldest batch that is not over and that no router holds, of other tenants than these."""
        now_s, lease, tenants = self.wall_clock_s(), os.urandom(8).hex(), tuple(but)
        others = f" AND tenant NOT IN ({marks(tenants)})" if tenants else ""

        def acquire(tx: SqlTransaction) -> RequestBatch | None:
            rows = tx.execute(
                f"SELECT id FROM batches WHERE state IN ({_ACTIVE}) AND lease_until_unix_s <= ?"
                f"{others} ORDER BY lease_until_unix_s, id LIMIT 1 {tx.skip_locked}",
                (now_s, *tenants),
            )
            if not rows:
                return None
            taken = tx.execute(
                "UPDATE batches SET lease = ?, lease_until_unix_s = ? WHERE id = ? RETURNING record",
                (lease, now_s + LEASE_S, rows[0][0]),
            )
            return decode_batch(taken[0][0])

        batch = await self._database.run(acquire)
        return None if batch is None else HeldBatch(batch, lease)

    async def save(self, held: HeldBatch, *, rest_s: float | None = None) -> None:
        """Write a held batch and prolong the lease; or end it, with `rest_s` until another look.

        Raises FailedPrecondition where the lease was lost: nothing is written then.
        """
        await self._database.run(self.saving(held, rest_s=rest_s))

    def saving(self, held: HeldBatch, *, rest_s: float | None = None) -> Callable[[SqlTransaction], None]:
        """The statements of `save`, for a larger transaction. A repeated transaction runs them again."""
        now_s = self.wall_clock_s()
        until_s = now_s + (LEASE_S if rest_s is None else rest_s)
        lease = held.lease if rest_s is None else ""

        def update(tx: SqlTransaction) -> None:
            changes = ", lease = ?, lease_until_unix_s = ?"
            if not _write(tx, held.batch, changes, " AND lease = ?", (lease, until_s), (held.lease,)):
                raise errors.FailedPrecondition("another router holds the batch")

        return update

    async def sweep(self) -> None:
        """Forget batches that ended long ago."""
        until_s = self.wall_clock_s() - BATCH_TTL_S
        await self._database.run(
            lambda tx: tx.execute("DELETE FROM batches WHERE ended_unix_s <= ?", (until_s,)),
            is_idempotent=True,
        )


def _write(
    tx: SqlTransaction,
    batch: RequestBatch,
    changes: str,
    where: str,
    values: Sequence[str | float],
    conditions: Sequence[str] = (),
) -> bool:
    """Update a batch's row; whether there was one that fits."""
    rows = tx.execute(
        f"UPDATE batches SET state = ?, record = ?, ended_unix_s = ?{changes} WHERE id = ?{where}"
        " RETURNING id",
        (batch.state.value, _encode(batch), batch.ended_unix_s, *values, batch.id, *conditions),
    )
    return bool(rows)


def _encode(batch: RequestBatch) -> str:
    return msgspec.json.encode(batch).decode()


def decode_batch(record: str) -> RequestBatch:
    """The batch of a row. In a state of a later version it is in progress, or failed once it has ended."""
    batch = msgspec.json.decode(record, type=RequestBatch)
    if batch.state is BatchState.IN_PROGRESS and batch.ended_unix_s is not None:
        return msgspec.structs.replace(batch, state=BatchState.FAILED)
    return batch
