"""Workloads of the placement simulation: a Mooncake trace, and generated agent sessions."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import dataclass
from pathlib import Path

BLOCK_TOKENS = 512  # of Mooncake's traces


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request. `hashes` name the prompt's full blocks, each with all before it."""

    number: int
    at_ms: float
    prompt_tokens: int
    output_tokens: int
    hashes: tuple[bytes, ...]
    session: str


def read_trace(path: Path, *, speed: float = 1.0) -> list[TraceRequest]:
    """A trace in Mooncake's format: a row {timestamp (ms), input_length, output_length, hash_ids} a line.

    It names no sessions. Conversations share all their blocks but the first, which all have: the session is
    the second block, as good a key as a client could send. Its clock ticks every 3 s; the requests of a tick
    are spread evenly over it.
    """
    with path.open(encoding="utf-8") as lines:
        rows = sorted((json.loads(line) for line in lines), key=lambda row: float(row["timestamp"]))
    requests: list[TraceRequest] = []
    ticks = [list(group) for _, group in itertools.groupby(rows, key=lambda row: row["timestamp"])]
    for tick, following in zip(ticks, [*ticks[1:], []], strict=True):
        starts_ms = tick[0]["timestamp"]
        lasts_ms = following[0]["timestamp"] - starts_ms if following else 0.0
        for i, row in enumerate(tick):
            ids = row["hash_ids"]
            requests.append(
                TraceRequest(
                    number=len(requests),
                    at_ms=(starts_ms + lasts_ms * i / len(tick)) / speed,
                    prompt_tokens=max(row["input_length"], 1),
                    output_tokens=max(row["output_length"], 1),
                    hashes=tuple(
                        block.to_bytes(16, "little") for block in ids[: row["input_length"] // BLOCK_TOKENS]
                    ),
                    session=str(ids[min(1, len(ids) - 1)]),
                )
            )
    return requests


@dataclass(frozen=True, slots=True)
class AgentShape:
    """How generated agents behave. Lengths in blocks of 512 tokens, times in milliseconds."""

    sessions_per_s: float = 0.25
    duration_ms: float = 600_000.0
    tools_blocks: tuple[int, ...] = (12, 24, 40, 8)  # one system prompt with its tools for each kind of agent
    turns: tuple[int, int] = (5, 30)
    turn_blocks: tuple[int, int] = (0, 6)  # what a tool returned; 0: only a few lines
    gap_ms: float = 9_000.0  # mean time from one turn to the next
    burst_share: float = 0.1  # turns at which sub-agents begin, all at once
    burst_sessions: tuple[int, int] = (4, 12)
    output_tokens: tuple[int, int] = (40, 400)


def agent_sessions(shape: AgentShape, *, seed: int = 0) -> list[TraceRequest]:
    """Agents with a large common prompt that grow turn by turn, and bursts of sub-agents that share a
    parent's prompt. Open loop: a slow answer delays nothing."""
    draw = random.Random(seed)
    rows: list[tuple[float, int, int, tuple[bytes, ...], str]] = []
    fresh = iter(range(1, 1 << 62))

    def block() -> bytes:
        return next(fresh).to_bytes(16, "little")

    kinds = [tuple(block() for _ in range(n)) for n in shape.tools_blocks]

    def run(name: str, at_ms: float, hashes: tuple[bytes, ...], n_turns: int, *, may_burst: bool) -> None:
        for turn in range(n_turns):
            hashes = (*hashes, *(block() for _ in range(draw.randint(*shape.turn_blocks))))
            tail = draw.randint(1, BLOCK_TOKENS - 1)
            output = draw.randint(*shape.output_tokens)
            rows.append((at_ms, len(hashes) * BLOCK_TOKENS + tail, output, hashes, name))
            if may_burst and draw.random() < shape.burst_share:
                for child in range(draw.randint(*shape.burst_sessions)):
                    run(f"{name}/{turn}.{child}", at_ms + child, hashes, draw.randint(1, 3), may_burst=False)
            at_ms += draw.expovariate(1 / shape.gap_ms)

    at_ms = 0.0
    number = 0
    while (at_ms := at_ms + draw.expovariate(shape.sessions_per_s / 1e3)) < shape.duration_ms:
        number += 1
        run(f"s{number}", at_ms, draw.choice(kinds), draw.randint(*shape.turns), may_burst=True)
    rows.sort(key=lambda row: row[0])
    return [
        TraceRequest(n, at, prompt, out, hashes, s) for n, (at, prompt, out, hashes, s) in enumerate(rows)
    ]
