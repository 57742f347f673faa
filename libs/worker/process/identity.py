"""The fingerprint of a worker: what its KV may meet."""

from __future__ import annotations

import hashlib
from pathlib import Path

from libs.common.cluster.fingerprint import TEMPLATE, Fingerprint, tokenizer_digest
from libs.engine.step.types import EngineInfo


def worker_fingerprint(info: EngineInfo, model_dir: Path | None) -> Fingerprint:
    """The fingerprint of an engine that was loaded from `model_dir` (None: the fake engine)."""
    return Fingerprint(
        model=info.weights_digest,
        tokenizer=tokenizer_digest(model_dir),
        template=TEMPLATE,
        kv_dtype=info.kv_dtype,
        block_tokens=info.block_tokens,
        layout_version=info.layout_version,
        drafter=info.drafter_digest,
    )


def head_fingerprint(digest: str) -> bytes:
    """How a drafter's record in discovery names its head: 16 bytes for the digest of the head's files."""
    return hashlib.blake2b(digest.encode(), digest_size=16, person=b"slipstream-head").digest()
