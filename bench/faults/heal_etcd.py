"""The time until a client uses etcd again after a network fault: by a watch, a put, or a lease's keys.

    python -m bench.faults.heal_etcd --rounds 3 --json

A proxy between one client and a real etcd injects the faults of `bench.heal`. Measured is the time from the
end of the fault to the end of the first use that began afterwards: the watch reports another client's put, a
put succeeds, or a key of a lease is set. The client is in use all the time.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import random
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from pathlib import Path

from bench.command_line import bench_parser, print_report
from bench.heal import FAULTS
from bench.progress import say
from bench.request_log import percentiles
from libs.common.etcd.client import EtcdClient
from libs.common.etcd.lease import LeaseSession
from libs.common.etcd.messages import PrefixChanges
from libs.common.etcd.watch import watch_prefix
from slipstream.errors import SlipstreamError
from slipstream.rpc.backoff import HEAL_S
from tests.support.network.fault_proxy import FaultProxy
from tests.support.processes.etcd_process import EtcdProcess

PREFIX = "/heal/"
_LIMIT_S = 60.0


class Uses:
    """The uses of etcd by one process through the proxy; `other` is a client without a proxy."""

    def __init__(self, client: EtcdClient, other: EtcdClient) -> None:
        self._client, self._other = client, other
        self._session = LeaseSession(client, ttl_s=10)
        self._seen: set[str] = set()
        self._moved = asyncio.Condition()
        self._watching = asyncio.create_task(self._watch())
        self._numbers = itertools.count()

    async def watch(self) -> None:
        """Wait until the watch reports a put of the other client."""
        number = next(self._numbers)
        await self._other.put(f"{PREFIX}{number}", b"")
        async with self._moved:
            await self._moved.wait_for(lambda: f"{PREFIX}{number}" in self._seen)

    async def change(self) -> None:
        """Put a key; retry until it succeeds."""
        while True:
            with contextlib.suppress(SlipstreamError):
                await self._client.put("/elsewhere", b"%d" % next(self._numbers))
                return
            await asyncio.sleep(0.1)

    async def lease(self) -> None:
        """Set a key of the session, and wait until etcd has it."""
        self._session.set("/leased", b"%d" % next(self._numbers))
        await self._session.wait_synced(timeout_s=_LIMIT_S)

    async def close(self) -> None:
        """End watch and session."""
        self._watching.cancel()
        await asyncio.gather(self._watching, return_exceptions=True)
        await self._session.close()

    async def _watch(self) -> None:
        async with aclosing(watch_prefix(self._client, PREFIX)) as updates:
            async for update in updates:
                keys = dict(update.changes) if isinstance(update, PrefixChanges) else update.entries
                async with self._moved:
                    self._seen.update(keys)
                    self._moved.notify_all()


async def healed_s(
    proxy: FaultProxy, use: Callable[[], Awaitable[None]], fault: str, rng: random.Random
) -> float:
    """Inject a fault under continuous use; returns the seconds of the first use after the restore."""
    inject, duration_s = FAULTS[fault]
    await use()
    stop = asyncio.Event()

    async def keep_using() -> None:
        while not stop.is_set():
            await use()
            await asyncio.sleep(0.05)

    using = asyncio.create_task(keep_using())
    try:
        inject(proxy)
        await asyncio.sleep(duration_s * rng.uniform(0.8, 1.2))
        proxy.restore()
        restored_s = time.monotonic()
        async with asyncio.timeout(_LIMIT_S):
            await use()
        return time.monotonic() - restored_s
    finally:
        stop.set()
        using.cancel()
        await asyncio.gather(using, return_exceptions=True)


async def measure(options: argparse.Namespace) -> dict[str, object]:
    """Measure every pair of fault and use in turn."""
    rng, times = random.Random(options.seed), dict[str, dict[str, list[float]]]()
    with tempfile.TemporaryDirectory() as folder, EtcdProcess(Path(folder)) as etcd:
        async with FaultProxy(etcd.endpoint) as proxy:
            client, other = EtcdClient([proxy.endpoint]), EtcdClient([etcd.endpoint])
            uses = Uses(client, other)
            try:
                ways = {"watch": uses.watch, "change": uses.change, "lease": uses.lease}
                for _, fault, way in itertools.product(range(options.rounds), FAULTS, ways):
                    took_s = await healed_s(proxy, ways[way], fault, rng)
                    times.setdefault(way, {}).setdefault(fault, []).append(took_s)
                    say(f"{way:8} {fault:10} {took_s:6.2f} s")
            finally:
                await uses.close()
                await asyncio.gather(client.close(), other.close())
    everything = [took_s for by_fault in times.values() for each in by_fault.values() for took_s in each]
    return {
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 1),
        "heal_s": {
            way: {fault: round(max(each), 2) for fault, each in by_fault.items()}
            for way, by_fault in times.items()
        },
        "all": {"n": len(everything), **percentiles(everything), "max": round(max(everything), 2)},
        "aim_s": HEAL_S,
    }


def main() -> int:
    """Measure and print; 1 when the aim was missed."""
    parser = bench_parser("faults.heal_etcd", __doc__)
    parser.add_argument("--rounds", type=int, default=1, help="of every pair")
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    report = asyncio.run(measure(options))
    print_report(report, as_json=options.json)
    everything = report["all"]
    assert isinstance(everything, dict)
    return 1 if everything["max"] > HEAL_S else 0


if __name__ == "__main__":
    sys.exit(main())
