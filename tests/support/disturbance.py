"""Many streams on a real cluster, and something that breaks while they run."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bench.fault_load import Answer, FaultRequest, FaultRun, answer_of, run_streams, wrong
from slipstream.async_client import AsyncClient
from tests.support.local_cluster import LocalCluster

STAGGER_S = 0.01
_LOAD_S = 240.0


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
    """Run it; `disturb` is called once, as soon as so many tokens have come."""
    seen, waiting = 0, disturb

    def on_event(tokens: int) -> None:
        nonlocal seen, waiting
        seen += tokens
        if waiting is not None and seen >= after_tokens:
            act, waiting = waiting, None
            act()

    async def run() -> list[FaultRun]:
        async with AsyncClient(cluster.routers) as client:
            return await run_streams(client, load, on_event=on_event, stagger_s=STAGGER_S)

    runs: list[FaultRun] = cluster.call(run(), timeout_s=_LOAD_S)
    assert waiting is None, f"only {seen} tokens came: nothing was disturbed"
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
