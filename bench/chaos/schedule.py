"""Which fault comes when. Pure: the generator comes in as an argument."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

# Seconds between the beginnings of two faults, and how long a stopped process stays stopped.
PAUSE_S = (3.0, 9.0)
STOP_S = (5.0, 40.0)
FULL_DISK_S = (5.0, 20.0)


class Fault(StrEnum):
    """What happens to the cluster."""

    KILL = "kill"  # SIGKILL of one process
    KILL_PAIR = "kill_pair"  # of two processes of different tiers
    STOP = "stop"  # SIGSTOP for a while
    KILL_ETCD = "kill_etcd"
    LOSE_ETCD = "lose_etcd"  # with its data
    STOP_ETCD = "stop_etcd"
    FILL_DISK = "fill_disk"  # under all stores
    FLIP_BITS = "flip_bits"  # in segments of a store's disk
    DELETE_SEGMENTS = "delete_segments"
    KILL_ALL = "kill_all"  # everything at once


# How often each fault comes, relative to the others.
WEIGHTS: dict[Fault, int] = {
    Fault.KILL: 8,
    Fault.KILL_PAIR: 3,
    Fault.STOP: 5,
    Fault.KILL_ETCD: 1,
    Fault.LOSE_ETCD: 1,
    Fault.STOP_ETCD: 1,
    Fault.FILL_DISK: 2,
    Fault.FLIP_BITS: 2,
    Fault.DELETE_SEGMENTS: 2,
    Fault.KILL_ALL: 1,
}


@dataclass(frozen=True, slots=True)
class Action:
    """One fault. `at_s` counts from the begin of the chaos; `lasts_s` is 0 for what happens at once."""

    at_s: float
    fault: Fault
    targets: tuple[str, ...]
    lasts_s: float = 0.0


def schedule(
    rng: random.Random, *, workers: Sequence[str], stores: Sequence[str], until_s: float
) -> list[Action]:
    """Faults from the start until `until_s`. Every kind comes once before chance decides.

    `workers`: names such as "decode-0", of all services; `stores`: those with disks.
    """
    kinds = _kinds(rng)
    found: list[Action] = []
    now_s = rng.uniform(*PAUSE_S)
    while now_s < until_s:
        fault = next(kinds)
        found.append(Action(now_s, fault, _targets(rng, fault, workers, stores), _lasts_s(rng, fault)))
        now_s += rng.uniform(*PAUSE_S)
    return found


def _kinds(rng: random.Random) -> Iterator[Fault]:
    first = list(Fault)
    rng.shuffle(first)
    yield from first
    while True:
        yield rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]


def _targets(
    rng: random.Random, fault: Fault, workers: Sequence[str], stores: Sequence[str]
) -> tuple[str, ...]:
    if fault in (Fault.KILL, Fault.STOP):
        return (rng.choice(workers),)
    if fault is Fault.KILL_PAIR:
        first = rng.choice(workers)
        return first, rng.choice([name for name in workers if _tier(name) != _tier(first)])
    if fault in (Fault.FLIP_BITS, Fault.DELETE_SEGMENTS):
        return (rng.choice(stores),)
    if fault is Fault.FILL_DISK:
        return tuple(stores)
    if fault is Fault.KILL_ALL:
        return (*workers, "etcd")
    return ("etcd",)


def _tier(instance: str) -> str:
    return instance.rpartition("-")[0]


def _lasts_s(rng: random.Random, fault: Fault) -> float:
    if fault in (Fault.STOP, Fault.STOP_ETCD):
        return rng.uniform(*STOP_S)
    return rng.uniform(*FULL_DISK_S) if fault is Fault.FILL_DISK else 0.0
