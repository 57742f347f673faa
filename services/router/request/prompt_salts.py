"""The salts of block hashes: that of a tenant, and that of a prefix which all tenants share. Pure."""

from __future__ import annotations

import numpy as np

from libs.common.block_hash import (
    NOTHING_SHARED,
    SharedPrefix,
    TokenArray,
    as_tokens,
    shared_salt,
    tenant_salt,
)
from libs.text.chat_template import encode_chat
from libs.text.tokenizer import Tokenizer


class PromptSalts:
    """One for each router. All routers of a cluster need the same key and the same shared prefix."""

    def __init__(self, key: bytes = b"", shared_ids: TokenArray | None = None) -> None:
        """`key`: of the cluster's secret; `shared_ids`: the tokens that every tenant may share."""
        self._key = key
        self._shared_ids = as_tokens([]) if shared_ids is None else shared_ids

    def of_tenant(self, tenant: str) -> bytes:
        """The salt of a tenant."""
        return tenant_salt(tenant, key=self._key)

    def shared(self, ids: TokenArray, *, block_tokens: int) -> SharedPrefix:
        """The leading blocks of a prompt that lie within the shared prefix."""
        n = min(len(ids), len(self._shared_ids))
        if not n:  # as where no prefix is shared
            return NOTHING_SHARED
        different = np.flatnonzero(ids[:n] != self._shared_ids[:n])
        n_blocks = (int(different[0]) if len(different) else n) // block_tokens
        return SharedPrefix(shared_salt(key=self._key), n_blocks) if n_blocks else NOTHING_SHARED


def system_prompt_ids(tokenizer: Tokenizer, text: str) -> TokenArray:
    """The first tokens of each conversation without tools that begins with this system prompt."""
    messages = [{"role": "system", "content": text}]
    return as_tokens(encode_chat(tokenizer, messages, add_generation_prompt=False).token_ids)
