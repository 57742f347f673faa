"""Where a request runs: (request, fleet) -> (prefill, decode, kvstore, reason). Pure.

Each tier is chosen by predicted milliseconds

    prefill  (tokens in flight + tokens to compute) / tokens per second + load of stored blocks
    decode   step time x (1 + share of the worker's tokens in flight) + transfer of the missing blocks

among the workers whose load is bounded: tokens in flight <= 1.25 x (all tokens in flight + this
request's) / workers. So affinity, which saves compute or transfer on the worker that holds the
session's KV, yields to load: no worker is ever given more than 1.25 times its fair share plus one
request (bounded-load hashing, Mirrokni et al. 2018; factor of production systems: peers' 1.25).
Equal costs are settled by a draw from the request's seed.

    python -m services.router.placement fleet.json request.json     prints the decision
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from libs.common.errors import Unavailable

LOAD_BOUND = 1.25
# Used until a worker has reported its own.
DEFAULT_PREFILL_TOKENS_PER_S = 2_000.0
DEFAULT_STEP_MS = 20.0
# Loading a stored token's KV instead of computing it, and pulling one from prefill to decode.
LOAD_MS_PER_TOKEN = 0.02
TRANSFER_MS_PER_TOKEN = 0.02
# A decode step grows by its own length with this many context tokens in flight.
TOKENS_THAT_DOUBLE_A_STEP = 16_384


@dataclass(frozen=True, slots=True)
class PrefillLoad:
    """One prefill worker. `tokens_in_flight`: uncached prompt tokens sent to it and not yet computed."""

    instance: str
    tokens_in_flight: int = 0
    tokens_per_s: float = 0.0  # 0 = not known


@dataclass(frozen=True, slots=True)
class DecodeLoad:
    """One decode worker. `tokens_in_flight`: context tokens of what runs there."""

    instance: str
    tokens_in_flight: int = 0
    step_ms: float = 0.0  # 0 = not known


@dataclass(frozen=True, slots=True)
class FleetLoad:
    """The workers that may be chosen now."""

    prefill: tuple[PrefillLoad, ...]
    decode: tuple[DecodeLoad, ...]
    kvstores: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Wish:
    """What placement needs to know of a request.

    `stored_tokens` of the prompt have KV in `kvstore` and, cached, on `last_prefill` and
    `last_decode` (instances; "" = none). `content_key` spreads requests without a kvstore so that
    equal prompts meet.
    """

    prompt_tokens: int
    seed: int
    stored_tokens: int = 0
    last_prefill: str = ""
    last_decode: str = ""
    kvstore: str = ""
    content_key: bytes = b""
    pinned_prefill: str = ""
    may_skip_prefill: bool = False  # run the prompt on the decode worker when no prefill worker is there


@dataclass(frozen=True, slots=True)
class Decision:
    """Where to run. `prefill` "": the decode worker computes the prompt itself."""

    prefill: str
    decode: str
    kvstore: str
    reason: str


def place(wish: Wish, fleet: FleetLoad) -> Decision:
    """Raises Unavailable when a tier has no worker."""
    if not fleet.decode:
        raise Unavailable("no decode worker is ready")
    draw = random.Random(wish.seed)
    prefill, why_prefill = _prefill(wish, fleet.prefill, draw)
    decode, why_decode = _decode(wish, fleet.decode, draw)
    return Decision(
        prefill=prefill,
        decode=decode,
        kvstore=_kvstore(wish, fleet.kvstores),
        reason=f"prefill {why_prefill}; decode {why_decode}",
    )


def _prefill(wish: Wish, workers: Sequence[PrefillLoad], draw: random.Random) -> tuple[str, str]:
    if wish.pinned_prefill:
        if all(worker.instance != wish.pinned_prefill for worker in workers):
            raise Unavailable(f"prefill worker {wish.pinned_prefill} is not ready")
        return wish.pinned_prefill, "pinned"
    if not workers:
        if wish.may_skip_prefill:
            return "", "none is ready: the decode worker computes the prompt"
        raise Unavailable("no prefill worker is ready")
    uncached = wish.prompt_tokens - wish.stored_tokens

    def predicted_ms(worker: PrefillLoad) -> float:
        rate = worker.tokens_per_s or DEFAULT_PREFILL_TOKENS_PER_S
        load_ms = 0.0 if worker.instance == wish.last_prefill else wish.stored_tokens * LOAD_MS_PER_TOKEN
        return (worker.tokens_in_flight + uncached) / rate * 1e3 + load_ms

    return _choose(workers, uncached, wish.last_prefill, predicted_ms, draw)


def _decode(wish: Wish, workers: Sequence[DecodeLoad], draw: random.Random) -> tuple[str, str]:
    def predicted_ms(worker: DecodeLoad) -> float:
        step_ms = worker.step_ms or DEFAULT_STEP_MS
        held = wish.stored_tokens if worker.instance == wish.last_decode else 0
        transfer_ms = (wish.prompt_tokens - held) * TRANSFER_MS_PER_TOKEN
        return step_ms * (1 + worker.tokens_in_flight / TOKENS_THAT_DOUBLE_A_STEP) + transfer_ms

    return _choose(workers, wish.prompt_tokens, wish.last_decode, predicted_ms, draw)


def _choose(
    workers: Sequence[Any],
    incoming_tokens: int,
    last: str,
    predicted_ms: Callable[[Any], float],
    draw: random.Random,
) -> tuple[str, str]:
    """The cheapest worker of those within the load bound; there always is one, the least loaded."""
    total = sum(worker.tokens_in_flight for worker in workers) + incoming_tokens
    bound = LOAD_BOUND * total / len(workers)
    eligible = [worker for worker in workers if worker.tokens_in_flight <= bound]
    costs = {worker.instance: predicted_ms(worker) for worker in eligible}
    cheapest = min(costs.values())
    best = sorted(instance for instance, cost in costs.items() if cost <= cheapest)
    chosen: str = last if last in best else draw.choice(best)
    if chosen == last:
        why = "holds the session's KV"
    elif any(worker.instance == last for worker in workers):
        why = f"{last} holds the session's KV but is busier"
    else:
        why = "has the least to do"
    return chosen, f"{chosen} {why} ({costs[chosen]:.1f} ms)"


def _kvstore(wish: Wish, kvstores: Sequence[str]) -> str:
    """The session's, else by rendezvous hashing of the content, so that equal prompts share blocks."""
    if wish.kvstore in kvstores or not kvstores:
        return wish.kvstore if wish.kvstore in kvstores else ""
    return max(kvstores, key=lambda name: hashlib.blake2b(wish.content_key + name.encode()).digest())


def main(fleet_path: str, request_path: str) -> None:
    """Print the decision for a fleet and a request in JSON, in the fields of the classes above."""
    fleet = json.loads(Path(fleet_path).read_text())
    request = json.loads(Path(request_path).read_text())
    request["content_key"] = bytes.fromhex(request.get("content_key", ""))
    decision = place(
        Wish(**request),
        FleetLoad(
            prefill=tuple(PrefillLoad(**worker) for worker in fleet["prefill"]),
            decode=tuple(DecodeLoad(**worker) for worker in fleet["decode"]),
            kvstores=tuple(fleet.get("kvstores", ())),
        ),
    )
    print(json.dumps(asdict(decision), indent=2))


if __name__ == "__main__":
    main(*sys.argv[1:3])
