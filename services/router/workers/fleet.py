"""The workers as this router sees them: a link to each, and immutable loads for placement.

Discovery lists the workers; connections report which of them answer and how loaded they are. A worker that
leaves discovery gets no new work and keeps its link while something runs there.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Set

from libs.common.cluster import discovery
from libs.common.cluster.fingerprint import differences
from libs.common.cluster.worker_record import FleetSnapshot, Role, Worker
from libs.common.service_bounds import MAX_FOLLOWED_WORKERS
from libs.common.telemetry.paced_warnings import PacedWarnings
from services.router.placement.round_robin import ColdRoundRobin
from services.router.placement.types import DecodeWorker, KvStore, PlacementFleet, PrefillWorker
from services.router.placement.worker_models import WorkerModels
from services.router.prefix_index.index import PrefixIndex
from services.router.workers.awake_clock import TICK_S
from services.router.workers.connection import SILENCE_S, WorkerConnection
from services.router.workers.decode_client import DecodeClient
from services.router.workers.delivery.token_batcher import TokenBatcher
from services.router.workers.fingerprint_vote import most_shared
from services.router.workers.kv_event_subscriber import KvEventSubscriber
from services.router.workers.unplaced_requests import UnplacedRequests
from slipstream import errors
from slipstream.rpc.dial import PLAIN_DIAL, Dial
from slipstream.v1 import common_pb2, worker_pb2

log = logging.getLogger(__name__)

_FOLLOWED = (Role.PREFILL, Role.DECODE, Role.KVSTORE, Role.DRAFTER)
_NO_CONTEXT: Mapping[Role, int] = {}
_RETIRE_POLL_S = 1.0
# Pieces of obsolete entries in the prefix index that one clean-up removes; each takes a millisecond or two.
_CLEAN_UP_STEPS = 8
# Lines about single workers in 30 s: a writer into etcd may add any number of false workers.
_MAX_NEWS = 256


class RouterFleet:
    """Owns the links. Use as: await start(); ...; await close()."""

    def __init__(
        self,
        members: discovery.Fleet,
        *,
        dial: Dial = PLAIN_DIAL,
        clock: Callable[[], float],
        fits: Callable[[common_pb2.Fingerprint], bool],
        region_ms: Mapping[str, float] | None = None,
        silence_s: float = SILENCE_S,
    ) -> None:
        """`fits`: whether a worker of this fingerprint may be used at all. `region_ms`: the way there.
        Workers are dialled again when the files of `dial` change.
        `silence_s`: the time without a heartbeat after which a worker's requests fail over."""
        self._silence_s = silence_s
        self._region_ms = dict(region_ms or {})
        self._members = members
        self._dial = dial
        self._clock = clock
        self.fits = fits
        self.worker_models = WorkerModels()
        self.index = PrefixIndex()
        self.cold_round_robin = ColdRoundRobin()
        self.unplaced = UnplacedRequests(clock)
        self._links: dict[str, WorkerConnection] = {}
        self._in_order: tuple[WorkerConnection, ...] = ()  # of `_links`
        self._of_role: dict[Role, tuple[WorkerConnection, ...]] = dict.fromkeys(_FOLLOWED, ())
        self._feeds: dict[str, KvEventSubscriber] = {}
        self._streams: dict[str, DecodeClient] = {}
        self.batcher = TokenBatcher()
        self._retired: list[WorkerConnection] = []
        self._strangers: set[str] = set()  # workers that were logged
        self._warnings = PacedWarnings(log)
        self._news = PacedWarnings(log, level=logging.INFO, max_subjects=_MAX_NEWS)
        self._version = 0
        self._could_serve = False
        self._outage_began_s = -math.inf
        self._fingerprint: common_pb2.Fingerprint | None = None  # of `_links`, at the last change
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Begin to follow discovery."""
        self._reconcile(self._members.current)
        self._tasks = [
            asyncio.create_task(self._follow(), name="router-fleet"),
            asyncio.create_task(self._close_retired(), name="router-fleet-retired"),
            asyncio.create_task(self._watch_heartbeats(), name="router-fleet-heartbeats"),
        ]

    async def close(self) -> None:
        """Close all links; what runs on them fails."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        links = [*self._links.values(), *self._retired]
        for feed in self._feeds.values():
            feed.stop()
        await asyncio.gather(*(feed.wait_stopped() for feed in self._feeds.values()))
        self._feeds.clear()
        await asyncio.gather(*(self._close(link) for link in links))
        self._links.clear()
        self._put_in_order()
        self._fingerprint = None
        self._retired.clear()

    def links(self) -> Iterator[WorkerConnection]:
        """All workers in discovery, by role and instance."""
        return iter(self._in_order)

    def links_of(self, role: Role) -> tuple[WorkerConnection, ...]:
        """The links to workers of one role, by instance."""
        return self._of_role[role]

    @property
    def ready(self) -> bool:
        """Whether both tiers are there: a prefill worker, too, of the fingerprint that is served."""
        served = self.fingerprint()
        prefills = self.links_of(Role.PREFILL)
        return served is not None and any(link.ready and link.fingerprint == served for link in prefills)

    @property
    def outage_s(self) -> float:
        """Seconds since no request could be placed any more: 0 while one can, infinite if none ever could."""
        return 0.0 if self.can_serve else self._clock() - self._outage_began_s

    @property
    def can_serve(self) -> bool:
        """Whether a request could run: a decode worker computes prompts where there is no prefill worker."""
        return self.fingerprint() is not None

    @property
    def tokens_in_flight(self) -> int:
        """Tokens of this router's requests, over all workers. 0 when idle."""
        return sum(link.tokens_in_flight for link in (*self._links.values(), *self._retired))

    @property
    def commands_waiting(self) -> int:
        """Commands to workers that could not be written yet."""
        links = (*self._links.values(), *self._retired)
        waiting = [link.prefills.waiting_commands for link in links]
        return sum(waiting) + sum(stream.waiting_commands for stream in self._streams.values())

    def fingerprint(self) -> common_pb2.Fingerprint | None:
        """The fingerprint most ready workers share, decode workers first; None without a decode worker."""
        return self._fingerprint

    def loads(
        self, *, without: Set[str] = frozenset(), context_tokens: Mapping[Role, int] = _NO_CONTEXT
    ) -> PlacementFleet:
        """All workers as placement sees them, those of a role in the order of `links_of`. `without`: keys of
        links that failed this request already. `context_tokens`: what workers of a role must take."""
        needs, of_role = (without, context_tokens), self._of_role
        prefill = [self._prefill_worker(link, _refused(link, *needs)) for link in of_role[Role.PREFILL]]
        decode = [self._decode_worker(link, _refused(link, *needs)) for link in of_role[Role.DECODE]]
        stores = [
            KvStore(link.worker.instance, link.transport, link.worker.region, _refused(link, *needs))
            for link in of_role[Role.KVSTORE]
        ]
        return PlacementFleet(tuple(prefill), tuple(decode), tuple(stores), self._region_ms)

    def _prefill_worker(self, link: WorkerConnection, refused: str) -> PrefillWorker:
        report, tokens, requests = link.load()
        worker = link.worker
        return PrefillWorker(
            instance=worker.instance,
            fingerprint=link.digest,
            transport=link.transport,
            region=worker.region,
            refused=refused,
            queued_tokens=tokens,
            queued_requests=requests,
            queue=link.own_tokens,
            last_cold=self.cold_round_robin.last_number(link.key),
            model=self.worker_models.prefill_model(
                link.key, tokens_per_s=report.prefill_tokens_per_s if report is not None else 0.0
            ),
        )

    def _decode_worker(self, link: WorkerConnection, refused: str) -> DecodeWorker:
        report, tokens, requests = link.load()
        worker = link.worker
        capacity = worker.capacity
        return DecodeWorker(
            instance=worker.instance,
            fingerprint=link.digest,
            transport=link.transport,
            region=worker.region,
            refused=refused,
            context_tokens=tokens,
            sequences=requests,
            queued_tokens=report.prefill_tokens_in_flight if report is not None else 0,
            free_blocks=(report.blocks_free + report.blocks_cached) if report and capacity else None,
            max_sequences=capacity.get("max_batch", 0),
            block_tokens=capacity.get("block_tokens", 64),
            block_bytes=capacity.get("block_bytes", 0),
            model=self.worker_models.decode_model(link.key),
            prefill_model=self.worker_models.prefill_model(link.key),
        )

    def find(self, role: Role, instance: str) -> WorkerConnection | None:
        """The link to a worker by name."""
        return self._links.get(f"{role}/{instance}")

    def has_substitute(self, link: WorkerConnection, *, context_tokens: int) -> bool:
        """Whether another ready worker can run a request of this worker."""
        for other in self.links_of(link.worker.role):
            is_usable = other.ready and other is not link and other.worker.takes(context_tokens)
            # The fingerprint last: to compare two takes longer than all the rest.
            if is_usable and other.fingerprint == link.fingerprint:
                return True
        return False

    def decode_stream(self, link: WorkerConnection) -> DecodeClient:
        """The stream to a decode worker."""
        stream = self._streams.get(link.key)
        if stream is None:
            stream = self._streams[link.key] = DecodeClient(
                link.channel, instance=link.worker.instance, batcher=self.batcher
            )
        return stream

    @property
    def version(self) -> int:
        """Rises whenever a worker comes, goes, or changes its readiness."""
        return self._version

    async def wait_changed(self, seen: int) -> None:
        """Return when `version` is another than `seen`."""
        while self._version == seen:
            await self._changed.wait()

    def _log_strangers(self) -> None:
        """Log once why a worker that answers gets no requests."""
        served = self.fingerprint() if self.ready else None
        for name, link in self._links.items():
            own = link.fingerprint
            if served is None or own is None or link.worker.role not in (Role.PREFILL, Role.DECODE):
                continue
            if own == served or not link.ready:
                self._strangers.discard(name)
            elif name not in self._strangers:
                self._strangers.add(name)
                fields = ", ".join(field for field in differences(served, own) if field != "digest")
                log.warning("%s gets no requests: its %s differs from the others'", name, fields)
        self._strangers &= self._links.keys()

    def readiness_changed(self) -> None:
        """A worker is ready or no longer, is new, or has left."""
        self._fingerprint = most_shared(self._links.values())
        self._log_strangers()
        can_serve = self.can_serve
        if self._could_serve and not can_serve:
            self._outage_began_s = self._clock()
        self._could_serve = can_serve
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
            if (now := wanted.get(name)) != link.worker:
                if now is not None and now.incarnation != link.worker.incarnation:
                    link.settle(has_ended=True)
                self._retired.append(self._links.pop(name))
                self._remove_from_placement(self._retired[-1])
        for name, worker in wanted.items():
            if name in self._links:
                continue
            if len(self._links) >= MAX_FOLLOWED_WORKERS:
                text = f"follows {MAX_FOLLOWED_WORKERS} workers, and not {name}: discovery names too many"
                self._warnings.warn("too many workers", text)
                break
            self._news.warn(name, f"sees {name} at {worker.endpoint}")
            self._links[name] = self._open(worker)
        self._put_in_order()
        self.readiness_changed()

    def _put_in_order(self) -> None:
        self._in_order = tuple(link for _, link in sorted(self._links.items()))
        for role in _FOLLOWED:
            self._of_role[role] = tuple(link for link in self._in_order if link.worker.role is role)

    def _open(self, worker: Worker) -> WorkerConnection:
        link = WorkerConnection(
            worker,
            self,
            dial=self._dial,
            clock=self._clock,
            silence_s=self._silence_s,
            warnings=self._warnings,
            news=self._news,
        )
        if worker.role in (Role.PREFILL, Role.KVSTORE):
            self._feeds[link.key] = KvEventSubscriber(link, self.index)
        return link

    def reported(self, link: WorkerConnection, report: worker_pb2.LoadReport) -> None:
        """Learn the time of steps from a load report."""
        if link.worker.role is Role.DECODE and report.decode_tokens_in_flight:
            self.worker_models.observe_step(
                link.key,
                sequences=report.requests_running,
                context_tokens=report.decode_tokens_in_flight,
                step_ms=report.decode_step_ms,
            )

    async def _watch_heartbeats(self) -> None:
        """Fail over what runs on silent workers: one check a worker, whatever number of requests it runs."""
        while True:
            await asyncio.sleep(TICK_S)
            for link in (*self._links.values(), *self._retired):
                try:
                    if link.check_heartbeat() and (stream := self._streams.get(link.key)) is not None:
                        stream.break_off(errors.Unavailable(f"{link.worker.instance} is silent"))
                except Exception:
                    log.exception("%s: its silence could not be handled", link.worker.instance)

    async def _close_retired(self) -> None:
        while True:
            await asyncio.sleep(_RETIRE_POLL_S)
            await self._clean_up_index()
            self.worker_models.decay(_RETIRE_POLL_S)
            for link in [link for link in self._retired if not self._in_use(link)]:
                self._retired.remove(link)
                await self._close(link)
            await self._dial_again()

    async def _dial_again(self) -> None:
        """Replace idle connections that fail with an old certificate: gRPC reconnects with the old files."""
        version = self._dial.files_version()
        for name, link in [*self._links.items()] if version is not None else ():
            if link.files_version != version and not link.reachable and not self._in_use(link):
                self._remove_from_placement(link)
                await self._close(link)
                if self._links.get(name) is link:
                    self._links[name] = self._open(link.worker)
                    self._put_in_order()
                    self.readiness_changed()

    async def _clean_up_index(self) -> None:
        for _ in range(_CLEAN_UP_STEPS):
            if not self.index.clean_up(self._clock()):
                return
            await asyncio.sleep(0)  # what requests wait for goes on in between

    def _in_use(self, link: WorkerConnection) -> bool:
        stream = self._streams.get(link.key)
        return bool(
            link.tokens_in_flight or link.releases_in_flight or (stream is not None and stream.receivers)
        )

    def _remove_from_placement(self, link: WorkerConnection) -> None:
        """Drop what placement uses of a worker that gets no new work."""
        feed = self._feeds.pop(link.key, None)
        if feed is not None:
            feed.stop()
        self.index.drop(link.key)
        self.worker_models.remove(link.key)
        self.cold_round_robin.remove(link.key)

    async def _close(self, link: WorkerConnection) -> None:
        stream = self._streams.pop(link.key, None)
        if stream is not None:
            await stream.close()
        await link.close()
        # What it ran as it was retired was noted at its end, and so was how long it took.
        self.index.drop(link.key)
        self.worker_models.remove(link.key)


def _refused(link: WorkerConnection, without: Set[str], context_tokens: Mapping[Role, int]) -> str:
    """Why a worker may not be used now, "" = it may."""
    if link.key in without or not link.ready:
        return "failed this request" if link.key in without else "does not answer"
    is_taken = link.worker.takes(context_tokens.get(link.worker.role, 0))
    return "" if is_taken else f"takes {link.worker.max_context_tokens} tokens only"
