"""A process without credentials overwrites all KV that it can reach. No text changes."""

from __future__ import annotations

import operator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from libs.common.cluster.worker_record import Role
from slipstream.replies import Reply
from supervisor.configuration.plan import ClusterConfig
from tests.e2e.kv.placed_chat import TEXT, ask_at
from tests.support.clusters.local_cluster import LocalCluster, until
from tests.support.processes.kv_attack import attacked
from tests.support.processes.kv_attacker import listening_ports

pytestmark = pytest.mark.skipif(find_spec("mooncake") is None, reason="Mooncake is missing")

# More than MIN_CASES only until a reader has met the attacker.
MIN_CASES, MAX_CASES = 3, 60
WORKERS = ("prefill-0", "prefill-1")
KV_PROCESSES = (*WORKERS, "decode-0", "kvstore-0")
# The attacker covers all memory in seconds when there is little.
_PAGES = ("--kv-memory-bytes", str(64 << 20), "--kv-staging-bytes", str(32 << 20))
# In bf16 a prompt that is computed in other pieces, after a refused block, may fall otherwise at a near tie.
_EXACT = ("--compute-dtype", "float32")
LITTLE_MEMORY = {
    Role.PREFILL: (*_PAGES, *_EXACT),
    # The drafter reads the features of a prompt's end, 256 KiB, from the attacked memory.
    Role.DECODE: (*_PAGES, *_EXACT, "--draft-export-bytes", str(64 << 10)),
    Role.KVSTORE: ("--dram-bytes", str(32 << 20), "--disk-bytes", "0"),
}
# What others may write: staged copies and draft features of each worker, and the memory of the kvstore.
LEAST_BYTES = [*[(32 << 20) + 1] * 3, 32 << 20]
# What the drafter counts for rows that a decode worker exported.
EXPORTED = ("slipstream_feature_bytes_pulled_total", "slipstream_draft_rows_unread_total")
FAILURES = "slipstream_kv_checksum_failures_total"


def drafting_config(run_dir: Path, **more: Any) -> ClusterConfig:
    """Two prefill workers and a decode worker, which gets draft features from them, and a kvstore."""
    return ClusterConfig(
        run_dir=run_dir, prefill=2, decode=1, drafters=1, drafts="on", allow_requested_prefill=True, **more
    )


def texts(replies: list[Reply]) -> list[object]:
    return [reply.as_message() for reply in replies]


def conversation(cluster: LocalCluster, case: int) -> list[Reply]:
    """The replies to three turns, each at the other prefill worker, which reads the earlier turns' KV."""
    messages = [{"role": "user", "content": f"Case {case}. {TEXT}"}]
    replies = []
    for turn in range(3):
        reply = ask_at(cluster, WORKERS[(case + turn) % 2], messages)
        replies.append(reply)
        messages += [reply.as_message(), {"role": "user", "content": f"And {turn}? {TEXT[:400]}"}]
    return replies


@pytest.mark.timeout(1200)
def test_overwriting_all_registered_memory_changes_no_text(tmp_path: Path) -> None:
    (tmp_path / "attacked").mkdir()
    (tmp_path / "calm").mkdir()
    got: list[list[Reply]] = []
    with LocalCluster(
        drafting_config(tmp_path / "attacked", transport="mooncake", extra_arguments=LITTLE_MEMORY)
    ) as cluster:
        with attacked([cluster.pid(name) for name in KV_PROCESSES], cluster.run_dir) as attack:

            def is_everywhere() -> bool:
                held = [sum(written for _, written in each) for each in attack.regions()]
                return len(held) == len(LEAST_BYTES) and all(map(operator.ge, held, LEAST_BYTES))

            def found() -> dict[str, float]:
                return {name: cluster.status(name).counters.get(FAILURES, 0) for name in KV_PROCESSES}

            until(is_everywhere, what=lambda: f"writes into every region: {attack.regions()}")
            while len(got) < MIN_CASES or not any(found().values()):
                assert len(got) < MAX_CASES, "no reader met the attacker"
                got.append(conversation(cluster, len(got)))
            refused = found()
            drafter = cluster.status("drafter-0").counters
            assert any(drafter.get(name, 0) for name in EXPORTED), "no features were exported"
        cluster.assert_idle()
    # A cluster with the default transport, which no other process can write to.
    exact = dict.fromkeys((Role.PREFILL, Role.DECODE), _EXACT)
    with LocalCluster(drafting_config(tmp_path / "calm", extra_arguments=exact)) as calm:
        for name in (*KV_PROCESSES, *calm.router_names):
            ports = listening_ports(calm.pid(name))
            assert ports and all(ports.values()), f"{name} listens beyond loopback: {ports}"
        undisturbed = [conversation(calm, case) for case in range(len(got))]
        calm.assert_idle()
    cases = range(len(got))
    wrong = [case for case in cases if texts(got[case]) != texts(undisturbed[case])]
    assert not wrong, f"cases {wrong} differ; {refused} blocks were refused"
