"""A request that kills its workers, in real processes: it alone fails, with a typed error, and soon."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from bench.faults.fault_load import Answer, mixed_requests
from libs.common.cluster.worker_record import Role
from libs.common.service_bounds import DEATH_REPORT_WAIT_S
from slipstream import errors
from slipstream.async_client import AsyncClient
from slipstream.client import Client
from tests.support.clusters.altered_service import POISON_SEED
from tests.support.clusters.disturbance import DECODERS, disturbed_in_flight, undisturbed
from tests.support.clusters.fake_engines import fake_engine_config
from tests.support.clusters.local_cluster import REQUEST_S, LocalCluster, until
from tests.support.fixture_dirs import lasting_dir

LOAD = mixed_requests(14, tokens=48)


@pytest.fixture(scope="module")
def site(request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
    modules = dict.fromkeys(Role, "tests.support.clusters.altered_service")
    with lasting_dir(request, "poison") as run_dir:
        config = fake_engine_config(run_dir, pace_s=0.001, modules=modules, drafters=0, kvstores=0)
        with LocalCluster(config) as cluster:
            yield cluster


@pytest.fixture(autouse=True)
def _all_back_and_idle(site: LocalCluster) -> Iterator[None]:
    yield
    site.until_running()
    site.assert_idle()


def poison(text: str, *, at_token: int) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": text}],
        "seed": POISON_SEED + at_token,
        "temperature": 1.0,
        "max_tokens": 64,
        "ignore_eos": True,
    }


def deaths(site: LocalCluster) -> int:
    """The workers that poison has killed so far; restarts for other reasons do not count."""
    file = site.run_dir / "poisoned"
    return len(file.read_text().splitlines()) if file.exists() else 0


def settled_deaths(site: LocalCluster) -> int:
    """Wait until all killed workers run again."""
    site.until_running()
    return deaths(site)


def deaths_of_one(site: LocalCluster, text: str, *, at_token: int) -> int:
    """Send the poison request, and again with another seed: the second one is refused."""
    before = settled_deaths(site)
    request = poison(text, at_token=at_token)
    with Client(site.routers[0], timeout_s=REQUEST_S) as client:
        with pytest.raises(errors.Quarantined):
            client.chat(**request)

        def is_known() -> bool:
            """Whether the router refuses the request, when it has a worker for it."""
            try:
                client.chat(**{**request, "seed": 7})
            except errors.Quarantined:
                return True
            except errors.Unavailable:
                return False
            raise AssertionError("it ran again")

        until(is_known, what="the poison request is refused")
    return settled_deaths(site) - before


@pytest.mark.parametrize("at_token", [0, 6])
def test_the_second_death_is_the_last_one(site: LocalCluster, at_token: int) -> None:
    """The death is in prefill, or after some decoded tokens. On a machine that stalls a death may look like
    silence, which does not count: then the third death is the last one, and the test runs again."""
    for attempt in range(4):
        died = deaths_of_one(site, f"poison {attempt} at {at_token}", at_token=at_token)
        assert 2 <= died <= 3
        if died == 2:
            return
    raise AssertionError("a third worker died, each time")


def crowd_with_poison(site: LocalCluster, expected: list[Answer], text: str, *, at_token: int) -> int:
    """Send poison among streams in flight at both routers; returns the number of workers that died."""
    before = settled_deaths(site)
    fate: list[BaseException] = []

    async def send() -> None:
        async with AsyncClient(site.routers[0], timeout_s=REQUEST_S) as client:
            try:
                await client.chat(**poison(text, at_token=at_token))
            except errors.SlipstreamError as error:
                fate.append(error)

    def poison_them() -> None:
        """Wait until the poison runs among the held streams, or has ended after killing prefill workers."""
        sending = threading.Thread(target=lambda: site.call(send(), timeout_s=2 * REQUEST_S), daemon=True)
        sending.start()
        until(lambda: fate or sum(map(site.sequences, DECODERS)) > len(LOAD), what="poison runs in the batch")
        site.gate.open()
        sending.join()

    disturbed_in_flight(site, LOAD, expected, disturb=poison_them)
    assert isinstance(fate[0], errors.Quarantined)
    return settled_deaths(site) - before


def test_nothing_else_fails_with_it(site: LocalCluster) -> None:
    expected = undisturbed(site, LOAD)
    assert crowd_with_poison(site, expected, "poison in a crowd", at_token=3) <= 4


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_nothing_else_fails_with_any_of_them(site: LocalCluster) -> None:
    """The poison kills in the step of the prefill, in the first steps of decode, and in later ones."""
    expected = undisturbed(site, LOAD)
    deaths_of = {
        at_token: crowd_with_poison(site, expected, f"poison number {at_token}", at_token=at_token)
        for at_token in (0, 1, 2, 5, 9, 15, 16, 24, 40)
    }
    print(f"deaths by the token that kills: {deaths_of}")
    assert max(deaths_of.values()) <= 4


def its_decoder(site: LocalCluster) -> str:
    """The decode worker of the only request, once others have let their sequences go."""
    found: list[str] = []

    def is_alone() -> bool:
        found[:] = [name for name in DECODERS if site.sequences(name)]
        return len(found) == 1

    until(is_alone, what=lambda: f"one decode worker runs the stream: {found}")
    return found[0]


def test_a_lone_stream_outlives_workers_that_others_kill(site: LocalCluster) -> None:
    """Its worker dies twice soon after the stream began, and the router does not blame the stream."""
    with Client(site.routers[0], timeout_s=REQUEST_S) as client:
        messages = [{"role": "user", "content": "killed from outside"}]
        options: dict[str, Any] = {"temperature": 0.0, "max_tokens": 120, "ignore_eos": True}
        undisturbed_text = client.chat(messages, **options).text
        with ExitStack() as held:
            held.enter_context(site.gate.held(*DECODERS, from_token=10))
            stream = client.stream_chat(messages, session="outside", **options)
            tokens = iter(event.completion_tokens for event in stream)
            for made in (10, 80):
                held.enter_context(site.gate.held(*DECODERS, from_token=made))
                while next(tokens) <= made // 2:
                    pass
                running = its_decoder(site)
                os.kill(site.pid(running), signal.SIGKILL)
        for _ in tokens:
            pass
        assert stream.reply.text == undisturbed_text


@pytest.mark.parametrize("has_etcd", [True, False], ids=["", "without etcd"])
def test_a_request_alone_is_not_blamed_for_workers_that_are_killed_at_its_first_tokens(
    site: LocalCluster, *, has_etcd: bool
) -> None:
    """Its worker is killed twice without progress in between; exit reports of the supervisor clear it.

    While etcd is stopped there are none, and nothing is decided.
    """
    etcd = site.pid("etcd")
    with Client(site.routers[0], timeout_s=REQUEST_S) as client:
        messages = [{"role": "user", "content": f"killed from outside at once, {has_etcd}"}]
        options: dict[str, Any] = {"temperature": 0.0, "max_tokens": 100, "ignore_eos": True}
        undisturbed_text = client.chat(messages, **options).text
        with site.gate.held(*DECODERS, from_token=3):
            stream = client.stream_chat(messages, **options)
            tokens = iter(event.completion_tokens for event in stream)
            while next(tokens) < 2:
                pass
            try:
                if not has_etcd:
                    os.kill(etcd, signal.SIGSTOP)
                for _ in range(2):
                    until(lambda: any(site.sequences(n) for n in DECODERS), what="it runs")
                    running = its_decoder(site)
                    os.kill(site.pid(running), signal.SIGKILL)
                    until(lambda n=running: not site.sequences(n), what="it is gone")  # type: ignore[misc]
                if not has_etcd:  # as long as the router waits for a report
                    time.sleep(2 * DEATH_REPORT_WAIT_S)
            finally:
                os.kill(etcd, signal.SIGCONT)
        for _ in tokens:
            pass
        assert stream.reply.text == undisturbed_text
