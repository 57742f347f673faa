"""The span of a pin at its lender, below the reader's."""

from __future__ import annotations

from collections.abc import Awaitable

from libs.common.telemetry import tracing
from slipstream.block_hashes import HASH_BYTES
from slipstream.enum_names import tier_names
from slipstream.v1 import kvstore_pb2


async def traced_pin(
    request: kvstore_pb2.PinRequest, answer: Awaitable[kvstore_pb2.PinResponse]
) -> kvstore_pb2.PinResponse:
    """The answer, made under a span where the request carries a context."""
    with tracing.server_span("pin", lambda: request.trace) as opened:
        pinned = await answer
        if opened.is_recording():
            n_wanted = max(0, len(request.block_hashes) // HASH_BYTES - request.first_block)
            tracing.annotate(
                opened,
                wanted_blocks=min(n_wanted, request.max_blocks or n_wanted),
                blocks=len(pinned.blocks),
                bytes=sum(block.n_bytes for block in pinned.blocks),
                tiers=tier_names(block.tier for block in pinned.blocks),
            )
        return pinned
