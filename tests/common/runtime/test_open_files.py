"""A process raises its limit of open files, and never above the hard limit."""

from __future__ import annotations

import resource

import pytest

from libs.common.runtime import open_files


@pytest.mark.parametrize(
    ("limits", "expected"), [((1024, 4096), 4096), ((1024, 1 << 20), 65_536), ((1 << 17, 1 << 20), 1 << 17)]
)
def test_the_soft_limit_rises_within_the_hard_one(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], expected: int
) -> None:
    found = [limits]
    monkeypatch.setattr(resource, "getrlimit", lambda kind: found[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda kind, new: found.append(new))
    assert open_files.raise_file_limit() == expected
    assert found[-1] == (expected, limits[1])
