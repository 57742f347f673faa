"""The log lines of ranks other than 0."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from libs.common.telemetry.logs import LogFormatter, log_form
from libs.engine.kv.cache import CacheShape
from libs.engine.model.runner import RunnerOptions
from libs.engine.parallel.follower_processes import FollowerProcesses
from libs.engine.parallel.rank_model import RankOptions
from libs.engine.parallel.sizes import parse_sizes
from slipstream.logs.lines import LineFormat

WAIT_S = 120.0


@pytest.fixture
def logs_json() -> Iterator[None]:
    """This process logs as `configure_logging(form="json")` makes it."""
    handler = logging.StreamHandler()
    handler.setFormatter(LogFormatter(LineFormat("decode", "decode-0", is_json=True)))
    logging.getLogger().addHandler(handler)
    yield
    logging.getLogger().removeHandler(handler)


def options_that_fail(folder: Path) -> RankOptions:
    """Of two ranks whose memory of pages has no bytes."""
    return RankOptions(
        model_dir=str(folder),
        rank=0,
        sizes=parse_sizes("tp=2"),
        stage_ends=(1,),
        feature_layers=(),
        cache=CacheShape(1, 1, 64, 64, "float32"),
        runner=RunnerOptions(),
        store=os.memfd_create("store"),
        pages=os.memfd_create("pages"),
    )


def test_a_rank_logs_in_the_form_of_its_worker(
    logs_json: None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert log_form() == "json"
    options, ended = options_that_fail(tmp_path), threading.Event()
    followers = FollowerProcesses(options, lambda reason: ended.set())
    try:
        assert ended.wait(WAIT_S)
    finally:
        followers.kill()
        for descriptor in (options.store, options.pages):
            os.close(descriptor)
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    assert [(line["service"], line["instance"], line["level"]) for line in lines] == [
        ("rank", "rank-1", "error")
    ]


# A rank whose connections break, which it says on its standard output.
BROKEN_RANK = """
import os
from libs.engine.parallel import follower

def break_off(options):
    print("broken", flush=True)
    raise RuntimeError("connection closed")

follower.follow = break_off
os._exit(follower.main())
"""


@pytest.mark.parametrize("is_end", [True, False], ids=["rank 0 ends", "rank 0 goes on"])
def test_a_connection_that_is_lost_at_the_end_of_rank_0_is_no_error(tmp_path: Path, is_end: bool) -> None:
    """The input closes a moment after the connection, as on a loaded machine."""
    options = options_that_fail(tmp_path)
    rank = subprocess.Popen(
        [sys.executable, "-c", BROKEN_RANK, "text", str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert rank.stdin is not None and rank.stdout is not None and rank.stderr is not None
    try:
        rank.stdin.write(options.to_json() + "\n")
        rank.stdin.flush()
        assert rank.stdout.readline() == "broken\n"
        if is_end:
            rank.stdin.close()
        status, said = rank.wait(WAIT_S), rank.stderr.read()
    finally:
        rank.kill()
        rank.wait()
        for stream in (rank.stdin, rank.stdout, rank.stderr):
            stream.close()
        for descriptor in (options.store, options.pages):
            os.close(descriptor)
    if is_end:
        assert (status, said) == (0, "")
    else:
        assert status == 1 and "rank 0 of tp=2" in said and "RuntimeError" in said


def test_a_process_that_configured_nothing_starts_ranks_that_log_text() -> None:
    assert log_form() == "text"
