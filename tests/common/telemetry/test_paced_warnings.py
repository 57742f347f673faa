"""Warnings about peers: once a subject in a while, and few subjects."""

from __future__ import annotations

import logging

import pytest

from libs.common.telemetry.paced_warnings import MAX_SUBJECTS, WARN_EVERY_S, PacedWarnings


class Clock:
    """A clock that a test sets."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_subject_is_logged_once_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    warnings = PacedWarnings(logging.getLogger("test"), clock=clock)
    for _ in range(100):
        warnings.warn("prefill-0", "prefill-0 is refused")
        warnings.warn("prefill-1", "prefill-1 is refused")
    assert caplog.messages == ["prefill-0 is refused", "prefill-1 is refused"]
    clock.now_s += WARN_EVERY_S - 1
    warnings.warn("prefill-0", "too early")
    clock.now_s += 1
    warnings.warn("prefill-0", "again")
    assert caplog.messages[2:] == ["again"]


def test_many_subjects_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    warnings = PacedWarnings(logging.getLogger("test"), clock=clock)
    for number in range(10_000):
        warnings.warn(f"worker-{number}", "refused")
    assert len(caplog.messages) == MAX_SUBJECTS
    clock.now_s += WARN_EVERY_S
    warnings.warn("another", "refused")
    assert len(caplog.messages) == MAX_SUBJECTS + 1
