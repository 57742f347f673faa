"""Stop signals of a service: before it serves, while it serves, while it drains; also as process 1."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
WAIT_S = 100.0

# Prints what it does. It waits for a signal in a thread's work as a start does, or drains until it is killed.
_PROGRAM = """
import asyncio, functools, signal, sys, time
from libs.common.runtime.signals import end_at_stop_signals, stop_on_signals

async def serve():
    if sys.argv[1] == "loading":
        print("loading", flush=True)
        await asyncio.to_thread(time.sleep, 600)
    stopping = asyncio.Event()
    alive = functools.partial(print, "alive", flush=True)
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, alive)
    stop_on_signals(stopping.set)
    print("serving", flush=True)
    await stopping.wait()
    print("draining", flush=True)
    if sys.argv[1] == "busy":
        await asyncio.to_thread(time.sleep, 600)

end_at_stop_signals()
asyncio.run(serve())
print("ended", flush=True)
"""
# Prints at the first import that takes long whether SIGTERM has a handler, and ends there.
_START = """
import importlib.abc, runpy, signal, sys

class SlowImport(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name in ("asyncio", "grpc", "numpy", "argparse", "libs.worker"):
            print(name, callable(signal.getsignal(signal.SIGTERM)))
            sys.stdout.flush()
            raise SystemExit

sys.meta_path.insert(0, SlowImport())
runpy.run_module("services." + sys.argv[1], run_name="__main__")
"""
_UNSHARED = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")


def start(*arguments: str, before: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    command = [*before, sys.executable, "-c", _PROGRAM, *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_process_that_starts_ends_at_once(number: signal.Signals) -> None:
    with start("loading") as process:
        assert line_of(process) == "loading"
        process.send_signal(number)
        assert process.wait(WAIT_S) == -number


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_process_that_serves_drains_and_ends_in_order(number: signal.Signals) -> None:
    with start("idle") as process:
        assert line_of(process) == "serving"
        process.send_signal(number)
        assert (line_of(process), line_of(process)) == ("draining", "ended")
        assert process.wait(WAIT_S) == 0


def test_the_same_signal_again_ends_a_drain_and_another_does_not() -> None:
    with start("busy") as process:
        assert line_of(process) == "serving"
        process.send_signal(signal.SIGINT)
        assert line_of(process) == "draining"
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGUSR1)
        assert line_of(process) == "alive"
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) == -signal.SIGINT


@pytest.mark.parametrize("role", ["router", "prefill", "decode", "kvstore", "drafter"])
def test_a_service_handles_stop_signals_before_its_imports(role: str) -> None:
    shown = subprocess.run(
        [sys.executable, "-c", _START, role], cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S
    )
    assert shown.stdout.split()[1:] == ["True"], shown.stdout + shown.stderr


@pytest.mark.skipif(
    os.geteuid() != 0 or subprocess.run([*_UNSHARED, "true"], capture_output=True).returncode != 0,
    reason="needs the right to make a namespace of processes",
)
@pytest.mark.parametrize("state", ["loading", "busy"])
def test_process_1_of_a_container_ends_too(state: str) -> None:
    with start(state, before=_UNSHARED) as unshare:
        assert line_of(unshare) in ("loading", "serving")
        children = Path(f"/proc/{unshare.pid}/task/{unshare.pid}/children").read_text().split()
        (first,) = map(int, children)
        os.kill(first, signal.SIGTERM)
        if state == "busy":
            assert line_of(unshare) == "draining"
            os.kill(first, signal.SIGTERM)
        assert unshare.wait(WAIT_S) == 128 + signal.SIGTERM
