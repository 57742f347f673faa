"""The order of test files: all once, mixed, and no long one at the end."""

from __future__ import annotations

import re
from itertools import groupby
from pathlib import Path, PurePath

from hypothesis import given
from hypothesis import strategies as st

from tests.support.file_order import (
    LONG_FOLDERS,
    WITH_SHARED_CLUSTER,
    WITH_TRANSFORMERS,
    group_of,
    run_order,
)

ROOT = Path(__file__).parent
LOADS_TRANSFORMERS = re.compile(
    r'load_transformers\(|from transformers import|transformers_peer\.load\(|importorskip\("transformers"\)'
)
names = st.builds(
    "{}/test_{}.py".format, st.sampled_from([*LONG_FOLDERS, "text", "router/api"]), st.integers(0, 300)
)


@given(st.lists(names, unique=True), st.randoms(use_true_random=False))
def test_every_file_comes_once_in_an_order_of_its_name(files: list[str], random) -> None:  # type: ignore[no-untyped-def]
    order = run_order(map(PurePath, files))
    assert sorted(order) == sorted(map(PurePath, files))
    random.shuffle(files)
    assert run_order(map(PurePath, files)) == order


def test_long_files_are_spread_and_none_is_among_the_last() -> None:
    order = run_order(file.relative_to(ROOT) for file in ROOT.rglob("test_*.py"))
    is_e2e = [file.is_relative_to("e2e") for file in order]
    assert sum(is_e2e) > 30
    at = [index for index, found in enumerate(is_e2e) if found]
    assert at[-1] < 0.8 * len(order)
    assert sum(index < len(order) / 4 for index in at) < 0.6 * len(at)
    assert sum(index < len(order) / 2 for index in at) > 0.4 * len(at)
    for folder in LONG_FOLDERS:
        assert (ROOT / folder).is_dir()
        assert not any(file.is_relative_to(folder) for file in order[-len(order) // 10 :])


def test_files_that_share_something_run_in_one_process() -> None:
    """Each group is whole and begins with the first of its files."""
    files = [file for file in ROOT.rglob("test_*.py") if file != Path(__file__)]
    loading = {file for file in files if LOADS_TRANSFORMERS.search(file.read_text())}
    assert {file.relative_to(ROOT).as_posix() for file in loading} == set(WITH_TRANSFORMERS)
    requests = [file for file in files if file.parent == ROOT / "e2e/requests"]
    asking = {file for file in requests if "(cluster: LocalCluster" in file.read_text()}
    asking -= {file for file in asking if "def cluster(" in file.read_text()}
    assert {file.relative_to(ROOT).as_posix() for file in asking} == set(WITH_SHARED_CLUSTER)
    order = [ROOT / file for file in run_order(file.relative_to(ROOT) for file in files)]
    groups = [list(group) for _, group in groupby(order, key=group_of)]
    several = [group for group in groups if len(group) > 1]
    assert sorted(map(set, several), key=min) == sorted([loading, asking], key=min)
    for group in several:
        assert order.index(group[0]) < 0.4 * len(order)
