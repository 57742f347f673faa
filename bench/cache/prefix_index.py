"""The router's prefix index alone: many long sessions of ten turns, the workers' events as they would come.

    python -m bench.cache.prefix_index --json

All sessions take their first turn, then all their second, at 20 requests a second of a virtual clock. A turn
adds 200 to 2,000 tokens. For each turn the benchmark looks up the blocks of eight prefill workers, two
kvstores and two decode workers, as placement does, and predicts where the prompt goes. Then a prefill worker
reports the new blocks, and a kvstore reports them in memory and later on its disk. Prints for each kind

    request_us   CPU of the look-ups and predictions of a request, first turns apart, of five together
    events_us    CPU of the events of a request, the same way
    right        share of requests for which all prefill workers' and kvstores' prefixes were known exactly
    bytes_block  memory beyond the prompts' own hashes, by different block, as the process grew (RSS)

Each row is measured in a new process.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from bench.command_line import bench_parser
from services.router.prefix_index.index import PrefixIndex
from slipstream.block_hashes import HASH_BYTES, pack_hashes
from slipstream.v1 import common_pb2, kv_events_pb2
from supervisor.process_stats import resident_bytes

BLOCK_TOKENS = 64
PREFILL = tuple(f"p{i}" for i in range(8))
STORES = ("s0", "s1")
DECODE = ("d0", "d1")
REQUEST_S = 0.05
TOGETHER = 5  # requests measured together: to read a process's clock takes long on some machines
WORKER = common_pb2.CACHE_TIER_WORKER
DRAM, NVME = common_pb2.CACHE_TIER_DRAM, common_pb2.CACHE_TIER_NVME
_TENANT = "t"


class Feed:
    """Events of one holder, numbered as its log would."""

    def __init__(self, index: PrefixIndex, name: str) -> None:
        self._view = index.view(name)
        self._sequence = 0
        self._view.apply(
            kv_events_pb2.WatchBlocksResponse(
                incarnation="i", sequence=0, snapshot=kv_events_pb2.BlocksSnapshot(last=True)
            )
        )

    def stored(self, tier: common_pb2.CacheTier.ValueType, hashes: Sequence[bytes]) -> None:
        self._sequence += 1
        changed = kv_events_pb2.BlocksChanged(block_hashes=pack_hashes(hashes), tier=tier)
        self._view.apply(
            kv_events_pb2.WatchBlocksResponse(incarnation="i", sequence=self._sequence, stored=changed)
        )


class Session:
    """A conversation: `blocks` of its hashes are in use so far, all of them held by its workers."""

    def __init__(self, number: int, tokens: int, turns: int, rng: random.Random) -> None:
        self.added = [tokens // BLOCK_TOKENS]
        left = 0
        for _ in range(turns - 1):
            left += rng.randint(200, 2000)
            self.added.append(left // BLOCK_TOKENS)
            left %= BLOCK_TOKENS
        packed = rng.randbytes(HASH_BYTES * sum(self.added))
        self.hashes = [packed[at : at + HASH_BYTES] for at in range(0, len(packed), HASH_BYTES)]
        self.blocks = 0
        self.prefill, self.store = PREFILL[number % len(PREFILL)], STORES[number % len(STORES)]
        self.decode = DECODE[number % len(DECODE)]


def ask(index: PrefixIndex, hashes: Sequence[bytes], now_s: float) -> dict[str, int]:
    """What placement asks for."""
    found = index.find(hashes, tenant=_TENANT, now_s=now_s)
    held = {name: found.blocks(name) for name in (*PREFILL, *STORES, *DECODE)}
    for name in PREFILL:
        found.blocks(name, tier=WORKER)
    for name in STORES:
        found.blocks(name, tier=DRAM)
    return held


def run(*, sessions: int, tokens: int, turns: int) -> dict[str, Any]:
    """One row."""
    rng = random.Random(sessions * tokens)
    talks = [Session(number, tokens, turns, rng) for number in range(sessions)]
    before_bytes = resident_bytes(os.getpid())
    index = PrefixIndex()
    feeds = {name: Feed(index, name) for name in (*PREFILL, *STORES)}
    now_s, right = 0.0, 0
    first_us: list[float] = []
    later_us: list[float] = []
    event_us: list[float] = []
    written: deque[tuple[str, list[bytes]]] = deque()  # to a store's disk, a turn of all sessions later
    for turn in range(turns):
        for at in range(0, sessions, TOGETHER):
            together = talks[at : at + TOGETHER]
            prompts = [talk.hashes[: talk.blocks + talk.added[turn]] for talk in together]
            fresh = [prompt[talk.blocks :] for talk, prompt in zip(together, prompts, strict=True)]
            answers = []
            begin = time.process_time_ns()
            for talk, prompt in zip(together, prompts, strict=True):
                now_s += REQUEST_S
                answers.append(ask(index, prompt, now_s))
                index.predict(talk.prefill, prompt, tenant=_TENANT, now_s=now_s, ttl_s=5.0)
                index.predict(talk.decode, prompt, tenant=_TENANT, now_s=now_s, ttl_s=60.0)
            middle = time.process_time_ns()
            for talk, new in zip(together, fresh, strict=True):
                feeds[talk.prefill].stored(WORKER, new)
                feeds[talk.store].stored(DRAM, new)
                written.append((talk.store, new))
                if len(written) > sessions:
                    store, older = written.popleft()
                    feeds[store].stored(NVME, older)
            end = time.process_time_ns()
            (later_us if turn else first_us).append((middle - begin) / 1e3 / len(together))
            event_us.append((end - middle) / 1e3 / len(together))
            for talk, prompt, held in zip(together, prompts, answers, strict=True):
                right += all(
                    held[name] == (talk.blocks if name in (talk.prefill, talk.store) else 0)
                    for name in (*PREFILL, *STORES)
                )
                talk.blocks = len(prompt)
    grown = resident_bytes(os.getpid()) - before_bytes
    blocks = sum(talk.blocks for talk in talks)
    return {
        "sessions": sessions,
        "tokens": tokens,
        "first_turn_us": _summary(first_us),
        "request_us": _summary(later_us),
        "events_us": _summary(event_us),
        "right": round(right / (sessions * turns), 4),
        "blocks": blocks,
        "grown_mib": round(grown / 2**20, 1),
        "bytes_block": round(grown / blocks, 1),
        "counted_bytes_block": round(index.n_bytes / index.blocks, 1),
    }


def _summary(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "p50": round(ordered[len(ordered) // 2], 1),
        "p99": round(ordered[len(ordered) * 99 // 100], 1),
        "mean": round(sum(ordered) / len(ordered), 1),
    }


def _in_child(sessions: int, tokens: int, turns: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.cache.prefix_index", "--row", f"{sessions},{tokens}"]
    done = subprocess.run([*command, "--turns", str(turns)], stdout=subprocess.PIPE, check=True)
    row: dict[str, Any] = json.loads(done.stdout)
    return row


def _parser() -> argparse.ArgumentParser:
    parser = bench_parser("cache.prefix_index", __doc__)
    parser.add_argument("--sessions", default="10,50,200,1000")
    parser.add_argument("--tokens", default="32000,256000", help="of a session's first prompt")
    parser.add_argument("--turns", type=int, default=10, help="of a session, at least 2")
    parser.add_argument("--row", default="", help=argparse.SUPPRESS)
    return parser


def main() -> None:
    """See the module's text."""
    parser = _parser()
    arguments = parser.parse_args()
    if arguments.turns < 2:
        parser.error("--turns must be at least 2")
    if arguments.row:
        sessions, tokens = map(int, arguments.row.split(","))
        print(json.dumps(run(sessions=sessions, tokens=tokens, turns=arguments.turns)))
        return
    report: list[dict[str, Any]] = []
    for tokens in map(int, arguments.tokens.split(",")):
        for sessions in map(int, arguments.sessions.split(",")):
            row = _in_child(sessions, tokens, arguments.turns)
            report.append(row)
            if not arguments.json:
                print(json.dumps(row), flush=True)
    if arguments.json:
        print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
