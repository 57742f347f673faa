"""Workers of several processes, cut in different ways: equal answers, and no rank outlives its group."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from libs.common.cluster.worker_record import Role
from libs.engine.core.build import EngineOptions, build_engine
from libs.text.tokenizer import Tokenizer
from supervisor.configuration.cluster_options import DEFAULT_MODEL, WorkerSizes
from supervisor.configuration.plan import ClusterConfig
from tests.engine.support import generate, make_spec
from tests.support.clusters.local_cluster import LocalCluster, until
from tests.support.fixture_dirs import lasting_dir
from tests.support.processes.process_checks import alive

PROMPTS = ["My parcel is late. " * 20, "Where is my invoice? " * 9, "Hello."]
MAX_TOKENS = 20


@pytest.fixture(
    scope="module",
    params=[
        ("tp=2", "pp=2"),
        pytest.param(("pp=2", "tp=2,pp=2"), marks=pytest.mark.soak),
        pytest.param(("tp=2", "kv=2"), marks=pytest.mark.soak),
    ],
)
def cut(request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
    """Ranks of the prefill worker are new interpreters; those of the decode worker start three times."""
    with lasting_dir(request, "cut") as run_dir:
        (run_dir / "altered.json").write_text(json.dumps({"decode-0": {"early_ranks": True}}))
        config = ClusterConfig(
            run_dir=run_dir,
            modules=dict.fromkeys(Role, "tests.support.clusters.altered_service"),
            prefill=1,
            decode=1,
            kvstores=0,
            drafts="on",
            # Cuts add in other orders. With products in bf16 a close choice would fall otherwise.
            sizes=WorkerSizes(compute_dtype="float32"),
            drafters=1,
            prefill_parallel=request.param[0],
            decode_parallel=request.param[1],
        )
        with LocalCluster(config) as running:
            yield running


@pytest.fixture(scope="module")
def expected() -> list[str]:
    """The greedy answers of an engine in this process."""
    tokenizer = Tokenizer.from_dir(DEFAULT_MODEL)
    engine = build_engine(DEFAULT_MODEL, EngineOptions(threads=1, compute_dtype="float32"))
    specs = [
        make_spec(str(i), np.array(tokenizer.encode_text(prompt)), max_tokens=MAX_TOKENS, ignore_eos=True)
        for i, prompt in enumerate(PROMPTS)
    ]
    tokens = generate(engine, specs)
    return [tokenizer.decode(tokens[spec.seq_id]) for spec in specs]


def answers(site: LocalCluster) -> list[str]:
    options = {"temperature": 0.0, "max_tokens": MAX_TOKENS, "ignore_eos": True}
    return [site.client.complete(prompt, **options).text for prompt in PROMPTS]  # type: ignore[arg-type]


def ranks(rank_0: int) -> list[int]:
    """The processes of the other ranks."""
    return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _parent(pid) == rank_0]


def _parent(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError):
        return None


def test_answers_equal_those_of_one_process(cut: LocalCluster, expected: list[str]) -> None:
    assert ranks(cut.pid("prefill-0")) and ranks(cut.pid("decode-0"))
    assert answers(cut) == expected
    again = cut.client.complete(PROMPTS[0], temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
    assert again.text == expected[0]
    assert again.usage is not None and again.usage.cached_tokens > 0


@pytest.mark.parametrize("victim", ["another rank", "rank 0"])
def test_a_dead_rank_is_the_end_of_its_worker_which_starts_again(
    cut: LocalCluster, expected: list[str], victim: str
) -> None:
    rank_0 = cut.pid("decode-0")
    others = ranks(rank_0)
    assert others
    os.kill(others[0] if victim == "another rank" else rank_0, signal.SIGKILL)
    until(lambda: not any(map(alive, (rank_0, *others))), what="the end of all ranks")
    until(lambda: cut.running("decode-0", but=rank_0), what="another decode worker")
    assert answers(cut) == expected
    if victim == "another rank":
        lines = cut.until_logged("decode-0", "was killed by signal 9: the worker ends with it")
        assert any(re.search(r"rank \d of ", line) for line in lines)
