"""Holds the engines of a cluster in the middle of their work for as long as a test needs.

A worker with a held engine still answers, reports its load, and accepts and releases requests; only its
steps abort without output. So its requests stay at their token on a slow machine and on a fast one.

    with Gate(run_dir).held("decode-0", "decode-1", from_token=8) as gate:
        ...                    # begin streams; poll until they have their state; inject a fault
        gate.open()            # the streams run to their ends
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# As `from_token`: no step runs, not even of a prompt.
EVERYTHING = -1
_POLL_S = 0.02


class Gate:
    """The gate of the cluster with this run directory. A restart of a held worker stays held."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._names: tuple[str, ...] = ()

    @contextmanager
    def held(self, *instances: str, from_token: int = EVERYTHING) -> Iterator[Gate]:
        """Hold every step that would make output token `from_token` of any request, or a later one."""
        self._names = instances
        try:
            for name in instances:
                fresh = self._run_dir / f"new-hold-{name}"
                fresh.write_text(str(from_token))
                os.replace(fresh, _file(self._run_dir, name))
            yield self
        finally:
            self.open()

    def open(self) -> None:
        """Release all engines. Idempotent."""
        for name in self._names:
            _file(self._run_dir, name).unlink(missing_ok=True)


def install(run_dir: Path, instance: str) -> None:
    """Install the gate in a worker's process, before its engine is built."""
    from libs.engine.core.engine import PagedEngine
    from libs.engine.step.stop_flag import StepAborted

    file, build = _file(run_dir, instance), PagedEngine.__init__

    def build_held(self: PagedEngine, model: Any, **options: Any) -> None:
        build(self, model, **options)
        run = model.run

        def run_when_open(batch: Any, rows: Any, stop: Any) -> Any:
            if _is_held(file, rows):
                time.sleep(_POLL_S)
                raise StepAborted
            return run(batch, rows, stop)

        model.run = run_when_open

    PagedEngine.__init__ = build_held  # type: ignore[method-assign]


def _is_held(file: Path, rows: Sequence[Any]) -> bool:
    try:
        from_token = int(file.read_text())
    except FileNotFoundError:
        return False
    if from_token == EVERYTHING:
        return True
    return any(row.n_sampled and row.first_index + row.n_sampled > from_token for row in rows)


def _file(run_dir: Path, instance: str) -> Path:
    return run_dir / f"hold-{instance}"
