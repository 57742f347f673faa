"""Many streams on a real cluster, and a fault while they run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from bench.faults.fault_load import Answer, FaultRequest, FaultRun, answer_of, run_streams, wrong
from slipstream.async_client import AsyncClient
from tests.support.clusters.local_cluster import PATIENCE_S, LocalCluster, until

STAGGER_S = 0.01
# Held streams stop after this many tokens, or before.
HELD_FROM = 8
PREFILLERS, DECODERS = ("prefill-0", "prefill-1"), ("decode-0", "decode-1")
_LOAD_S = 2 * PATIENCE_S


def undisturbed(cluster: LocalCluster, load: Sequence[FaultRequest]) -> list[Answer]:
    """The answers of a run without a fault, which every later run must give."""
    runs = run_load(cluster, load)
    assert not [run.error for run in runs if run.error]
    return [answer_of(run) for run in runs]


def run_load(
    cluster: LocalCluster,
    load: Sequence[FaultRequest],
    *,
    disturb: Callable[[], None] | None = None,
    after_tokens: int = 0,
) -> list[FaultRun]:
    """Run the load; a thread calls `disturb` once, after `after_tokens` tokens. `disturb` may block, and its
    errors are raised here."""

    # The load reuses its ids, so the routers must have released them.
    until(lambda: not any(map(cluster.holds, cluster.router_names)), what="routers idle")

    async def run() -> list[FaultRun]:
        seen, reached = 0, asyncio.Event()

        def on_event(tokens: int) -> None:
            nonlocal seen
            seen += tokens
            if seen >= after_tokens:
                reached.set()

        async def disturb_when_reached() -> None:
            await reached.wait()
            if disturb is not None:
                await asyncio.to_thread(disturb)

        async with AsyncClient(cluster.routers, resume_within_s=PATIENCE_S) as client:
            streams = asyncio.create_task(
                run_streams(client, load, on_event=on_event, stagger_s=STAGGER_S, timeout_s=_LOAD_S)
            )
            disturbing = asyncio.create_task(disturb_when_reached())
            try:
                await asyncio.wait({streams, disturbing}, return_when=asyncio.FIRST_COMPLETED)
                if disturbing.done():
                    disturbing.result()
                runs = await streams
                assert reached.is_set(), f"only {seen} tokens arrived: the fault was not injected"
                await disturbing
            finally:
                for task in (streams, disturbing):
                    task.cancel()
                await asyncio.gather(streams, disturbing, return_exceptions=True)
        return runs

    runs: list[FaultRun] = cluster.call(run(), timeout_s=2 * _LOAD_S)
    return runs


def assert_undisturbed(
    cluster: LocalCluster,
    load: Sequence[FaultRequest],
    expected: Sequence[Answer],
    *,
    disturb: Callable[[], None],
    after_tokens: int,
) -> list[FaultRun]:
    """Run the load with `disturb`, and assert that no stream fails or has a wrong answer."""
    runs = run_load(cluster, load, disturb=disturb, after_tokens=after_tokens)
    problems = wrong(runs, expected)
    assert not problems, "\n".join(problems)
    return runs


def disturbed_in_flight(
    cluster: LocalCluster,
    load: Sequence[FaultRequest],
    expected: Sequence[Answer],
    *,
    disturb: Callable[[], None],
) -> list[FaultRun]:
    """As `assert_undisturbed`, with every stream in flight when `disturb` runs.

    Each prefill has ended, and held decode engines still have most tokens to make. They continue when
    `disturb` returns."""
    n_held = sum(answer.completion_tokens > HELD_FROM for answer in expected)
    assert n_held > 0

    def in_flight() -> bool:
        ledgers = {name: cluster.status(name).ledger for name in (*PREFILLERS, *DECODERS)}
        if any(ledgers[name].sequences or ledgers[name].handoffs for name in PREFILLERS):
            return False
        return sum(ledgers[name].sequences for name in DECODERS) >= n_held

    with cluster.gate.held(*DECODERS, from_token=HELD_FROM) as gate:

        def disturb_them() -> None:
            until(in_flight, what=f"{n_held} streams at the decode workers")
            disturb()
            gate.open()

        return assert_undisturbed(cluster, load, expected, disturb=disturb_them, after_tokens=1)


def attempts_of(runs: Sequence[FaultRun]) -> list[int]:
    """The number of attempts of each run."""
    return [run.reply.stats.attempts for run in runs if run.reply.stats is not None]
