"""The simulation of placement: what goes in comes out, closed forms are right, the same figures each time."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench.placement.__main__ import main
from bench.placement.bound import bound
from bench.placement.cache import LruCache, shared_cache_share
from bench.placement.compare import RULES, compare, simulate
from bench.placement.model import Hardware, Run, percentile
from bench.placement.policies import LeastLoad, RoundRobin, Slipstream
from bench.placement.sim import Simulation
from bench.placement.trace import (
    BLOCK_TOKENS,
    AgentShape,
    TraceRequest,
    agent_sessions,
    read_trace,
)
from services.router.placement.cost_model import DecodeModel, PrefillModel

SMALL = replace(Hardware(), n_prefill=3, n_decode=2, cache_blocks=400, noise=0.0)
SHAPE = AgentShape(sessions_per_s=0.2, duration_ms=120_000.0, turns=(2, 5))


def request(number: int, at_ms: float, blocks: list[int], output_tokens: int = 10) -> TraceRequest:
    hashes = tuple(block.to_bytes(16, "little") for block in blocks)
    return TraceRequest(
        number, at_ms, len(blocks) * BLOCK_TOKENS + 10, output_tokens, hashes, str(blocks[:1])
    )


@pytest.mark.parametrize("rule", RULES)
def test_every_request_is_served_once_and_work_is_conserved(rule: type) -> None:
    requests = agent_sessions(SHAPE)
    sim = Simulation(SMALL, rule())
    runs = sim.run(requests)
    assert [run.request for run in runs] == requests
    assert all(run.request.at_ms <= run.first_token_ms <= run.done_ms < float("inf") for run in runs)
    assert sum(node.busy_ms for node in sim.prefill) == pytest.approx(
        sum(SMALL.prefill.compute_ms(run.uncached_tokens, run.request.prompt_tokens) for run in runs)
    )
    assert [(node.assigned, node.assigned_tokens, node.sequences) for node in sim.decode] == [(0, 0, 0)] * 2


def test_the_same_run_gives_the_same_figures() -> None:
    requests = agent_sessions(SHAPE)
    assert requests == agent_sessions(SHAPE)
    assert simulate(requests, SMALL, Slipstream()) == simulate(requests, SMALL, Slipstream())


def test_one_request_takes_what_the_models_say() -> None:
    hardware = replace(
        SMALL,
        prefill=PrefillModel(10.0, 0.1, 1e-9, 1e-9, 1e-9),
        decode=DecodeModel(20.0, 1.0, 0.5, 2.0, 1e-9),
    )
    (run,) = Simulation(hardware, RoundRobin()).run([request(0, 5.0, [1, 2], output_tokens=11)])
    assert run.ttft_ms == pytest.approx(10 + 0.1 * 1034, rel=1e-3)
    step = 21 + 0.5 * (1034 + 5) / 1000  # ten steps, the context growing by one token each
    assert run.done_ms - run.first_token_ms == pytest.approx(2 + 10 * step, rel=1e-3)


PLAIN = PrefillModel(1e-9, 1.0, 1e-12, 0.01, 0.01, 0.01)  # a token is a millisecond


def computed(hardware: Hardware, *requests: TraceRequest) -> list[Run]:
    return Simulation(replace(hardware, prefill=PLAIN, n_prefill=1), RoundRobin()).run(requests)


def test_a_worker_computes_the_shortest_and_gives_a_quarter_to_the_overdue() -> None:
    long, short = request(0, 0.0, [1, 2, 3, 4]), request(1, 100.0, [9])  # 2,058 and 522 tokens
    first, second = computed(SMALL, long, short)
    assert second.ttft_ms == pytest.approx(522, rel=1e-3)
    assert first.ttft_ms == pytest.approx(2058 + 522, rel=1e-3)
    many = [request(1 + i, 0.0, [100 + i]) for i in range(40)]
    long_run, *runs = computed(SMALL, long, *many)
    # Overdue after 4 x 2,058; then a quarter until it is the shortest itself.
    assert long_run.ttft_ms == pytest.approx(4 * 2058 + 4 * (2058 - 522) + 522, rel=0.02)
    assert max(run.ttft_ms for run in runs) == pytest.approx(2058 + 40 * 522, rel=1e-3)
    first, second = computed(replace(SMALL, in_order=True), long, short)
    assert first.ttft_ms == pytest.approx(2058, rel=1e-3)
    assert second.ttft_ms == pytest.approx(2058 - 100 + 522, rel=1e-3)


def test_siblings_on_a_worker_compute_their_common_prefix_once() -> None:
    runs = computed(SMALL, *(request(i, float(i), [1, 2, 3, 4, 10 + i]) for i in range(3)))
    assert [run.cached_tokens for run in runs] == [0, 4 * BLOCK_TOKENS, 4 * BLOCK_TOKENS]
    assert max(run.first_token_ms for run in runs) == pytest.approx(5 * 512 + 10 + 2 * 522, rel=1e-3)


class _ToOneWithPeer:
    """The first request to worker 0, all others to worker 1, which may read from worker 0."""

    name = "peer"

    def choose(self, run: Run, sim: Simulation) -> tuple[int, int]:
        first = run.request.number == 0
        run.peer = None if first else 0
        return (0 if first else 1), 0

    def computed(self, run: Run, sim: Simulation) -> None:
        return

    def blocks_changed(self, worker: int, new: object, evicted: object, now_ms: float) -> None:
        return


def test_kv_is_read_from_a_peer_and_leaves_it_first() -> None:
    sim = Simulation(replace(SMALL, prefill=PLAIN, cache_blocks=5), _ToOneWithPeer())
    blocks = [1, 2, 3, 4]
    _, second = sim.run([request(0, 0.0, blocks), request(1, 10_000.0, blocks)])
    assert (second.cached_tokens, second.read_tokens) == (2048, 2048)
    assert second.ttft_ms == pytest.approx(0.01 * 2048 + 10, rel=1e-3)
    assert sim.prefill[0].lent_blocks == 4
    sim.prefill[0].cache.put([b"x" * 16, b"y" * 16])
    assert sim.prefill[0].cache.prefix_blocks(second.request.hashes) == 3


def test_every_worker_reads_from_the_kvstore() -> None:
    sim = Simulation(replace(SMALL, prefill=PLAIN, store_blocks=100, n_prefill=2), RoundRobin())
    first, second = sim.run([request(0, 0.0, [1, 2]), request(1, 5_000.0, [1, 2])])
    assert (first.prefill, second.prefill, second.read_tokens) == (0, 1, 1024)


def test_the_bound_is_a_queue_in_front_of_one_cache() -> None:
    hardware = replace(SMALL, prefill=PLAIN, n_prefill=1)
    requests = [request(0, 0.0, [1]), request(1, 100.0, [2]), request(2, 100.0, [1])]
    assert bound(requests, hardware).one_queue_p90_ms == pytest.approx(522 + 422 + 10, rel=1e-3)
    assert bound(requests, hardware).no_queue_p90_ms == pytest.approx(522, rel=1e-3)


def test_a_batch_in_closed_form_is_the_batch_step_by_step() -> None:
    """Three sequences that come and go; against a loop over single steps."""
    model = DecodeModel(10.0, 2.0, 4.0, 1e-9, 1e-9)
    hardware = replace(
        SMALL, n_prefill=3, n_decode=1, decode=model, prefill=PrefillModel(1.0, 1e-9, 1e-9, 1, 1)
    )
    arrivals = [(0.0, 200), (500.0, 50), (900.0, 120)]
    runs = Simulation(hardware, RoundRobin()).run(
        [request(i, at_ms, [i], output_tokens=out) for i, (at_ms, out) in enumerate(arrivals)]
    )
    now_ms = 0.0
    left: dict[int, int] = {}
    done: dict[int, float] = {}
    starts = {i: at_ms + 1.0 for i, (at_ms, _) in enumerate(arrivals)}
    while len(done) < 3:
        for i in [i for i, at_ms in starts.items() if at_ms <= now_ms]:
            left[i] = arrivals[i][1] - 1
            del starts[i]
        if not left:
            now_ms = min(starts.values())
            continue
        context = sum(BLOCK_TOKENS + 10 + arrivals[i][1] - 1 - n for i, n in left.items())
        now_ms += model.step_ms(len(left), context)
        left = {i: n - 1 for i, n in left.items()}
        done |= {i: now_ms for i, n in left.items() if n == 0}
        left = {i: n for i, n in left.items() if n}
    for i, run in enumerate(runs):
        assert run.done_ms == pytest.approx(done[i], rel=0.02)


def test_a_full_line_rejects() -> None:
    hardware = replace(SMALL, max_waiting=2)
    burst = [request(i, 0.0, [i]) for i in range(30)]
    result = simulate([*burst, request(30, 1.0, [30])], hardware, LeastLoad())
    assert result.rejected_share == pytest.approx((31 - 9) / 31)


def test_the_cache_evicts_the_least_recent_and_the_end_of_a_prefix_first() -> None:
    cache = LruCache(4)
    a, b = [b"a1", b"a2", b"a3"], [b"b1", b"b2"]
    assert cache.put(a) == (a, [])
    assert cache.put(b) == (b, [b"a3"])
    assert (cache.prefix_blocks(a), cache.prefix_blocks(b), len(cache)) == (2, 2, 4)


def test_a_shared_cache_counts_prefixes_only() -> None:
    requests = [request(0, 0, [1, 2]), request(1, 1, [1, 3]), request(2, 2, [9, 2])]
    assert shared_cache_share(requests, 100) == pytest.approx(BLOCK_TOKENS / (3 * (2 * BLOCK_TOKENS + 10)))


def test_a_trace_is_read_and_its_ticks_are_spread(tmp_path: Path) -> None:
    rows = [(0, 1000, [0]), (0, 600, [0, 1]), (3000, 512, [0])]
    path = tmp_path / "trace.jsonl"
    path.write_text(
        "".join(
            json.dumps({"timestamp": t, "input_length": n, "output_length": 5, "hash_ids": ids}) + "\n"
            for t, n, ids in rows
        )
    )
    requests = read_trace(path, speed=2.0)
    assert [r.at_ms for r in requests] == [0.0, 750.0, 1500.0]
    assert [len(r.hashes) for r in requests] == [1, 1, 1]


def test_on_busy_agents_the_router_keeps_the_cache_and_halves_the_tail() -> None:
    hardware = replace(Hardware(), n_prefill=4, n_decode=4, cache_blocks=2_000)
    shape = replace(AgentShape(), sessions_per_s=0.16, duration_ms=200_000.0)
    report = compare("agents", agent_sessions(shape), hardware)
    assert report["cached_share_of_shared"] > 0.95  # type: ignore[operator]
    assert report["ttft_p90_below_best_other"] > 0.3  # type: ignore[operator]


def test_the_command_prints_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    row = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}
    path.write_text("".join(json.dumps({**row, "timestamp": i * 3000}) + "\n" for i in range(5)))
    assert main(["--trace", str(path), "--workers", "2", "--agents-per-s", "0.01", "--json"]) == 0
    reports = json.loads(capsys.readouterr().out)
    assert [report["workload"].partition(";")[0] for report in reports] == [
        *["trace.jsonl"] * 3,
        *["agent sessions"] * 3,
    ]
    for report in reports:
        assert {row["rule"] for row in report["results"]} >= {"slipstream", "round robin", "prefix-aware"}
        assert 0 < report["bound"]["no_queue_p90_ms"] <= report["bound"]["one_queue_p90_ms"]


def test_percentiles_are_of_the_nearest_rank() -> None:
    assert [percentile([3, 1, 2], share) for share in (0.0, 0.5, 0.99)] == [1, 2, 3]
    assert percentile([], 0.5) == 0.0
