"""The configuration of a real local cluster whose workers run the fake engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from libs.common.cluster.worker_record import Role
from supervisor.plan import ClusterConfig

KV_MEMORY_BYTES = 64 << 20


def fake_engine_config(run_dir: Path, *, pace_s: float = 0.0005, **fields: Any) -> ClusterConfig:
    """Two of each worker on sockets; a gate can hold the engines. `pace_s`: seconds per row of a step."""
    engine = ["--engine", "fake", "--fake-pace-s", str(pace_s), "--kv-memory-bytes", str(KV_MEMORY_BYTES)]
    engine += ["--max-batch", "128"]
    extra = {
        Role.PREFILL: engine,
        Role.DECODE: engine,
        Role.DRAFTER: ["--engine", "fake"],
        Role.KVSTORE: ["--dram-bytes", str(KV_MEMORY_BYTES), "--disk-bytes", "0"],
        **fields.pop("extra_arguments", {}),
    }
    defaults: dict[str, Any] = {"transport": "socket", "draft_model": None, "extra_arguments": extra}
    defaults["allow_pinning"] = True
    defaults["drafters"] = 1
    defaults["modules"] = dict.fromkeys(Role, "tests.support.clusters.altered_service")
    return ClusterConfig(run_dir=run_dir, **(defaults | fields))
