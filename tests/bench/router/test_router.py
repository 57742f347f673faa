"""The router benchmark runs end to end on real processes and reports all its figures."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from bench.router.__main__ import PARTS, parse, run
from bench.router.http_client import has_text, sse_text, unchunked
from bench.router.load import closed_loop
from bench.router.stream import StreamLog


@pytest.mark.timeout(600)
def test_a_small_run_has_every_figure(tmp_path: Path) -> None:
    arguments = parse(["--only", "tokens", "--long-tokens", "50", "--requests", "16"])
    report = asyncio.run(run(arguments, tmp_path))
    for api in ("grpc", "http"):
        row = report["tokens"][api]
        assert row["tokens_per_router_cpu_s"] > 0
        assert 0 < row["messages_per_stream"] <= 50
        assert row["ttft_ms"]["p50"] <= row["total_ms"]["p50"]


def test_parts_are_named_once() -> None:
    assert parse([]).only == list(PARTS)


def test_arrivals_are_of_chunks_with_text_only() -> None:
    assert not has_text(b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n')
    assert not has_text(b'data: {"choices":[{"delta":{"content": null}}]}\n\n')
    assert has_text(b'{"content":""}{"content":"a"}')
    assert sse_text(b'data: {"choices":[{"delta":{"content":"a"}}]}\n\ndata: [DONE]\n\n') == "a"


def test_chunk_sizes_are_no_text() -> None:
    assert unchunked(b"3\r\nab\n\r\n1;x=y\r\nc\r\n0\r\n\r\n") == b"ab\nc"


async def test_a_steady_load_is_counted_from_when_all_streams_have_begun() -> None:
    running, most, asked = 0, 0, []

    async def one(index: int) -> StreamLog:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        asked.append(index)
        return StreamLog(float(index))

    logs = await closed_loop(one, streams=4, requests=12, spread_s=0.02)
    assert sorted(log.sent_s for log in logs) == list(range(12))
    assert most <= 4 and len(asked) >= 12


def test_times_are_from_the_sending() -> None:
    log = StreamLog(1.0, arrivals=[1.25, 1.5])
    assert (log.ttft_ms, log.total_ms) == (250.0, 500.0)
