"""`slipstream drain` and `restart`: what they wait for, and what they say when it does not come."""

from __future__ import annotations

import asyncio
import io
import signal
import sys
from collections.abc import AsyncIterator

import pytest

from libs.common.runtime.exit_codes import HUNG
from slipstream.cli.access import OperatorAccess
from slipstream.credentials.user_name import user_name
from slipstream.errors import DeadlineExceeded, FailedPrecondition, Internal, NotFound
from slipstream.rpc.dial import PLAIN_DIAL
from supervisor.cluster import ClusterSupervisor
from supervisor.commands.drain import drain_process, restart_all, restart_process, undrain_process
from supervisor.commands.status import show_named
from supervisor.commands.up import say
from supervisor.drain_marks import drained_by
from supervisor.process_state import how_ended
from tests.supervisor.conftest import FakeCluster, fake
from tests.support.clusters.supervised import supervised
from tests.support.processes.process_checks import eventually

__all__ = ["fake"]

WAIT_S = 100.0


@pytest.fixture
def said() -> list[str]:
    """What the terminal of the supervisor shows."""
    return []


@pytest.fixture
async def running(fake: FakeCluster, said: list[str]) -> AsyncIterator[ClusterSupervisor]:
    fake.behave(decode_0="breaks", prefill_0="deaf")
    config = fake.but(prefill=1, decode=1, kvstores=1, drafters=0, grace_s=0.2)
    async with supervised(config, say=said.append) as cluster:
        yield cluster


async def test_only_an_end_in_order_is_a_drain(
    running: ClusterSupervisor, fake: FakeCluster, said: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = fake.config.run_dir

    async def drain(name: str, timeout_s: float = WAIT_S) -> None:
        await asyncio.to_thread(drain_process, run_dir, name, timeout_s=timeout_s)

    await drain("kvstore-0")
    assert capsys.readouterr().out.startswith("drained kvstore-0 in ")
    ended = running.record().find("kvstore-0")
    assert (ended.state, ended.exit_code, ended.pid) == ("drained", 0, None)
    await drain("kvstore-0")
    assert capsys.readouterr().out == "kvstore-0 is drained already\n"
    with pytest.raises(
        Internal, match=r"decode-0 did not drain: it ended with exit code 5; see .*decode-0\.log"
    ):
        await drain("decode-0")
    assert running.record().find("decode-0").state == "drained"
    with pytest.raises(DeadlineExceeded, match=r"prefill-0 has not ended after 0\.5 s"):
        await drain("prefill-0", timeout_s=0.5)
    with pytest.raises(FailedPrecondition, match="etcd keeps the cluster's state"):
        await drain("etcd")
    with pytest.raises(NotFound, match="no process 'decode-9'; there are etcd, kvstore-0"):
        await drain("decode-9")
    await asyncio.to_thread(restart_process, run_dir, "kvstore-0", timeout_s=WAIT_S)
    await eventually(lambda: running.record().find("kvstore-0").state == "ready")
    assert [line for line in said if line.startswith("kvstore-0 ")] == [
        f"kvstore-0 is drained: {user_name()} asked for it",
        "kvstore-0 is undrained; starting it again",
    ]


async def test_what_cannot_be_drained_can_start_later(running: ClusterSupervisor, fake: FakeCluster) -> None:
    run_dir = fake.config.run_dir

    async def drain() -> None:
        await asyncio.to_thread(drain_process, run_dir, "kvstore-0", timeout_s=WAIT_S)

    await running.hold("kvstore-0")
    await eventually(lambda: running.record().find("kvstore-0").state == "held")
    with pytest.raises(NotFound, match="kvstore-0 is not running at the moment"):
        await drain()
    assert not drained_by(run_dir, "kvstore-0")
    await running.release("kvstore-0")
    (run_dir / "drained").write_text("")  # no marks can be made there
    with pytest.raises(FailedPrecondition, match="kvstore-0 cannot be written: "):
        await drain()
    assert running.record().find("kvstore-0").state == "ready"


async def test_undrain_of_a_process_that_still_ends_lets_it_start_again(
    running: ClusterSupervisor, fake: FakeCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, name = fake.config.run_dir, "prefill-0"

    async def undrain(timeout_s: float) -> None:
        await asyncio.to_thread(undrain_process, run_dir, name, timeout_s=timeout_s, dial=PLAIN_DIAL)

    with pytest.raises(DeadlineExceeded, match="has not ended"):
        await asyncio.to_thread(drain_process, run_dir, name, timeout_s=0.2)
    assert drained_by(run_dir, name)
    with pytest.raises(DeadlineExceeded, match=r"prefill-0 ends, and is not back after 0\.2 s"):
        await undrain(0.2)
    assert not drained_by(run_dir, name)
    with pytest.raises(DeadlineExceeded, match="has not ended"):
        await asyncio.to_thread(drain_process, run_dir, name, timeout_s=0.2)
    undraining = asyncio.create_task(undrain(WAIT_S))
    await eventually(lambda: not drained_by(run_dir, name))
    running.kill(name)
    await undraining
    assert running.record().find(name).state == "ready"
    assert capsys.readouterr().out == "prefill-0 takes work\n"


async def test_a_rolling_restart_waits_for_a_process_that_backs_off(
    fake: FakeCluster, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("supervisor.process._FIRST_PAUSE_S", 2.0)
    config = fake.but(prefill=1, decode=1, kvstores=0, drafters=0)
    async with supervised(config, say=said.append) as running:
        before = {each.instance: each.pid for each in running.record().processes}
        running.kill("decode-0")
        await eventually(lambda: running.record().find("decode-0").state == "backing off")
        await asyncio.to_thread(restart_all, config.run_dir, timeout_s=WAIT_S, dial=PLAIN_DIAL)
        for each in running.record().processes:
            assert each.state == "ready"
            assert (each.pid == before[each.instance]) == (not each.has_worker_service), each.instance


async def test_a_process_that_is_down_has_a_status(running: ClusterSupervisor, fake: FakeCluster) -> None:
    """No router knows it; the supervisor does."""
    run_dir = fake.config.run_dir

    async def words(name: str) -> str:
        with pytest.raises(FailedPrecondition) as refused:
            await show_named(OperatorAccess(run_dir, (), {}), name, as_json=False)
        return refused.value.message

    await asyncio.to_thread(drain_process, run_dir, "kvstore-0", timeout_s=WAIT_S)
    drained = (
        f"kvstore-0 is drained: {user_name()} asked for it; it ended with exit code 0; "
        "`slipstream undrain kvstore-0` starts it"
    )
    assert await words("kvstore-0") == drained == await words("kvstore/kvstore-0")
    await running.hold("decode-0")
    await eventually(lambda: running.record().find("decode-0").state == "held")
    log = running.record().find("decode-0").log
    assert (
        await words("decode-0") == f"decode-0 does not serve, it is held; it was ended by SIGKILL; see {log}"
    )


def test_ends_have_words_whatever_ended_it() -> None:
    assert how_ended(5) == "ended with exit code 5"
    assert how_ended(HUNG) == "ended while a part of it hung (exit code 70)"
    assert how_ended(-signal.SIGKILL) == "was ended by SIGKILL"
    assert how_ended(-signal.SIGRTMIN - 1) == f"was ended by signal {signal.SIGRTMIN + 1}"


def test_a_supervisor_whose_words_find_no_room_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "wb", buffering=0) as full:
        stderr = io.TextIOWrapper(full, write_through=True)
        with pytest.raises(OSError, match="No space left"):
            print("ready", file=stderr, flush=True)
        monkeypatch.setattr(sys, "stderr", stderr)
        say("ready")
        monkeypatch.undo()
