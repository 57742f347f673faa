"""Directories of wide fixtures, removed at their end; pytest keeps its own until the end of the run."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def lasting_dir(request: pytest.FixtureRequest, name: str) -> Iterator[Path]:
    """An empty directory, removed at the end of the fixture of `request`: an etcd alone takes 125 MB.

    The directory stays for inspection when a test of this process, or the fixture, failed.
    """
    factory: pytest.TempPathFactory = request.getfixturevalue("tmp_path_factory")
    path = factory.mktemp(name)
    failed_before = request.session.testsfailed
    yield path
    if request.session.testsfailed == failed_before:
        shutil.rmtree(path, ignore_errors=True)
