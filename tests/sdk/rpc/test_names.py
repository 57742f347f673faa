"""Waiting for names that resolve late."""

from __future__ import annotations

import asyncio
import logging
import socket

import pytest

from slipstream.rpc.names import is_name, wait_resolved


class _Names:
    """A name server that knows nothing for the first `n_failures` questions, at a clock that tests move."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, n_failures: int) -> None:
        self.now_s, self.pauses_s = 0.0, list[float]()
        self._left = n_failures

        async def sleep(pause_s: float) -> None:
            self.pauses_s.append(pause_s)
            self.now_s += pause_s

        monkeypatch.setattr(asyncio, "sleep", sleep)

    async def resolve(self, host: str) -> object:
        assert host == "etcd-0.test"
        self._left -= 1
        if self._left >= 0:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return None

    async def wait(self) -> bool:
        return await wait_resolved(
            "etcd-0.test:2379", what="etcd", resolve=self.resolve, clock=lambda: self.now_s
        )


async def test_addresses_and_known_names_need_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(host: str) -> object:
        raise AssertionError(host)

    for endpoint in ("127.0.0.1:1", "[::1]:1"):
        assert not is_name(endpoint)
        assert await wait_resolved(endpoint, what="x", resolve=never) is False
    assert is_name("localhost:1") and is_name("etcd-0.test:2379")
    assert await wait_resolved("localhost:1", what="x") is False
    known = _Names(monkeypatch, n_failures=0)
    assert await known.wait() is False
    assert known.pauses_s == []


async def test_an_unknown_name_is_asked_for_at_bounded_intervals_with_a_few_log_lines(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    late = _Names(monkeypatch, n_failures=60)
    with caplog.at_level(logging.INFO):
        assert await late.wait() is True
    assert len(late.pauses_s) == 60 and max(late.pauses_s) == 2.0 and late.pauses_s[0] < 0.2
    waiting = [line for line in caplog.messages if "does not resolve" in line]
    assert 3 <= len(waiting) <= 5, "one at once, then one each half minute"
    assert all("etcd: the name etcd-0.test" in line and "Name or service" in line for line in waiting)
    assert "resolves after 11" in caplog.messages[-1]


async def test_a_wait_ends_with_its_task() -> None:
    async def unknown(host: str) -> object:
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    waiting = asyncio.create_task(wait_resolved("gone.test:1", what="x", resolve=unknown))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


@pytest.mark.parametrize("host", ["a..b", "x" * 64])
async def test_a_text_that_is_no_name_does_not_end_the_wait(
    host: str, caplog: pytest.LogCaptureFixture
) -> None:
    waiting = asyncio.create_task(wait_resolved(f"{host}:1", what="etcd"))
    async with asyncio.timeout(60):
        while f"the name {host} does not resolve" not in caplog.text:
            await asyncio.sleep(0.01)
    assert not waiting.done()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
