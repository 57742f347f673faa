"""What of a cluster gets fuzzed inputs: each process, with its services and their seeds."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from slipstream.cluster_record import ClusterRecord
from slipstream.keda import externalscaler_pb2
from slipstream.rpc.dial import Dial
from slipstream.v1 import (
    autoscale_pb2,
    batches_pb2,
    common_pb2,
    decode_pb2,
    drafter_pb2,
    fleet_pb2,
    jobs_pb2,
    kv_events_pb2,
    kvstore_pb2,
    prefill_pb2,
    responses_pb2,
    router_pb2,
    worker_pb2,
    worker_pb2_grpc,
)
from tests.support.fuzz.http_fuzzer import HttpFuzzer
from tests.support.fuzz.http_routes import HttpPort, admin_port, public_port
from tests.support.fuzz.rpc_fuzzer import RpcFuzzer
from tests.support.fuzz.seeds import (
    HEADERS,
    batch_seeds,
    drafter_seeds,
    job_seeds,
    kvstore_seeds,
    operator_seeds,
    response_seeds,
    router_seeds,
    worker_seeds,
)

_PART = 500  # inputs between two looks at the clock
_HTTP_SIDE_BY_SIDE = 64  # most of their time is the wait for more of an answer
_PAGE_BYTES = 4096  # of the fake engine


class _Service(NamedTuple):
    """A service, its share of the inputs, and its methods that get none."""

    descriptor: ServiceDescriptor
    weight: int = 1
    leave_out: frozenset[str] = frozenset()


def _named(file: Any, name: str) -> ServiceDescriptor:
    found: ServiceDescriptor = file.DESCRIPTOR.services_by_name[name]
    return found


_ROUTER = _Service(_named(router_pb2, "RouterService"), 4)
_JOBS = _Service(_named(jobs_pb2, "JobService"), 2)
_BATCHES = _Service(_named(batches_pb2, "BatchService"), 2)
_RESPONSES = _Service(_named(responses_pb2, "ResponseService"))
_OPERATORS = (
    _Service(_named(fleet_pb2, "FleetService")),
    _Service(_named(autoscale_pb2, "AutoscaleService")),
    _Service(_named(externalscaler_pb2, "ExternalScaler")),
)
_PREFILL = _Service(_named(prefill_pb2, "PrefillService"), 4)
_DECODE = _Service(_named(decode_pb2, "DecodeService"), 4)
_KVSTORE = _Service(_named(kvstore_pb2, "KvstoreService"), 4)
_DRAFTER = _Service(_named(drafter_pb2, "DrafterService"), 4)
# Of KvstoreService a worker has the reading part.
_WRITING = frozenset({"Lookup", "Reserve", "Commit", "CancelReservation", "VerifyBlocks", "DropBlocks"})
_PEER_CACHE = _Service(_named(kvstore_pb2, "KvstoreService"), 1, _WRITING)
_KV_EVENTS = _Service(_named(kv_events_pb2, "KvEventService"))
_EVERYWHERE = (
    # Drain would end what the run measures.
    _Service(_named(worker_pb2, "WorkerService"), 1, frozenset({"Drain"})),
    _Service(_named(health_pb2, "Health")),
    _Service(_named(reflection_pb2, "ServerReflection")),
)


class Fuzzer(Protocol):
    """RpcFuzzer or HttpFuzzer."""

    defects: list[str]

    async def run(self, inputs: int) -> None:
        """Send so many inputs."""

    async def use(self, inputs: int) -> None:
        """Send so many valid ones."""


@dataclass(frozen=True)
class Target:
    """One process. Its services get inputs by their weights."""

    name: str
    instance: str
    fuzzers: Sequence[tuple[Fuzzer, int]]
    channels: Sequence[grpc.aio.Channel] = ()

    async def run(self, inputs: int, *, until_s: float) -> None:
        """Send so many inputs to all services at the same time, or fewer until then (monotonic)."""
        for sent in range(0, inputs, _PART):
            if time.monotonic() > until_s:
                return
            part = min(_PART, inputs - sent)
            await asyncio.gather(*(fuzzer.run(self._part(part, weight)) for fuzzer, weight in self.fuzzers))

    async def use(self, inputs: int) -> None:
        """Send so many valid inputs to all services at the same time."""
        await asyncio.gather(*(fuzzer.use(self._part(inputs, weight)) for fuzzer, weight in self.fuzzers))

    def _part(self, inputs: int, weight: int) -> int:
        return inputs * weight // sum(each for _, each in self.fuzzers)

    async def close(self) -> None:
        """Close the channels."""
        await asyncio.gather(*(channel.close() for channel in self.channels))

    @property
    def defects(self) -> list[str]:
        """Inputs that were answered with what bad input never gets."""
        return [defect for fuzzer, _ in self.fuzzers for defect in fuzzer.defects]

    @property
    def n_sent(self) -> int:
        """Inputs so far, valid ones too."""
        return sum(self.statuses.values())

    @property
    def statuses(self) -> dict[str, int]:
        """How often each status came, over all services."""
        found: Counter[str] = Counter()
        for fuzzer, _ in self.fuzzers:
            if isinstance(fuzzer, HttpFuzzer):
                found.update({str(status or "none"): count for status, count in fuzzer.statuses.items()})
            elif isinstance(fuzzer, RpcFuzzer):
                for key, count in fuzzer.statuses.items():
                    found[key.split()[1]] += count
        return dict(found.most_common())


async def targets(record: ClusterRecord, dial: Dial, rng: random.Random) -> list[Target]:
    """Router (both ports of HTTP, gRPC), prefill, decode, kvstore, drafter. `dial` is an operator's."""
    prefill = await _fingerprint(record, dial, "prefill-0")
    decode = await _fingerprint(record, dial, "decode-0")
    builder = _Builder(record, dial, rng)
    return [
        builder.router_http("router HTTP", record.router_http, public_port(Path(record.model).name)),
        builder.router_http("router admin HTTP", record.find("router-0").admin_http or "", admin_port()),
        builder.router(),
        builder.worker("prefill-0", [_PREFILL, _PEER_CACHE, _KV_EVENTS], _worker_seeds(prefill)),
        builder.worker("decode-0", [_DECODE, _KV_EVENTS], _worker_seeds(decode)),
        builder.worker("kvstore-0", [_KVSTORE, _KV_EVENTS], kvstore_seeds(prefill)),
        builder.worker("drafter-0", [_DRAFTER], drafter_seeds()),
    ]


class _Builder:
    """Makes the targets of one cluster."""

    def __init__(self, record: ClusterRecord, dial: Dial, rng: random.Random) -> None:
        self._record, self._dial, self._rng = record, dial, rng

    def router_http(self, name: str, endpoint: str, serves: HttpPort) -> Target:
        """One of its HTTP ports."""
        port = int(endpoint.rpartition(":")[2])
        fuzzer = HttpFuzzer(port, serves, self._rng, side_by_side=_HTTP_SIDE_BY_SIDE)
        return Target(name, "router-0", [(fuzzer, 1)])

    def router(self) -> Target:
        """Its public port, and its admin port with the services that every process has."""
        process = self._record.find("router-0")
        public, admin = self._dial(process.endpoint), self._dial(process.admin or "")
        fuzzers = [
            (self._fuzzer(public, _ROUTER, router_seeds()), _ROUTER.weight),
            (self._fuzzer(public, _JOBS, job_seeds()), _JOBS.weight),
            (self._fuzzer(public, _BATCHES, batch_seeds()), _BATCHES.weight),
            (self._fuzzer(public, _RESPONSES, response_seeds()), _RESPONSES.weight),
            *((self._fuzzer(admin, each, operator_seeds()), each.weight) for each in _OPERATORS),
            *((self._fuzzer(admin, each, ()), each.weight) for each in _EVERYWHERE),
        ]
        return Target("router gRPC", process.instance, fuzzers, [public, admin])

    def worker(self, instance: str, services: Sequence[_Service], seeds: Sequence[Message]) -> Target:
        """One of the other processes, which has one port."""
        channel = self._dial(self._record.find(instance).endpoint)
        fuzzers = [(self._fuzzer(channel, each, seeds), each.weight) for each in (*services, *_EVERYWHERE)]
        return Target(instance.rpartition("-")[0], instance, fuzzers, [channel])

    def _fuzzer(self, channel: grpc.aio.Channel, service: _Service, seeds: Sequence[Message]) -> Fuzzer:
        return RpcFuzzer(
            channel,
            service.descriptor,
            self._rng,
            seeds,
            leave_out=service.leave_out,
            headers=HEADERS if service is _ROUTER else {},
            side_by_side=4 * service.weight,
        )


def _worker_seeds(fingerprint: common_pb2.Fingerprint) -> list[Message]:
    return worker_seeds(fingerprint, page_bytes=_PAGE_BYTES)


async def _fingerprint(record: ClusterRecord, dial: Dial, instance: str) -> common_pb2.Fingerprint:
    async with dial(record.find(instance).endpoint) as channel:
        stub: worker_pb2_grpc.WorkerServiceAsyncStub = worker_pb2_grpc.WorkerServiceStub(channel)
        return (await stub.GetStatus(worker_pb2.GetStatusRequest(), timeout=10)).fingerprint
