"""The files that this process has open."""

from __future__ import annotations

import contextlib
import os

_DESCRIPTORS = "/proc/self/fd"


def open_files() -> set[tuple[str, str]]:
    """The number and the target of each descriptor.

    A test looks for new ones: what other tests of the process left may be closed at any time.
    """
    found = set()
    for number in os.listdir(_DESCRIPTORS):
        with contextlib.suppress(FileNotFoundError):  # that of the list itself
            found.add((number, os.readlink(f"{_DESCRIPTORS}/{number}")))
    return found
