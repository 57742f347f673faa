"""The live fleet view: asks a router again and again, and draws what it answers and what keys change."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable
from dataclasses import replace

from rich.console import Console, Group
from rich.live import Live

from slipstream.cli.fleet.drains import drain_process, undrain_process
from slipstream.cli.fleet.fleet_client import FleetClient
from slipstream.cli.options import DRAIN_S, UNDRAIN_S
from slipstream.cli.top.keys import changed_state, is_yes
from slipstream.cli.top.rows import FleetRows, sorted_rows, view_of
from slipstream.cli.top.screen import (
    DrainQuestion,
    ScreenState,
    last_offset,
    screen_lines,
    shown_processes,
)
from slipstream.cli.top.terminal import reading_keys
from slipstream.errors import DeadlineExceeded, SlipstreamError, Unavailable

_ASK_S = 2.0
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class LiveFleet:
    """The state of the view. `run` returns when the user ends it."""

    def __init__(
        self,
        client: FleetClient,
        *,
        console: Console,
        interval_s: float,
        sort: str,
        clock_text: Callable[[], str],
    ) -> None:
        """`clock_text`: the time of day, as the heading shows it."""
        self._client = client
        self._console = console
        self._interval_s = interval_s
        self._clock_text = clock_text
        self._view: FleetRows | None = None
        self._state = ScreenState(client.router, clock_text(), sort)
        self._ended = asyncio.Event()
        self._changed = asyncio.Event()
        self._refusal: SlipstreamError | None = None
        self._actions: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Draw until q or a signal. Raises what a router answers that refuses the operator."""
        loop = asyncio.get_running_loop()
        for number in _STOP_SIGNALS:
            loop.add_signal_handler(number, self._ended.set)
        loop.add_signal_handler(signal.SIGWINCH, self._changed.set)
        asking = asyncio.create_task(self._ask())
        try:
            with (
                Live(console=self._console, screen=True, auto_refresh=False) as live,
                reading_keys(self._on_key),
            ):
                while not self._ended.is_set():
                    live.update(self._drawn(), refresh=True)
                    await self._wait_changed()
        finally:
            # A process that was asked to drain goes on with it.
            tasks = [asking, *self._actions]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for number in (*_STOP_SIGNALS, signal.SIGWINCH):
                loop.remove_signal_handler(number)
        if self._refusal is not None:
            raise self._refusal

    async def _wait_changed(self) -> None:
        waits = [asyncio.create_task(event.wait()) for event in (self._changed, self._ended)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        self._changed.clear()

    async def _ask(self) -> None:
        while True:
            began_s = time.monotonic()
            if not self._state.is_paused:
                await self._ask_once()
                self._changed.set()
            await asyncio.sleep(max(0.0, self._interval_s - (time.monotonic() - began_s)))

    async def _ask_once(self) -> None:
        trouble = ""
        try:
            self._view = view_of(await self._client.get(timeout_s=_ASK_S))
        except (Unavailable, DeadlineExceeded) as error:  # such as of a router that restarts
            trouble = error.message
        except SlipstreamError as error:
            self._refusal = error
            self._ended.set()
        self._state = replace(
            self._state, endpoint=self._client.router, time_text=self._clock_text(), trouble=trouble
        )

    def _drawn(self) -> Group:
        width, height = self._console.size
        offset = min(self._state.offset, last_offset(self._view, height=height))
        self._state = replace(self._state, offset=offset)
        return Group(*screen_lines(self._view, self._state, width=width, height=height))

    def _on_key(self, key: str) -> None:
        if key in ("q", "Q", "\x03") and (self._state.question is None or key == "\x03"):
            self._ended.set()
        if is_yes(self._state, key):
            self._act()
        rows = sorted_rows(self._view.processes, self._state.sort) if self._view is not None else []
        page = shown_processes(self._view, height=self._console.size.height)
        self._state = changed_state(self._state, key, rows, page=page)
        self._changed.set()

    def _act(self) -> None:
        """Do what the user said yes to, while the view goes on."""
        assert self._state.question is not None
        action = asyncio.create_task(self._answer(self._state.question))
        self._actions.add(action)
        action.add_done_callback(self._actions.discard)

    async def _answer(self, question: DrainQuestion) -> None:
        name = question.row.instance
        self._say(f"{'drains' if question.drains else 'undrains'} {name}")
        try:
            process = await self._client.find(question.row.key)
            if question.drains:
                await drain_process(self._client, process, timeout_s=DRAIN_S)
            else:
                await undrain_process(self._client, process, timeout_s=UNDRAIN_S)
            said = f"{name} is drained; u lets it take work" if question.drains else f"{name} takes work"
        except SlipstreamError as error:
            said = error.message
        await self._ask_once()  # also while paused: the next key goes by the new state
        self._say(said)

    def _say(self, note: str) -> None:
        self._state = replace(self._state, note=note)
        self._changed.set()


def print_once(view: FleetRows, state: ScreenState, *, console: Console) -> None:
    """All lines, for a pipe or --once."""
    with contextlib.suppress(BrokenPipeError):
        for line in screen_lines(view, state, width=max(console.width, 80), height=None):
            console.print(line, soft_wrap=True)
