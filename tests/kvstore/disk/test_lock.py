"""One process has a disk's directory; the next one waits a moment for it."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from services.kvstore.disk.opening import HANGS_AFTER_S
from services.kvstore.disk.segments.io import SystemDiskIo
from slipstream.errors import FailedPrecondition


def test_a_directory_is_locked_once_the_process_before_has_ended(tmp_path: Path) -> None:
    io = SystemDiskIo()
    io.lock_wait_s = 60.0
    before = io.lock_directory(tmp_path)
    ending = threading.Timer(0.2, os.close, (before,))
    ending.start()
    os.close(io.lock_directory(tmp_path))
    ending.join()


def test_a_process_that_stays_is_named_before_the_disk_counts_as_hung(tmp_path: Path) -> None:
    io = SystemDiskIo()
    assert io.lock_wait_s < HANGS_AFTER_S
    io.lock_wait_s = 0.1
    held = io.lock_directory(tmp_path)
    began_s = time.monotonic()
    with pytest.raises(FailedPrecondition, match="is in use by another process"):
        io.lock_directory(tmp_path)
    assert time.monotonic() - began_s >= io.lock_wait_s
    os.close(held)
