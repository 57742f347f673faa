"""A worker that stops ends within seconds, whatever its step and the copies that wait for it do."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from libs.common.runtime.exit_codes import HUNG, MODEL_UNUSABLE
from libs.common.transport.registered_memory import PAGE_BYTES, PageAlignedMemory
from libs.engine.core.fake import build_fake_engine
from libs.engine.step.turn_lock import TurnLock
from libs.worker.engine import model_thread
from libs.worker.engine.engine_thread import EngineThread
from libs.worker.engine.page_exporter import PageExporter
from libs.worker.engine.page_memory import PageMemory
from libs.worker.process.bounded_end import BoundedEnd

SHORT_S = 0.05
WAIT_S = 60.0


class HungParts:
    """Parts of pages whose collection waits for a step in progress, as those of a group do."""

    def __init__(self, turn: TurnLock) -> None:
        self.turn = turn
        self.waits = threading.Event()

    def collect(self, pages: list[int]) -> None:
        self.waits.set()
        with self.turn:
            pass


def exporter_of(parts: HungParts) -> PageExporter:
    memory = PageAlignedMemory(8 * PAGE_BYTES)
    info = SimpleNamespace(page_bytes=PAGE_BYTES, n_pages=8)
    engine: Any = SimpleNamespace(
        info=info, memory=memory.buffer, memory_address=memory.address, page_parts=parts
    )
    transport: Any = SimpleNamespace(add_destination=lambda buffer: None, register=lambda buffer: None)
    return PageExporter(PageMemory(engine), transport, staging_bytes=4 * PAGE_BYTES)


async def finished(end: BoundedEnd) -> list[int]:
    """The statuses with which `finish` would end the process."""
    statuses: list[int] = []
    await end.finish(end=statuses.append)
    return statuses


async def test_a_collection_that_waits_for_a_hung_step_is_no_reason_to_stay(
    caplog: pytest.LogCaptureFixture,
) -> None:
    turn = TurnLock()
    parts, end = HungParts(turn), BoundedEnd(close_s=WAIT_S, threads_s=SHORT_S)
    with turn:  # the step
        exporting = asyncio.ensure_future(exporter_of(parts).export([1], is_read=True))
        await asyncio.to_thread(parts.waits.wait, WAIT_S)
        exporting.cancel()
        assert await finished(end) == [HUNG]
    assert f"the process ends with status {HUNG} while parts of it hang: loop-pool_" in caplog.text
    assert " > HungParts.collect:" in caplog.text


async def test_a_step_that_hangs_is_no_end_in_order(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a decode worker, with its draft head or without."""
    monkeypatch.setattr(model_thread, "MODEL_STOP_S", SHORT_S)
    end, go, waits = BoundedEnd(close_s=WAIT_S, threads_s=SHORT_S), threading.Event(), threading.Event()

    def hang(rows: Any) -> Any:
        waits.set()
        go.wait(WAIT_S)

    listener: Any = SimpleNamespace(on_blocks=lambda changes: None)
    thread = EngineThread(build_fake_engine, listener)
    await thread.start()
    thread.submit(hang)
    await asyncio.to_thread(waits.wait, WAIT_S)
    await end.close(thread.stop)
    assert "the engine thread did not end within 0.05 s" in caplog.text
    assert await finished(end) == [HUNG]
    assert "while parts of it hang: engine in " in caplog.text
    assert f" > {hang.__qualname__}:" in caplog.text
    go.set()
    assert await finished(BoundedEnd(close_s=WAIT_S, threads_s=WAIT_S)) == []


async def test_threads_that_end_in_time_leave_the_end_to_the_interpreter() -> None:
    end = BoundedEnd(close_s=WAIT_S, threads_s=WAIT_S)
    begun, go = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        go.wait(WAIT_S)

    working = asyncio.ensure_future(asyncio.to_thread(work))
    await asyncio.to_thread(begun.wait, WAIT_S)
    with ThreadPoolExecutor(1) as others:  # another pool, with an idle thread
        others.submit(lambda: None).result(WAIT_S)
        asyncio.get_running_loop().call_later(SHORT_S, go.set)
        assert await finished(end) == []
    await working


async def test_a_close_that_hangs_is_cut(caplog: pytest.LogCaptureFixture) -> None:
    end = BoundedEnd(close_s=SHORT_S, threads_s=WAIT_S)
    unset = asyncio.Event()

    async def close() -> None:
        await unset.wait()

    await end.close(close)
    assert "did not close within 0.05 s" in caplog.text
    assert await finished(end) == [HUNG]
    assert re.search(rf"hang: the worker's end in {close.__qualname__}:\d+ > Event.wait:", caplog.text)


async def test_a_hanging_thread_does_not_hide_the_status_of_a_failure() -> None:
    end, go = BoundedEnd(close_s=WAIT_S, threads_s=SHORT_S), threading.Event()
    waiting = asyncio.ensure_future(asyncio.to_thread(go.wait, WAIT_S))
    await asyncio.sleep(0)
    statuses: list[int] = []
    await end.finish(MODEL_UNUSABLE, statuses.append)
    assert statuses == [MODEL_UNUSABLE]
    go.set()
    await waiting


@pytest.mark.parametrize("error", [TimeoutError, ValueError])
async def test_errors_of_a_close_are_raised(error: type[Exception]) -> None:
    async def fail() -> None:
        raise error("of the transport")

    end = BoundedEnd(close_s=WAIT_S, threads_s=WAIT_S)
    with pytest.raises(error, match="of the transport"):
        await end.close(fail)
    assert await finished(end) == []


def run(text: str, check: Callable[[subprocess.Popen[bytes]], int]) -> int:
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(text)])
    try:
        return check(process)
    finally:
        process.kill()
        process.wait()


def test_a_process_with_a_thread_that_hangs_ends() -> None:
    """As `run_worker` ends; the interpreter alone would wait for the thread."""
    text = """
        import asyncio, threading
        from libs.worker.process.bounded_end import BoundedEnd

        async def main():
            end = BoundedEnd(close_s=60, threads_s=0.1)
            begun = threading.Event()

            def hang():
                begun.set()
                threading.Event().wait()

            hanging = asyncio.ensure_future(asyncio.to_thread(hang))
            await asyncio.to_thread(begun.wait)
            await end.finish()

        asyncio.run(main())
    """
    assert run(text, lambda process: process.wait(WAIT_S)) == HUNG


def test_a_worker_that_cannot_start_ends_while_a_thread_hangs() -> None:
    text = """
        import asyncio, sys, threading
        from libs.common.cluster.worker_record import Role
        from libs.worker.process.app import WorkerApp
        from libs.worker.process.process import run_worker
        from services.decode.settings import DecodeSettings
        from slipstream.errors import FailedPrecondition

        class Refused(WorkerApp):
            async def open(self, endpoint, discovery, stop):
                begun = threading.Event()

                def hang():
                    begun.set()
                    threading.Event().wait()

                asyncio.ensure_future(asyncio.to_thread(hang))
                await asyncio.to_thread(begun.wait)
                raise FailedPrecondition("no room here")

            async def close(self):
                pass

        Refused.__abstractmethods__ = frozenset()
        settings = DecodeSettings(instance="d0", listen="127.0.0.1:0", admin_http="127.0.0.1:0")
        sys.exit(run_worker(Role.DECODE, settings, lambda: Refused(settings)))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text)], capture_output=True, text=True, timeout=WAIT_S
    )
    assert done.returncode == 1
    assert "d0 cannot start: no room here" in done.stderr
    assert "the process ends with status 1 while parts of it hang: loop-pool_" in done.stderr
