"""Sends the webhooks of ended jobs: at least once, signed, to allowed addresses only."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from libs.common.job_bounds import TENANT_WEBHOOKS_TO_HOST, WEBHOOKS_AT_ONCE
from libs.common.service_bounds import WEBHOOK_LIFE_S, WEBHOOK_S
from libs.common.telemetry.counters import Counters
from libs.database.database import Database
from libs.database.transaction import SqlTransaction
from services.router.jobs.decisions import Receiver, share_deliveries
from services.router.jobs.schema import JOB_SCHEMA
from services.router.jobs.types import DeliveryOutcome
from services.router.jobs.webhooks.client import WebhookUnanswered, post_webhook
from services.router.jobs.webhooks.message import webhook_headers, webhook_retry_s
from services.router.jobs.webhooks.policy import WebhookHosts
from services.router.jobs.webhooks.resolver import AllowedResolver
from slipstream.errors import SlipstreamError

log = logging.getLogger(__name__)

_TICK_S = 1.0
_LEASE_S = 4 * WEBHOOK_S  # of a message that one router sends
_GONE = 410
# Each receiver whose first message is due: a few looks into the index a receiver, however many wait there.
DUE_RECEIVERS = """WITH RECURSIVE tenants(tenant) AS (
  SELECT MIN(tenant) FROM job_notices
  UNION ALL
  SELECT (SELECT MIN(n.tenant) FROM job_notices AS n WHERE n.tenant > tenants.tenant)
  FROM tenants WHERE tenants.tenant IS NOT NULL
), receivers(tenant, host) AS (
  SELECT tenants.tenant, (SELECT MIN(n.host) FROM job_notices AS n WHERE n.tenant = tenants.tenant)
  FROM tenants WHERE tenants.tenant IS NOT NULL
  UNION ALL
  SELECT receivers.tenant,
    (SELECT MIN(n.host) FROM job_notices AS n WHERE n.tenant = receivers.tenant AND n.host > receivers.host)
  FROM receivers WHERE receivers.host IS NOT NULL
) SELECT tenant, host FROM receivers WHERE host IS NOT NULL AND
  (SELECT MIN(n.not_before_unix_s) FROM job_notices AS n
   WHERE n.tenant = receivers.tenant AND n.host = receivers.host) <= ?"""


@dataclass(frozen=True, slots=True)
class _DueMessage:
    id: str
    url: str
    secret: str
    body: bytes
    tries: int
    made_unix_s: float
    receiver: Receiver


class WebhookSender:
    """Takes messages from the database, as one of several routers."""

    def __init__(
        self,
        database: Database,
        hosts: WebhookHosts,
        *,
        wall_clock_s: Callable[[], float],
        counters: Counters,
        tick_s: float = _TICK_S,
    ) -> None:
        database.declare(JOB_SCHEMA)
        self._database = database
        self._hosts = hosts
        self._resolver = AllowedResolver(hosts)
        self._now_s = wall_clock_s
        self._counters = counters
        self._tick_s = tick_s
        self._task: asyncio.Task[None] | None = None
        self._sending: dict[asyncio.Task[None], Receiver] = {}

    def start(self) -> None:
        """Begin to send, where any host is allowed."""
        if self._hosts.networks:
            self._task = asyncio.create_task(self._run(), name="webhooks")

    async def close(self) -> None:
        """Stop. What was being sent is sent again later."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        try:
            await self._send_all()
        finally:
            for task in self._sending:
                task.cancel()
            await asyncio.gather(*self._sending, return_exceptions=True)
            self._resolver.close()

    async def _send_all(self) -> None:
        while True:
            messages: list[_DueMessage] = []
            try:
                messages = await self._claim()
            except SlipstreamError as error:
                log.warning("no webhooks are sent: %s", error)
            for message in messages:
                self._sending[asyncio.create_task(self._deliver(message))] = message.receiver
            if not messages:
                await self._pause()

    async def _pause(self) -> None:
        """Wait until a delivery has ended, or for a tick."""
        if not self._sending:
            await asyncio.sleep(self._tick_s)
            return
        done, _ = await asyncio.wait(self._sending, timeout=self._tick_s, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            del self._sending[task]
            if (error := task.exception()) is not None:  # the message is sent again when its lease ends
                log.warning("a webhook is sent again: %s", error)

    async def _claim(self) -> list[_DueMessage]:
        now_s = self._now_s()
        in_flight = Counter(self._sending.values())
        n = WEBHOOKS_AT_ONCE - len(self._sending)
        if n <= 0:
            return []
        due = await self._database.read(lambda tx: tx.execute(DUE_RECEIVERS, (now_s,)))
        receivers = [(str(tenant), str(host)) for tenant, host in due]
        shares = share_deliveries(receivers, in_flight, n, most_each=TENANT_WEBHOOKS_TO_HOST)

        def claim(tx: SqlTransaction) -> list[_DueMessage]:
            return [
                message
                for receiver, count in shares.items()
                for message in _claim_of(tx, receiver, count, now_s)
            ]

        return await self._database.run(claim) if shares else []

    async def _deliver(self, message: _DueMessage) -> None:
        status = await self._send(message)
        if 200 <= status < 300:
            outcome = DeliveryOutcome.DELIVERED
        elif status == _GONE or self._now_s() - message.made_unix_s > WEBHOOK_LIFE_S:
            outcome = DeliveryOutcome.GIVEN_UP
        else:
            outcome = DeliveryOutcome.FAILED
        if outcome is DeliveryOutcome.FAILED:
            again_s = self._now_s() + webhook_retry_s(message.tries, random.random())
            sql = "UPDATE job_notices SET not_before_unix_s = ? WHERE id = ?"
            await self._database.run(lambda tx: tx.execute(sql, (again_s, message.id)), is_idempotent=True)
        else:
            await self._database.run(lambda tx: _delete(tx, message), is_idempotent=True)
        self._counters.add("slipstream_webhooks_total", 1, (outcome.value,))

    async def _send(self, message: _DueMessage) -> int:
        """The status of the answer; 0 without one."""
        if not self._hosts.names(message.url):  # the list has changed since the job was submitted
            return _GONE
        headers = webhook_headers(message.id, message.body, message.secret, now_s=self._now_s())
        try:
            return await post_webhook(
                message.url, message.body, headers, resolver=self._resolver, timeout_s=WEBHOOK_S
            )
        except WebhookUnanswered:
            return 0


def _delete(tx: SqlTransaction, message: _DueMessage) -> None:
    """Drop a message, which then takes no place of its tenant's jobs."""
    if tx.execute("DELETE FROM job_notices WHERE id = ? RETURNING id", (message.id,)):
        sql = "UPDATE job_tenants SET notices = notices - 1 WHERE tenant = ?"
        tx.execute(sql, (message.receiver[0],))


def _claim_of(tx: SqlTransaction, receiver: Receiver, n: int, now_s: float) -> list[_DueMessage]:
    rows = tx.execute(
        "WITH chosen AS MATERIALIZED (SELECT id FROM job_notices"
        " WHERE tenant = ? AND host = ? AND not_before_unix_s <= ?"
        f" ORDER BY not_before_unix_s LIMIT ? {tx.skip_locked})"
        " UPDATE job_notices SET tries = tries + 1, not_before_unix_s = ?"
        " WHERE id IN (SELECT id FROM chosen) RETURNING id, url, secret, body, tries, made_unix_s",
        (*receiver, now_s, n, now_s + _LEASE_S),
    )
    return [_DueMessage(row[0], row[1], row[2], bytes(row[3]), row[4], row[5], receiver) for row in rows]
