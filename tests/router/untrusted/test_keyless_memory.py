"""Clients without a key: the router's memory stays bounded whatever they send, and they are gone soon."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.keyless.__main__ import keyed_router, measure
from slipstream import bounds

GONE_S = 100.0  # in bench.keyless it is 10 s; a test asserts no speed


@pytest.mark.parametrize("api", ["grpc", "http"])
async def test_keyless_messages_take_little_memory_and_their_connections_end(
    model_dir: Path, api: str
) -> None:
    await check(model_dir, api, connections=100, most_mb=60)


@pytest.mark.soak
@pytest.mark.parametrize("api", ["grpc", "http"])
async def test_a_thousand_keyless_messages_take_200_mb(model_dir: Path, api: str) -> None:
    await check(model_dir, api, connections=1000, most_mb=200)


async def check(model_dir: Path, api: str, *, connections: int, most_mb: float) -> None:
    async with keyed_router(model_dir) as router:
        found = await measure(
            router, api, connections=connections, message_bytes=bounds.MAX_BODY_BYTES, later_s=GONE_S
        )
    # HTTP resets a connection with an unread body; its client may miss the answer.
    assert found.refused + found.closed == connections
    assert found.refused > 0 and (api == "http" or not found.closed)
    assert found.peak_mb < most_mb
    assert found.later_connections == 0
