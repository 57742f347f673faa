"""The fingerprint: fields that must be equal for a process to use another one's KV."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from libs.common.worker_bounds import MAX_TOKENIZER_FILE_BYTES
from slipstream.credentials.bounded_file import read_bounded
from slipstream.enum_names import KV_DTYPES
from slipstream.v1 import common_pb2

# Version of the page layout: [layers, block_tokens, latent | roped key], rows interleaved RoPE.
LAYOUT_VERSION = 1
# The name of the chat template (libs/text/chat_template.py).
TEMPLATE = "kimi-k2.5"
_TOKENIZER_FILES = ("tiktoken.model", "tokenizer_config.json")


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Digests are hex; `drafter` is empty without a draft head. See protos/slipstream/v1/common.proto."""

    model: str
    tokenizer: str
    template: str
    kv_dtype: str
    block_tokens: int
    layout_version: int = LAYOUT_VERSION
    drafter: str = ""

    @property
    def digest(self) -> bytes:
        """BLAKE2b-128 over all fields: the root of the block hash."""
        fields = (
            self.model,
            self.tokenizer,
            self.template,
            self.kv_dtype,
            str(self.block_tokens),
            str(self.layout_version),
            self.drafter,
        )
        state = hashlib.blake2b(digest_size=16, person=b"slipstream-fp")
        for field in fields:
            raw = field.encode()
            state.update(len(raw).to_bytes(4, "little") + raw)
        return state.digest()

    def to_proto(self) -> common_pb2.Fingerprint:
        """The message, with the digest. Raises KeyError for a KV type that the contract lacks."""
        return common_pb2.Fingerprint(
            digest=self.digest,
            model=self.model,
            tokenizer=self.tokenizer,
            template=self.template,
            kv_dtype=KV_DTYPES.value(self.kv_dtype),
            block_tokens=self.block_tokens,
            layout_version=self.layout_version,
            drafter=self.drafter,
        )


def differences(one: common_pb2.Fingerprint, other: common_pb2.Fingerprint) -> list[str]:
    """Names of the fields that differ; empty if the KV is compatible. An unknown type of KV differs."""
    return [
        field.name
        for field in one.DESCRIPTOR.fields
        if getattr(one, field.name) != getattr(other, field.name)
    ]


def tokenizer_digest(model_dir: Path | None) -> str:
    """Hex BLAKE2b-128 of the tokenizer's files; empty without any."""
    state = hashlib.blake2b(digest_size=16, person=b"slipstream-tok")
    found = False
    for name in _TOKENIZER_FILES:
        path = model_dir / name if model_dir is not None else None
        if path is not None and path.is_file():
            raw = read_bounded(path, max_bytes=MAX_TOKENIZER_FILE_BYTES)
            state.update(name.encode() + len(raw).to_bytes(8, "little") + raw)
            found = True
    return state.hexdigest() if found else ""
