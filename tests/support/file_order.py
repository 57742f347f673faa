"""The order of test files that several processes take one after the other."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePath
from typing import TypeVar

import pytest

# Below the folder of all tests: in these a file may take more than ten seconds.
LONG_FOLDERS = (
    "bench",
    "common/transport",
    "e2e",
    "engine",
    "kvstore",
    "router/untrusted",
    "supervisor",
    "worker",
)
# One process imports transformers, which takes 3.3 s of processor time, for all of these.
WITH_TRANSFORMERS = (
    "bench/gpu/test_sections.py",
    "bench/test_engine_peers.py",
    "engine/kernels/test_bf16_kernels.py",
    "engine/model/test_features.py",
    "engine/model/test_fp8.py",
    "engine/model/test_known_keys.py",
    "engine/model/test_parity.py",
    "engine/model/test_yarn.py",
    "models/networks/test_network.py",
    "models/test_tokenizer_json.py",
)
# One process starts a cluster, which takes 2 s of processor time, for all of these.
WITH_SHARED_CLUSTER = (
    "e2e/requests/test_conversation.py",
    "e2e/requests/test_ends.py",
    "e2e/requests/test_prompt_logprobs.py",
    "e2e/requests/test_readme.py",
    "e2e/requests/test_structured.py",
)
_GROUP_OF = {file: group[0] for group in (WITH_TRANSFORMERS, WITH_SHARED_CLUSTER) for file in group}
_ROOT = Path(__file__).parents[1]
_AnyPath = TypeVar("_AnyPath", bound=PurePath)
# The share of the other files that begin before the last long one.
_SHARE_BEFORE_LAST = 0.65


def run_order(files: Iterable[PurePath]) -> list[PurePath]:
    """The files, relative to the folder of all tests, as they should begin.

    Files of one folder resemble each other. Side by side, those that wait for time-outs would leave cores
    idle, and those that compute would compete. So the order is unrelated to the folders. It is the same in
    each process. Long files begin early, so that none runs alone at the end. Files that run together follow
    the first of them.
    """
    long: list[PurePath] = []
    others: list[PurePath] = []
    for file in sorted(files, key=_mixed):
        (long if _is_long(file) else others).append(file)
    keyed = [*_placed(long, _SHARE_BEFORE_LAST), *_placed(others, 1.0)]
    order = [file for _, file in sorted(keyed, key=lambda each: each[0])]
    begins: dict[PurePath, int] = {}
    for index, file in enumerate(order):
        begins.setdefault(group_of(file, PurePath()), index)
    return sorted(order, key=lambda file: begins[group_of(file, PurePath())])


def group_of(file: _AnyPath, root: PurePath = _ROOT) -> _AnyPath:
    """What stands for all files that one process runs one after the other: mostly the file alone."""
    first = _GROUP_OF.get(file.relative_to(root).as_posix()) if file.is_relative_to(root) else None
    return file if first is None else type(file)(root, first)


def order_files(root: Path, items: list[pytest.Item]) -> None:
    """Sort items by the order of their files; within a file they stay as they are."""
    order = run_order({item.path.relative_to(root) for item in items})
    place = {root / file: index for index, file in enumerate(order)}
    items.sort(key=lambda item: place[item.path])


def _mixed(file: PurePath) -> tuple[int, str]:
    return zlib.crc32(file.as_posix().encode()), file.as_posix()


def _is_long(file: PurePath) -> bool:
    return any(file.is_relative_to(folder) for folder in LONG_FOLDERS)


def _placed(files: Sequence[PurePath], share: float) -> list[tuple[float, PurePath]]:
    return [(share * index / len(files), file) for index, file in enumerate(files)]
