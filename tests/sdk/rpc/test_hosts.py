"""Addresses as text: HOST:PORT and nothing else."""

from __future__ import annotations

import pytest

from slipstream.rpc.hosts import address_of


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("localhost:7000", ("localhost", 7000)),
        ("[::1]:0", ("::1", 0)),
        ("10.0.0.1:65535", ("10.0.0.1", 65535)),
    ],
)
def test_host_and_port(text: str, address: tuple[str, int]) -> None:
    assert address_of(text) == address


@pytest.mark.parametrize("text", ["", "localhost", ":7000", "localhost:", "localhost:65536", "a:-1", "a:x"])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be HOST:PORT, not"):
        address_of(text)
