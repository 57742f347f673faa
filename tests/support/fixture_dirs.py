"""Directories of fixtures that outlive a test; pytest itself keeps those until the end of the whole run."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def lasting_dir(request: pytest.FixtureRequest, name: str) -> Iterator[Path]:
    """An empty directory, removed at the end of the fixture that `request` is of: an etcd alone takes 125 MB.

    It stays, to be looked into, where a test of this process failed meanwhile, or the fixture itself.
    """
    factory: pytest.TempPathFactory = request.getfixturevalue("tmp_path_factory")
    path = factory.mktemp(name)
    failed_before = request.session.testsfailed
    yield path
    if request.session.testsfailed == failed_before:
        shutil.rmtree(path, ignore_errors=True)
