"""Prefill workers lend each other their caches: what one computed, another one reads, without any kvstore."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from slipstream.supervisor.plan import ClusterConfig
from tests.support.local_cluster import LocalCluster, until

TEXT = "The parcel left the depot on Monday, and nobody has seen it since. Please look into it again. " * 24
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True}


@pytest.fixture(scope="module")
def no_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    config = ClusterConfig(
        run_dir=tmp_path_factory.mktemp("lending"),
        kvstores=0,
        prefill=2,
        decode=1,
        drafters=0,
        draft_model=None,
        ready_timeout_s=115,
    )
    with LocalCluster(config) as running:
        yield running


@pytest.mark.timeout(300)
def test_a_worker_reads_what_another_one_computed(no_store: LocalCluster) -> None:
    read: list[int] = []

    def ask(worker: str, text: str) -> Any:
        messages = [{"role": "user", "content": text}]
        return no_store.client.chat(messages, headers={"x-slipstream-prefill": worker}, **GREEDY)

    def lent() -> bool:
        """A prompt on one worker, then on the other; the router may hear of the blocks in between."""
        text = f"Case {len(read)}. {TEXT}"
        first, second = ask("prefill-0", text), ask("prefill-1", text)
        assert second.as_message() == first.as_message()
        read.append(second.usage.cached_by_tier.get("peer", 0))
        return read[-1] > 64

    until(lent, timeout_s=60, what="blocks read from the other worker")
    no_store.assert_idle()
