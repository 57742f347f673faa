"""The limit of memory by files of cgroups, v1 and v2."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from libs.common.runtime.memory_limit import memory_limit_bytes

MACHINE = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def limit(tmp_path: Path, proc: str, files: dict[str, str]) -> int:
    (tmp_path / "proc").write_text(proc)
    for name, text in files.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return memory_limit_bytes(tmp_path / "proc", tmp_path / "cgroup")


@pytest.mark.parametrize(
    ("proc", "files", "wanted"),
    [
        ("0::/a/b\n", {"a/b/memory.max": "1000\n"}, 1000),
        ("0::/a/b\n", {"a/b/memory.max": "max\n", "a/memory.max": "2000\n"}, 2000),
        ("0::/\n", {"memory.max": "3000\n"}, 3000),
        ("0::/host/path\n", {"memory.max": "3500\n"}, 3500),  # the container's group is the root
        ("0::/../../init\n", {"memory.max": "3600\n"}, 3600),
        ("5:cpu,memory:/c\n", {"memory/c/memory.limit_in_bytes": "4000\n"}, 4000),
        ("5:memory:/host\n", {"memory/memory.limit_in_bytes": "5000\n"}, 5000),
        (
            "1:memory:/c\n0::/c\n",
            {"memory/c/memory.limit_in_bytes": "7000", "unified/c/memory.max": "6000"},
            6000,
        ),
        ("5:memory:/c\n", {"memory/c/memory.limit_in_bytes": "9223372036854771712\n"}, MACHINE),
        ("0::/a\n", {"a/memory.max": "max\n"}, MACHINE),
        ("7:cpu:/c\nnonsense\n", {"memory/c/memory.limit_in_bytes": "1"}, MACHINE),
    ],
)
def test_the_least_limit_holds(tmp_path: Path, proc: str, files: dict[str, str], wanted: int) -> None:
    assert limit(tmp_path, proc, files) == wanted


def test_a_machine_without_cgroups_has_its_own_memory(tmp_path: Path) -> None:
    assert memory_limit_bytes(tmp_path / "none", tmp_path) == MACHINE
