"""The configuration of a real local cluster whose workers run the fake engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from libs.common.cluster.worker_record import Role
from supervisor.configuration.plan import ClusterConfig

KV_MEMORY_BYTES = 64 << 20


def fake_engine_config(
    run_dir: Path, *, pace_s: float = 0.0005, decode_pace_s: float | None = None, **fields: Any
) -> ClusterConfig:
    """Two of each worker on sockets; a gate can hold the engines. `pace_s`: seconds per row of a step, which
    `decode_pace_s` overrides for decode workers."""
    engine = ["--engine", "fake", "--kv-memory-bytes", str(KV_MEMORY_BYTES), "--max-batch", "128"]
    decode_pace_s = pace_s if decode_pace_s is None else decode_pace_s
    extra = {
        Role.PREFILL: [*engine, "--fake-pace-s", str(pace_s)],
        Role.DECODE: [*engine, "--fake-pace-s", str(decode_pace_s)],
        Role.DRAFTER: ["--engine", "fake"],
        Role.KVSTORE: ["--dram-bytes", str(KV_MEMORY_BYTES), "--disk-bytes", "0"],
        **fields.pop("extra_arguments", {}),
    }
    defaults: dict[str, Any] = {"transport": "socket", "draft_model": None, "extra_arguments": extra}
    defaults["allow_requested_prefill"] = True
    defaults["drafters"] = 1
    defaults["modules"] = dict.fromkeys(Role, "tests.support.clusters.altered_service")
    return ClusterConfig(run_dir=run_dir, **(defaults | fields))
