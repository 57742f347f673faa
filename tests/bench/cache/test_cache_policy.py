"""The replay: its baselines against hand-counted chains and brute force, its output, its errors."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import pytest

from bench.cache.baselines import Arc, Cache, Clairvoyant, Lru, S3Fifo, Unlimited
from bench.cache.policy import BLOCK_TOKENS, Production, Request, hit_ratio, main, read_trace
from bench.cache.traces import LOADS


def test_lru_keeps_the_starts_of_chains_and_counts_leading_blocks_only() -> None:
    cache = Lru(3)
    assert [cache.serve(chain) for chain in ((1, 2, 3), (1, 2, 3), (9,), (1, 2, 3), (2, 9))] == [
        0,
        3,
        0,
        2,
        1,
    ]


def test_the_optimum_is_the_best_of_all_ways_to_keep_blocks() -> None:
    rng = random.Random(4)
    for _ in range(20):
        chains = [tuple(range(10 * d, 10 * d + rng.randint(1, 2))) for d in rng.choices(range(3), k=6)]
        cache = Clairvoyant(2, chains)
        assert sum(cache.serve(chain) for chain in chains) == _best(chains, frozenset(), 2)


def _best(chains: list[tuple[int, ...]], held: frozenset[int], capacity: int) -> int:
    if not chains:
        return 0
    first, rest = chains[0], chains[1:]
    hits = next((at for at, block in enumerate(first) if block not in held), len(first))
    pool = sorted(held | set(first))
    kept = [frozenset(k) for n in range(capacity + 1) for k in itertools.combinations(pool, n)]
    return hits + max(_best(rest, each, capacity) for each in kept)


@pytest.mark.parametrize("name", ["agents", "zipf"])
def test_nothing_beats_the_optimum_and_nothing_the_ceiling(name: str) -> None:
    chains = LOADS[name](random.Random(2), 400, 60)
    requests = [Request(len(chain) * BLOCK_TOKENS, chain) for chain in chains]
    best = hit_ratio(requests, Clairvoyant(60, chains))
    others: list[Cache] = [Lru(60), S3Fifo(60), Arc(60), Production(60)]
    assert all(0 < hit_ratio(requests, cache) <= best for cache in others)
    assert best <= hit_ratio(requests, Unlimited())


def test_a_trace_is_read_and_a_table_and_json_come_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [7, 8]},
        {"timestamp": 3, "input_length": 1000, "output_length": 5, "hash_ids": [7, 8]},
        {"timestamp": 9, "input_length": 600, "output_length": 5, "hash_ids": [7, 9]},
    ]
    trace.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    assert main(["--trace", str(trace), "--capacity", "10", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ceiling"] == pytest.approx((1000 + 512) / 2600, abs=1e-5)
    assert report["token_hit_ratio"][0]["slipstream"] == report["ceiling"]
    assert main(["--trace", str(trace), "--capacity", "10"]) == 0
    assert "58.2 %" in capsys.readouterr().out


def test_a_line_that_is_no_request_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"input_length": 1, "hash_ids": [1]}\n{"input_length": 5}\n')
    assert main(["--trace", str(trace)]) == 2
    assert f"{trace}:2" in capsys.readouterr().err
    with pytest.raises(ValueError, match="not a request"):
        read_trace(trace)
