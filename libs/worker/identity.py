"""The fingerprint of a worker: what its KV may meet."""

from __future__ import annotations

import hashlib
from pathlib import Path

from libs.common.fingerprint import Fingerprint
from libs.engine.types import EngineInfo

# The one chat template there is (libs/text/chat_template.py). Another template is another name.
TEMPLATE = "kimi-k2.5"
_TOKENIZER_FILES = ("tiktoken.model", "tokenizer_config.json")


def tokenizer_digest(model_dir: Path | None) -> str:
    """Hex BLAKE2b-128 over the tokenizer's files; empty without any."""
    state = hashlib.blake2b(digest_size=16, person=b"slipstream-tok")
    found = False
    for name in _TOKENIZER_FILES:
        path = model_dir / name if model_dir is not None else None
        if path is not None and path.is_file():
            raw = path.read_bytes()
            state.update(name.encode() + len(raw).to_bytes(8, "little") + raw)
            found = True
    return state.hexdigest() if found else ""


def worker_fingerprint(info: EngineInfo, model_dir: Path | None) -> Fingerprint:
    """Of an engine that was loaded from `model_dir` (None: the fake engine)."""
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
