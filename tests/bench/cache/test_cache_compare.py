"""The comparison of the tier with plain caches: rows that can be recomputed, a table and JSON."""

from __future__ import annotations

import json
import random

import pytest

from bench.cache.baselines import Lru
from bench.cache.compare import COLUMNS, SCALE_BLOCKS, main
from bench.cache.traces import LOADS
from bench.cache.workloads import WORKLOADS

ASKED = ["--capacity", "64", "--requests", "150", "--seed", "3"]


def test_a_row_has_the_hits_of_each_cache_and_what_the_tier_lacks(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--load", "zipf", "--load", "chats", *ASKED, "--json"])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["load"] for row in rows] == ["zipf", "chats"]
    for row in rows:
        assert row["gap"] == pytest.approx(
            max(row[name] for name in COLUMNS[:-1]) - row["adaptive"], abs=0.02
        )
        assert row["under_lru"] == pytest.approx(row["lru"] - row["adaptive"], abs=0.02)
    chains = LOADS["zipf"](random.Random("zipf3"), 150, SCALE_BLOCKS)
    lru, blocks = Lru(64), sum(map(len, chains))
    assert rows[0]["blocks"] == blocks
    assert rows[0]["lru"] == round(100 * sum(map(lru.serve, chains)) / blocks, 2)


def test_the_table_has_a_line_for_each_capacity(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--load", "loop", *ASKED, "--capacity", "300"])
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["load", "blocks", *COLUMNS, "gap", "under_lru", "lost"]
    assert [line.split()[:2] for line in lines] == [["loop", "64"], ["loop", "300"]]


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_load_of_a_service_is_the_same_for_one_seed_and_has_blocks_once(name: str) -> None:
    first, second = (WORKLOADS[name](random.Random(7), 120, 100) for _ in range(2))
    assert first == second and 0 < len(first) <= 120
    assert all(chain and len(set(chain)) == len(chain) for chain in first)
