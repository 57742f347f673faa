"""First tokens and memory by the length of the prompt: cold, and for the conversation's second turn.

Every length is one conversation. Its first message is new to the cluster; its second turn repeats the first
one and adds a short question, so that all but its end is cached.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.process_memory import pss_bytes
from bench.request_log import RequestLog
from bench.serve.workloads import WORDS, measure
from slipstream.async_client import AsyncClient
from slipstream.cluster_record import ClusterRecord

_SAMPLE_WORDS = 400
_TIMEOUT_S = 3600.0
_COLUMNS = {
    "prompt_tokens": "prompt tokens",
    "ttft_ms": "TTFT ms",
    "itl_ms": "ms/token",
    "second_ttft_ms": "second TTFT ms",
    "second_cached_tokens": "cached tokens",
    "second_itl_ms": "second ms/token",
}


def long_context_model(source: Path, target: Path, max_tokens: int) -> Path:
    """The checkpoint with a larger context window: links to its files, and another config.json."""
    target.mkdir(parents=True)
    for path in source.iterdir():
        if path.name != "config.json":
            (target / path.name).symlink_to(path.resolve())
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config["max_position_embeddings"] = max(config["max_position_embeddings"], max_tokens)
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return target


async def run_lengths(
    client: AsyncClient,
    lengths: Sequence[int],
    *,
    output_tokens: int,
    seed: int,
    record: ClusterRecord | None = None,
) -> list[dict[str, Any]]:
    """A report for each length, shortest first. With `record`, also the memory of its processes then."""
    sample, _ = await ask(client, [words_of(_SAMPLE_WORDS, seed)], output_tokens, session=f"warm-{seed}")
    tokens_per_word = max(sample.prompt_tokens, 1) / _SAMPLE_WORDS
    reports = []
    for n_tokens in sorted(lengths):
        first = words_of(max(1, round(n_tokens / tokens_per_word)), seed + n_tokens)
        session = f"length-{seed}-{n_tokens}"
        cold, answer = await ask(client, [first], output_tokens, session=session)
        second, _ = await ask(client, [first, answer, words_of(20, seed)], output_tokens, session=session)
        report = report_of(cold, second)
        reports.append(report | (memory_of(record) if record else {}))
    return reports


def words_of(n_words: int, seed: int) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=n_words))


async def ask(
    client: AsyncClient, texts: Sequence[str], output_tokens: int, *, session: str
) -> tuple[RequestLog, str]:
    """Send a conversation of user and assistant in turn; returns the log and the text of the answer."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    stream = client.stream_chat(
        messages,
        temperature=0.0,
        max_tokens=output_tokens,
        ignore_eos=True,
        session=session,
        timeout_s=_TIMEOUT_S,
    )
    log = await measure(stream, time.perf_counter)
    return log, stream.reply.text or "yes"


def report_of(cold: RequestLog, second: RequestLog) -> dict[str, Any]:
    """The figures of one length."""
    figures: dict[str, Any] = {"workload": "prompt_tokens", "prompt_tokens": cold.prompt_tokens}
    for name, log in (("", cold), ("second_", second)):
        gaps = log.itl_ms()
        figures[f"{name}ttft_ms"] = None if log.ttft_ms is None else round(log.ttft_ms, 1)
        figures[f"{name}itl_ms"] = round(statistics.median(gaps), 2) if gaps else None
    figures["second_cached_tokens"] = second.cached_tokens
    errors = [log.error for log in (cold, second) if log.error]
    return figures | {"failed": len(errors), "errors": errors}


def memory_of(record: ClusterRecord) -> dict[str, Any]:
    """Proportional memory of the processes by role, in MB: a page that n processes share counts 1 / n."""
    memory: dict[str, float] = {}
    for process in record.processes:
        if process.pid is not None:
            memory[process.role] = memory.get(process.role, 0.0) + pss_bytes(process.pid) / 1e6
    return {"memory_mb": {role: round(mb) for role, mb in memory.items()}}


def as_table(reports: Sequence[Mapping[str, Any]]) -> str:
    """One line a length, with the memory of each role at its end."""
    roles = list(reports[0].get("memory_mb", {}))
    lines = ["".join(f"{title:>17}" for title in [*_COLUMNS.values(), *(f"{role} MB" for role in roles)])]
    for report in reports:
        cells = [report[column] for column in _COLUMNS] + [report["memory_mb"][role] for role in roles]
        lines.append("".join(f"{'-' if cell is None else format(cell, ','):>17}" for cell in cells))
    return "\n".join(lines)
