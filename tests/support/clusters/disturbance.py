"""Many streams on a real cluster, and something that breaks while they run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from bench.faults.fault_load import Answer, FaultRequest, FaultRun, answer_of, run_streams, wrong
from slipstream.async_client import AsyncClient
from tests.support.clusters.local_cluster import PATIENCE_S, LocalCluster, until

STAGGER_S = 0.01
# Streams that are held stand after so many tokens, or before.
HELD_FROM = 8
PREFILLERS, DECODERS = ("prefill-0", "prefill-1"), ("decode-0", "decode-1")
_LOAD_S = 2 * PATIENCE_S


def undisturbed(cluster: LocalCluster, load: Sequence[FaultRequest]) -> list[Answer]:
    """The answers that every later run must give."""
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
    """Run it; `disturb` is called once, in a thread, as soon as so many tokens have come. It may wait for
    what it needs; its errors are raised here."""

    # The ids are used again as soon as the routers have let go of them.
    until(lambda: not any(map(cluster.holds, cluster.router_names)), what="routers idle")

    async def run() -> list[FaultRun]:
        seen, struck = 0, asyncio.Event()

        def on_event(tokens: int) -> None:
            nonlocal seen
            seen += tokens
            if seen >= after_tokens:
                struck.set()

        async def strike() -> None:
            await struck.wait()
            if disturb is not None:
                await asyncio.to_thread(disturb)

        async with AsyncClient(cluster.routers, resume_within_s=PATIENCE_S) as client:
            streams = asyncio.create_task(
                run_streams(client, load, on_event=on_event, stagger_s=STAGGER_S, timeout_s=_LOAD_S)
            )
            striking = asyncio.create_task(strike())
            try:
                await asyncio.wait({streams, striking}, return_when=asyncio.FIRST_COMPLETED)
                if striking.done():
                    striking.result()
                runs = await streams
                assert struck.is_set(), f"only {seen} tokens came: nothing was disturbed"
                await striking
            finally:
                for task in (streams, striking):
                    task.cancel()
                await asyncio.gather(streams, striking, return_exceptions=True)
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
    """0 failed, 0 wrong, whatever `disturb` does."""
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
    """As `assert_undisturbed`, and `disturb` meets every stream in flight: its prefill is over, and the
    decode engines, which stand still, have most of its tokens to make. They go on when `disturb` returns."""
    lasting = sum(answer.completion_tokens > HELD_FROM for answer in expected)
    assert lasting > 0

    def in_flight() -> bool:
        ledgers = {name: cluster.status(name).ledger for name in (*PREFILLERS, *DECODERS)}
        if any(ledgers[name].sequences or ledgers[name].handoffs for name in PREFILLERS):
            return False
        return sum(ledgers[name].sequences for name in DECODERS) >= lasting

    with cluster.gate.held(*DECODERS, from_token=HELD_FROM) as gate:

        def disturb_them() -> None:
            until(in_flight, what=f"{lasting} streams at the decode workers")
            disturb()
            gate.open()

        return assert_undisturbed(cluster, load, expected, disturb=disturb_them, after_tokens=1)


def attempts_of(runs: Sequence[FaultRun]) -> list[int]:
    """How many attempts each took."""
    return [run.reply.stats.attempts for run in runs if run.reply.stats is not None]
