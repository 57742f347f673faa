"""Which exit codes count as crashes."""

from __future__ import annotations

import signal

import pytest

from libs.common.runtime.exit_codes import count_oom_kills, is_crash


@pytest.mark.parametrize(
    ("code", "oom_kills", "crashed"),
    [
        (-signal.SIGSEGV, 0, True),
        (-signal.SIGABRT, 0, True),
        (-signal.SIGBUS, 0, True),
        (1, 0, True),
        (-signal.SIGKILL, 0, False),
        (-signal.SIGTERM, 0, False),
        (-signal.SIGKILL, 1, True),  # the kernel's OOM killer
        (-signal.SIGTERM, 1, False),
        (0, 0, False),  # a clean exit
        (0, 1, False),
    ],
)
def test_exit_codes_that_count_as_crashes(code: int, oom_kills: int, crashed: bool) -> None:
    assert is_crash(code, oom_kills=oom_kills) is crashed
    assert count_oom_kills() >= 0
