"""Time to parse HTTP bodies into requests, in microseconds, beside plain `json.loads` of the same bytes.

python -m bench.router.parsing
"""

from __future__ import annotations

import argparse
import json
import timeit
from collections.abc import Callable, Mapping
from typing import Any

from services.router.api.openai_request import parse_chat

USER = {"role": "user", "content": "What is the capital of France?"}


def bodies() -> Mapping[str, bytes]:
    """A short chat, a conversation of 160 KB, and a short chat with 20 tools."""
    short: dict[str, Any] = {"model": "kimi", "messages": [USER], "stream": True, "max_tokens": 64}
    text = "The quick brown fox jumps over the lazy dog. " * 18
    turns = [{"role": ("user", "assistant")[i % 2], "content": text} for i in range(200)]
    tools = [_tool(index) for index in range(20)]
    shapes = {
        "short": short,
        "160 KB": {**short, "messages": [*turns, USER]},
        "20 tools": {**short, "tools": tools, "temperature": 0.6},
    }
    return {name: json.dumps(body).encode() for name, body in shapes.items()}


def _tool(index: int) -> dict[str, Any]:
    properties = {f"field_{i}": {"type": "string", "description": "what to look for"} for i in range(5)}
    parameters = {"type": "object", "properties": properties, "required": ["field_0"]}
    function = {"name": f"tool_{index}", "description": "Looks something up.", "parameters": parameters}
    return {"type": "function", "function": function}


def fastest_us(call: Callable[[], object], repeats: int) -> float:
    """The fastest mean of `repeats` rounds of about 20 ms."""
    timer = timeit.Timer(call)
    rounds = max(1, int(0.02 / timer.timeit(1)))
    return min(timer.repeat(repeats, rounds)) / rounds * 1e6


def main() -> None:
    """Print one line a body."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args()
    print(f"{'body':>10} {'bytes':>8} {'parse us':>10} {'json us':>10} {'ratio':>6}")
    for name, body in bodies().items():
        parse_us = fastest_us(lambda body=body: parse_chat(body), options.repeats)  # type: ignore[misc]
        json_us = fastest_us(lambda body=body: json.loads(body), options.repeats)  # type: ignore[misc]
        print(f"{name:>10} {len(body):>8} {parse_us:>10.1f} {json_us:>10.1f} {parse_us / json_us:>6.2f}")


if __name__ == "__main__":
    main()
