"""A cluster without drafts, and a conversation whose prefill workers the test chooses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from supervisor.configuration.plan import ClusterConfig
from tests.support.clusters.local_cluster import LocalCluster

# Several blocks of text.
TEXT = "The parcel left the depot on Monday, and nobody has seen it since. Please look into it again. " * 24


def plain_config(run_dir: Path, *, kvstores: int, **more: Any) -> ClusterConfig:
    """Two prefill workers and a decode worker."""
    return ClusterConfig(
        run_dir=run_dir,
        kvstores=kvstores,
        prefill=2,
        decode=1,
        drafters=0,
        draft_model=None,
        allow_requested_prefill=True,
        **more,
    )


def ask_at(cluster: LocalCluster, worker: str, messages: list[dict[str, Any]], **more: Any) -> Any:
    """The greedy reply of 24 tokens, with its prompt computed on the given prefill worker."""
    return cluster.client.chat(
        messages,
        headers={"x-slipstream-prefill": worker},
        temperature=0.0,
        max_tokens=24,
        ignore_eos=True,
        **more,
    )
