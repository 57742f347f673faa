"""The workers as this router sees them: a link to each, and immutable loads for placement.

Discovery says who there is; links say who answers and how loaded they are. A worker that leaves
discovery gets no new work and keeps its link while something runs there.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Set

from libs.common import discovery
from libs.common.tls import TlsFiles
from libs.common.worker_record import FleetSnapshot, Role
from services.router.decode_stream import DecodeStream
from services.router.placement import DecodeLoad, FleetLoad, PrefillLoad
from services.router.worker_link import WorkerLink
from slipstream.v1 import common_pb2

log = logging.getLogger(__name__)

_FOLLOWED = (Role.PREFILL, Role.DECODE, Role.KVSTORE, Role.DRAFTER)
_RETIRE_POLL_S = 1.0


class RouterFleet:
    """Owns the links. Use as: await start(); ...; await close()."""

    def __init__(
        self,
        members: discovery.Fleet,
        *,
        tls: TlsFiles | None,
        clock: Callable[[], float],
        fits: Callable[[common_pb2.Fingerprint], bool],
    ) -> None:
        """`fits`: whether a worker of this fingerprint may be used at all."""
        self._members = members
        self._tls = tls
        self._clock = clock
        self._fits = fits
        self._links: dict[str, WorkerLink] = {}
        self._streams: dict[str, DecodeStream] = {}
        self._retired: list[WorkerLink] = []
        self._version = 0
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Begin to follow discovery."""
        self._reconcile(self._members.current)
        self._tasks = [
            asyncio.create_task(self._follow(), name="router-fleet"),
            asyncio.create_task(self._close_retired(), name="router-fleet-retired"),
        ]

    async def close(self) -> None:
        """Close all links; what runs on them fails."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        links = [*self._links.values(), *self._retired]
        await asyncio.gather(*(self._close(link) for link in links))
        self._links.clear()
        self._retired.clear()

    def links(self) -> Iterator[WorkerLink]:
        """All workers in discovery, by role and instance."""
        for key in sorted(self._links):
            yield self._links[key]

    @property
    def ready(self) -> bool:
        """Whether a request could be placed: a prefill and a decode worker of one fingerprint."""
        fingerprint = self.fingerprint()
        return fingerprint is not None and all(
            self._ready(role, fingerprint) for role in (Role.PREFILL, Role.DECODE)
        )

    @property
    def tokens_in_flight(self) -> int:
        """Tokens of this router's requests, over all workers. 0 when idle."""
        return sum(link.tokens_in_flight for link in (*self._links.values(), *self._retired))

    def fingerprint(self) -> common_pb2.Fingerprint | None:
        """The fingerprint most ready workers share, decode workers first; None without a decode worker."""
        found: dict[bytes, common_pb2.Fingerprint] = {}
        votes: Counter[bytes] = Counter()
        for link in self._links.values():
            if (
                link.ready
                and link.fingerprint is not None
                and link.worker.role in (Role.PREFILL, Role.DECODE)
            ):
                found[link.fingerprint.digest] = link.fingerprint
                # A group without a decode worker can serve nothing.
                votes[link.fingerprint.digest] += 1_000_000 if link.worker.role is Role.DECODE else 1
        if not votes or max(votes.values()) < 1_000_000:
            return None
        return found[max(votes, key=lambda digest: (votes[digest], digest))]

    def loads(self, fingerprint: common_pb2.Fingerprint, *, without: Set[str] = frozenset()) -> FleetLoad:
        """The workers to choose among. `without`: keys of links that failed this request already."""

        def tokens(link: WorkerLink, reported: int) -> int:
            # Reports include what we sent; what we sent last is not in them yet.
            return max(link.tokens_in_flight, reported)

        prefill, decode = [], []
        for link in self._ready(Role.PREFILL, fingerprint, without):
            report = link.report
            reported = report.prefill_tokens_in_flight if report else 0
            rate = report.prefill_tokens_per_s if report else 0.0
            prefill.append(PrefillLoad(link.worker.instance, tokens(link, reported), rate))
        for link in self._ready(Role.DECODE, fingerprint, without):
            report = link.report
            reported = report.decode_tokens_in_flight if report else 0
            step_ms = report.decode_step_ms if report else 0.0
            decode.append(DecodeLoad(link.worker.instance, tokens(link, reported), step_ms))
        kvstores = [
            link.worker.instance for link in self.links() if link.worker.role is Role.KVSTORE and link.ready
        ]
        return FleetLoad(tuple(prefill), tuple(decode), tuple(kvstores))

    def find(self, role: Role, instance: str) -> WorkerLink | None:
        """The link to a worker by name."""
        return self._links.get(f"{role}/{instance}")

    def decode_stream(self, link: WorkerLink) -> DecodeStream:
        """The stream to a decode worker."""
        stream = self._streams.get(link.key)
        if stream is None:
            stream = self._streams[link.key] = DecodeStream(link.channel, instance=link.worker.instance)
        return stream

    @property
    def version(self) -> int:
        """Rises whenever a worker comes, goes, or changes its readiness."""
        return self._version

    async def wait_changed(self, seen: int) -> None:
        """Return when `version` is another than `seen`."""
        while self._version == seen:
            await self._changed.wait()

    def _ready(
        self, role: Role, fingerprint: common_pb2.Fingerprint, without: Set[str] = frozenset()
    ) -> list[WorkerLink]:
        return [
            link
            for link in self.links()
            if link.worker.role is role
            and link.ready
            and link.key not in without
            and link.fingerprint == fingerprint
        ]

    def _notify(self) -> None:
        self._version += 1
        self._changed.set()
        self._changed = asyncio.Event()

    async def _follow(self) -> None:
        seen = self._members.current
        while True:
            self._reconcile(seen)
            seen = await self._members.wait_changed(seen)

    def _reconcile(self, snapshot: FleetSnapshot) -> None:
        wanted = {f"{w.role}/{w.instance}": w for w in snapshot.workers if w.role in _FOLLOWED}
        for name, link in list(self._links.items()):
            if wanted.get(name) != link.worker:
                self._retired.append(self._links.pop(name))
        for name, worker in wanted.items():
            if name not in self._links:
                log.info("sees %s at %s", name, worker.endpoint)
                self._links[name] = WorkerLink(
                    worker, tls=self._tls, clock=self._clock, on_change=self._notify, fits=self._fits
                )
        self._notify()

    async def _close_retired(self) -> None:
        while True:
            await asyncio.sleep(_RETIRE_POLL_S)
            for link in [link for link in self._retired if not self._in_use(link)]:
                self._retired.remove(link)
                await self._close(link)

    def _in_use(self, link: WorkerLink) -> bool:
        stream = self._streams.get(link.key)
        return bool(
            link.tokens_in_flight or link.releases_in_flight or (stream is not None and stream.open_sequences)
        )

    async def _close(self, link: WorkerLink) -> None:
        stream = self._streams.pop(link.key, None)
        if stream is not None:
            await stream.close()
        await link.close()
