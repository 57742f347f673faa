"""Groups whose other ranks are forks of one server that has torch loaded: a start takes milliseconds."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from libs.engine.model.runner import RunnerOptions
from libs.engine.parallel import follower, follower_processes
from libs.engine.parallel.group_runner import GroupRunner
from libs.engine.parallel.rank_model import RankOptions
from libs.engine.parallel.sizes import parse_sizes

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload([follower.__name__])


class ForkedRank:
    """What `FollowerProcesses` uses of a Popen."""

    stdin = None

    def __init__(self, options: RankOptions) -> None:
        arguments = (options.to_json(), os.getpid())
        self._process = _CONTEXT.Process(target=_follow, args=arguments, daemon=True)
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("rank", timeout or 0.0)
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()


def _follow(options_json: str, rank_0: int) -> None:
    options = RankOptions.from_json(options_json)
    store, pages = (os.open(f"/proc/{rank_0}/fd/{n}", os.O_RDWR) for n in (options.store, options.pages))
    torch.set_num_threads(1)
    follower.follow(replace(options, store=store, pages=pages))
    os._exit(0)


def _no_death(reason: str) -> None:
    raise AssertionError(reason)


@contextmanager
def forked_group(
    model_dir: Path,
    options: RunnerOptions,
    sizes: str,
    on_death: Callable[[str], None] = _no_death,
    *,
    separate_pages: bool = False,
) -> Iterator[GroupRunner]:
    """A loaded group, closed at the end. With `separate_pages` each rank has other memory for KV, as devices
    have.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(follower_processes, "_start", ForkedRank)
        runner = GroupRunner.load(
            model_dir, options, parse_sizes(sizes), on_death=on_death, separate_pages=separate_pages
        )
    yield runner
    runner.close()
