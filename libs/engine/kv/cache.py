"""The paged latent KV cache: one page-aligned buffer, in which a block's layers are contiguous."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from libs.common.transport.registered_memory import PageAlignedMemory
from slipstream.errors import InvalidArgument

# The version of a page's layout. Increase it with any change of order, rotary pairing or normalisation; pages
# of another version are never read.
#   1: [n_layers, block_tokens, kv_lora_rank + qk_rope_head_dim], row = normed latent | roped key,
#      rotary pairs interleaved (x0,x1),(x2,x3)..., native byte order
LAYOUT_VERSION = 1

KV_DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Shape of a cache; `width` = kv_lora_rank + qk_rope_head_dim values per token and layer."""

    n_pages: int
    n_layers: int
    block_tokens: int
    width: int
    kv_dtype: str

    @property
    def page_bytes(self) -> int:
        return self.n_layers * self.block_tokens * self.width * KV_DTYPES[self.kv_dtype].itemsize


class PagedLatentCache:
    """Owns the KV memory of one model: page p = bytes [p * page_bytes, (p + 1) * page_bytes).

    `memory`, `address` and `pages` refer to the same bytes, zeroed at first. In the host they are one
    anonymous page-aligned mapping, on a CUDA device one flat tensor. The KV transport registers them once.
    """

    def __init__(
        self, shape: CacheShape, *, device: str = "cpu", host: PageAlignedMemory | None = None
    ) -> None:
        """`device`: cpu or cuda:N. `host`: the memory to use on the cpu; None = private memory."""
        if min(shape.n_pages, shape.n_layers, shape.block_tokens, shape.width) < 1:
            raise InvalidArgument("cache", f"every extent must be at least 1, got {shape}")
        if shape.kv_dtype not in KV_DTYPES:
            raise InvalidArgument("kv_dtype", f"{shape.kv_dtype!r} is not one of {sorted(KV_DTYPES)}")
        self.shape = shape
        self.page_bytes = shape.page_bytes
        self.n_bytes = shape.n_pages * shape.page_bytes
        self.memory: memoryview | torch.Tensor
        if device == "cpu":
            host = host or PageAlignedMemory(self.n_bytes, field="kv_memory_bytes")
            self.memory = host.buffer[: self.n_bytes]
            self.address: int = host.address
            flat = torch.frombuffer(self.memory, dtype=KV_DTYPES[shape.kv_dtype])
        else:
            self.memory = torch.zeros(self.n_bytes, dtype=torch.uint8, device=device)
            self.address = self.memory.data_ptr()
            flat = self.memory.view(KV_DTYPES[shape.kv_dtype])
        # [n_pages, n_layers, block_tokens, width], a view of the memory
        self.pages = flat.view(shape.n_pages, shape.n_layers, shape.block_tokens, shape.width)
