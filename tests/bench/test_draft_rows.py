"""bench.draft_rows measures both ways on real processes, and its link delays every byte and changes none."""

from __future__ import annotations

import os
import socket
import threading
import time

import pytest

from bench.delayed_link import delayed_links
from bench.draft_rows import WAYS, measure
from libs.worker.requests.messages import FEATURE_BYTES


@pytest.mark.parametrize("delay_s", [0.0, 0.05])
def test_a_link_delivers_all_bytes_late_and_in_order(delay_s: float) -> None:
    sent = os.urandom(3 << 20)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def echo() -> None:
            connection, _ = server.accept()
            with connection:
                while data := connection.recv(1 << 16):
                    connection.sendall(data)

        threading.Thread(target=echo, daemon=True).start()
        with (
            delayed_links([server.getsockname()[1]], delay_s) as (port,),
            socket.create_connection(("127.0.0.1", port), timeout=60) as connection,
        ):
            began_s = time.monotonic()
            threading.Thread(target=connection.sendall, args=(sent,), daemon=True).start()
            received = b""
            while len(received) < len(sent):
                data = connection.recv(1 << 16)
                assert data
                assert received or time.monotonic() - began_s >= 2 * delay_s  # there and back
                received += data
    assert received == sent


@pytest.mark.parametrize("delay_ms", [0.0, 0.1])
async def test_both_ways_are_measured(delay_ms: float) -> None:
    (row,) = await measure([(20, 16)], "socket", 1, delay_ms)
    assert (row["size"], row["n_bytes"]) == ("20x16", 20 * 16 * FEATURE_BYTES)
    for side in (*WAYS, "ratio"):
        assert set(row[side]) == {"answer_ms", "cpu_ms", "step_ms"} and min(row[side].values()) > 0
