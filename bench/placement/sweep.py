"""Rules side by side over the load, from an idle fleet to a full one.

The load is the least that any rule could make of the requests: computing what one cache of all memory would
not hold, as a share of what the prefill workers can compute. The same requests come faster or slower, so
that all of them see the same prompts in the same order.

`capacity`: the highest load at which a rule's 90th percentile of the time to first token is at most
TTFT_TIMES its idle value, the lowest one of any other rule at the lowest load. Between two loads of the sweep
the percentile is taken to be a straight line.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

from bench.placement.cache import LruCache
from bench.placement.compare import Result, simulate
from bench.placement.model import Hardware
from bench.placement.policies import (
    LeastLoad,
    LendingRule,
    PrefixAware,
    SessionHash,
    Slipstream,
)
from bench.placement.sim import Policy
from bench.placement.trace import BLOCK_TOKENS, TraceRequest

LOADS = (0.2, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
TTFT_TIMES = 2.0
# Round robin was nowhere near the best.
RULES: tuple[Callable[[], Policy], ...] = (LeastLoad, SessionHash, PrefixAware, Slipstream)
# What each rule makes of workers that lend their caches, and ours of workers that do not.
LENDING: tuple[Callable[[], Policy], ...] = (
    PrefixAware,
    lambda: LendingRule(PrefixAware()),
    lambda: LendingRule(LeastLoad()),
    lambda: Slipstream(lends=False),
    Slipstream,
)


@dataclass(frozen=True, slots=True)
class Offered:
    """A load, of 1: `least` with one cache of all memory, `uncached` with none."""

    least: float
    uncached: float


def offered(requests: Sequence[TraceRequest], hardware: Hardware) -> Offered:
    """What these requests ask of the prefill workers at their own pace."""
    cache = LruCache(hardware.total_blocks)
    least_ms = uncached_ms = 0.0
    for request in requests:
        prompt = request.prompt_tokens
        held = min(cache.prefix_blocks(request.hashes) * BLOCK_TOKENS, prompt - 1)
        cache.put(request.hashes)
        least_ms += hardware.prefill.compute_ms(prompt - held, prompt)
        uncached_ms += hardware.prefill.compute_ms(prompt, prompt)
    span_ms = hardware.n_prefill * max(requests[-1].at_ms - requests[0].at_ms, 1e-9)
    return Offered(least_ms / span_ms, uncached_ms / span_ms)


def at_load(requests: Sequence[TraceRequest], least: float, hardware: Hardware) -> list[TraceRequest]:
    """The same requests, so fast that `offered(..).least` is this."""
    slower = offered(requests, hardware).least / least
    return [replace(request, at_ms=request.at_ms * slower) for request in requests]


def sweep(
    name: str,
    requests: Sequence[TraceRequest],
    hardware: Hardware,
    *,
    loads: Sequence[float] = LOADS,
    rules: Sequence[Callable[[], Policy]] = RULES,
) -> dict[str, object]:
    """Every rule at every load, and what each one's capacity is. One of the rules is ours."""
    own = offered(requests, hardware)
    rows = []
    p90_ms: dict[str, list[float]] = {}
    for least in loads:
        paced = at_load(requests, least, hardware)
        results = [simulate(paced, hardware, rule()) for rule in rules]
        for result in results:
            p90_ms.setdefault(result.rule, []).append(result.ttft_p90_ms)
        rows.append(
            {
                "least_load": least,
                "uncached_load": least * own.uncached / own.least,
                "pace": least / own.least,
                "ttft_p90_below_best_other": below_best_other(results),
                "results": [asdict(result) for result in results],
            }
        )
    others = [rule for rule in p90_ms if rule != Slipstream.name]
    limit_ms = TTFT_TIMES * min(p90_ms[rule][0] for rule in others)
    capacity = {rule: crossing(loads, values, limit_ms) for rule, values in p90_ms.items()}
    fullest = max(capacity[rule] for rule in others)
    ours_ms = value_at(loads, p90_ms[Slipstream.name], fullest)
    best_ms = min(value_at(loads, p90_ms[rule], fullest) for rule in others)
    return {
        "workload": name,
        "own_load": asdict(own),
        "loads": rows,
        "ttft_limit_ms": limit_ms,
        "capacity": capacity,
        "capacity_is": {rule: how_known(values, limit_ms) for rule, values in p90_ms.items()},
        "capacity_over_best_other": capacity[Slipstream.name] / fullest - 1,
        "ttft_p90_below_best_other_at_its_capacity": 1 - ours_ms / best_ms,
    }


def lending(name: str, requests: Sequence[TraceRequest], hardware: Hardware) -> list[dict[str, object]]:
    """At their own pace, on workers as ours and on workers that compute in order: who reads from whom."""
    forms = (("production workers", hardware), ("in order", replace(hardware, in_order=True)))
    return [
        {
            "workload": f"{name}; {form}",
            "results": [asdict(simulate(requests, workers, rule())) for rule in LENDING],
        }
        for form, workers in forms
    ]


def below_best_other(results: Sequence[Result]) -> float:
    """How far our p90 is below the best of the others', of 1."""
    ours = next(result.ttft_p90_ms for result in results if result.rule == Slipstream.name)
    best = min(result.ttft_p90_ms for result in results if result.rule != Slipstream.name)
    return 1 - ours / max(best, 1e-9)


def crossing(loads: Sequence[float], values: Sequence[float], limit: float) -> float:
    """The load at which the values first pass the limit; the first or the last load when they do not in
    between."""
    if values[0] > limit:
        return loads[0]
    for i in range(1, len(loads)):
        if values[i] > limit:
            share = (limit - values[i - 1]) / (values[i] - values[i - 1])
            return loads[i - 1] + share * (loads[i] - loads[i - 1])
    return loads[-1]


def how_known(values: Sequence[float], limit: float) -> str:
    """Whether the sweep shows where the values pass the limit: "at", or that it is "at most" the first load
    or "at least" the last one."""
    if values[0] > limit:
        return "at most"
    return "at" if any(value > limit for value in values) else "at least"


def value_at(loads: Sequence[float], values: Sequence[float], load: float) -> float:
    """The value at a load within those of the sweep."""
    i = next((i for i in range(1, len(loads)) if load <= loads[i]), len(loads) - 1)
    share = (load - loads[i - 1]) / (loads[i] - loads[i - 1])
    return values[i - 1] + share * (values[i] - values[i - 1])
